"""The scheduler: which requests compute how many tokens in the next step (section 7 of the rules).

There are no phases. Prefill and decode differ only in how many tokens a request is behind (R7.2), and whoever does not fit is preempted by
giving everything back and starting over later (R7.5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.core.block_hash import BlockHash
from engine.core.compat import check_compat
from engine.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from engine.core.kv_cache_spec import KVCacheConfig
from engine.core.kv_events import KVCacheEvent
from engine.core.mamba_split import make_mamba_split
from engine.core.output import ModelRunnerOutput, SampledToken, SchedulerOutput
from engine.core.request import FINISH_REASONS, Request, RequestStatus
from engine.core.request_check import check_request
from engine.core.request_queue import RequestQueue, create_request_queue, num_ahead, select_waiting_queue
from engine.core.scheduler_config import SchedulerConfig, SchedulingPolicy
from engine.core.scheduler_output import make_scheduler_output
from engine.core.step_plan import StepPlan, why_admitted, why_so_many
from engine.core.stop_check import check_stop
from engine.errors import EngineError, InvalidInput
from engine.trace.events import (
    Cause,
    CauseKind,
    Emit,
    RequestAdded,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    RequestScheduled,
    StepScheduled,
    StepStarted,
    TokenSampled,
)

__all__ = ["Scheduler", "SchedulerConfig", "SchedulingPolicy"]


class Scheduler:
    """Waiting and running requests over one KV-cache manager.

    `running` is in order of admission, `waiting` in order of service, `requests` holds both; `skipped_waiting` those that a step passed over because tokens
    of theirs are still on the way. `block_hasher` is given to requests that bring none (None: they are not hashed). `block_size`: of the model's cache, to
    which chunks are cut in Mamba mode ``align``; the other settings as in KVCacheManager. By default, requests that can never finish are refused at the
    door, a double free raises, and a request that leaves the plan of a step takes along the hashes of blocks that this step would have filled; with
    `compat` as in `engine.core.compat`. Raises InvalidInput for impossible settings. vLLM: Scheduler and AsyncScheduler; here: one class, finished requests
    are handed back, no drafts, no KV connector, no encoder.
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        kv_cache_config: KVCacheConfig,
        *,
        enable_caching: bool = True,
        block_hasher: Callable[[Request], list[BlockHash]] | None = None,
        hash_block_size: int | None = None,
        scheduler_block_size: int | None = None,
        block_size: int | None = None,
        use_eagle: bool = False,
        retention_interval: int | None = None,
        dcp_world_size: int = 1,
        max_in_flight_tokens: int | None = None,
        emit: Emit | None = None,
        enable_kv_cache_events: bool = False,
        compat: str | None = None,
    ) -> None:
        self.scheduler_config = scheduler_config
        self.kv_cache_config = kv_cache_config
        self.enable_caching = enable_caching
        self.block_hasher = block_hasher
        self.strict = check_compat(compat) is None
        self.kv_cache_manager = KVCacheManager(
            kv_cache_config,
            scheduler_config.max_model_len,
            hash_block_size=hash_block_size,
            scheduler_block_size=scheduler_block_size,
            max_in_flight_tokens=scheduler_config.max_in_flight_tokens if max_in_flight_tokens is None else max_in_flight_tokens,
            enable_caching=enable_caching,
            use_eagle=use_eagle,
            watermark=scheduler_config.watermark,
            retention_interval=retention_interval,
            dcp_world_size=dcp_world_size,
            enable_kv_cache_events=enable_kv_cache_events,
            emit=emit,
            compat=compat,
        )
        self._mamba_split = make_mamba_split(kv_cache_config, scheduler_config, self.kv_cache_manager.coordinator, block_size, use_eagle)
        self.policy = SchedulingPolicy(scheduler_config.policy)
        self.waiting: RequestQueue = create_request_queue(self.policy)
        self.skipped_waiting: RequestQueue = create_request_queue(self.policy)
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.current_step = 0
        """Engine steps planned so far; whoever lets idle steps pass may move it on."""
        self.finished_req_ids: set[str] = set()
        """Finished since the last schedule(); the worker drops their rows."""
        self.reset_preempted_req_ids: set[str] = set()
        self._emit = emit

    # ------------------------------------------------------------------ requests come and go
    def check_request(self, request: Request) -> None:
        """Raises InvalidInput when `request` could never finish here (see request_check). Changes nothing."""
        check_request(request, self.scheduler_config, self.kv_cache_manager)

    def add_request(self, request: Request) -> None:
        """Queue a new request. Raises InvalidInput, changing nothing, for an id that is in use and for what check_request refuses."""
        if request.request_id in self.requests:
            raise InvalidInput(f"there is a request {request.request_id!r} already: give every request its own id")
        if self.strict:
            self.check_request(request)
        if self.enable_caching and self.block_hasher is not None and request.block_hasher is None:
            request.set_block_hasher(self.block_hasher)
        self.requests[request.request_id] = request
        self.waiting.add_request(request)
        if self._emit is not None:
            cause, num_prompt, num_hashes = Cause(CauseKind.SCENARIO, {"what": "arrival"}), request.num_prompt_tokens, len(request.block_hashes)
            ahead = num_ahead(request, self.waiting, self.skipped_waiting) if self.policy is SchedulingPolicy.PRIORITY else None
            request_id = request.request_id
            self._emit(RequestAdded(cause=cause, request_id=request_id, num_prompt_tokens=num_prompt, num_block_hashes=num_hashes, num_ahead=ahead))

    def finish_requests(self, request_ids: str | Iterable[str], finished_status: RequestStatus) -> list[Request]:
        """End requests from outside, e.g. when somebody aborts them; unknown ids are passed over. Returns the requests that ended.

        Raises ValueError when `finished_status` is not an end."""
        if not finished_status.is_finished:
            raise ValueError(f"{finished_status.name} is not the end of a request")
        ended: list[Request] = []
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished():
                self._finish(request, finished_status, Cause(CauseKind.SCENARIO, {"what": FINISH_REASONS[finished_status]}))
                ended.append(request)
        return ended

    def has_unfinished_requests(self) -> bool:
        """Whether anything is left to do."""
        return bool(self.requests)

    # ------------------------------------------------------------------ one step
    def schedule(self) -> SchedulerOutput:
        """Plan one step (R7.1): running requests in order, then waiting ones unless somebody was preempted; then num_computed_tokens moves on,
        before anything has run."""
        plan = StepPlan(token_budget=self.scheduler_config.max_num_batched_tokens)
        if self._emit is not None:
            facts = {"num_running": len(self.running), "num_waiting": len(self.waiting)}
            self._emit(StepStarted(cause=Cause(CauseKind.NEXT_STEP, dict(facts)), token_budget=plan.token_budget))
        self.current_step += 1
        self.kv_cache_manager.new_step_starts(self.current_step)
        self._schedule_running(plan)
        if not plan.preempted:
            self._schedule_waiting(plan)
        return self._finish_plan(plan)

    def _schedule_running(self, plan: StepPlan) -> None:
        index = 0
        while index < len(self.running) and plan.token_budget > 0:
            request = self.running[index]
            num_wanted = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
            num_new_tokens = min(self._capped(num_wanted), plan.token_budget)
            # One place stays free for the token that this step will give.
            num_new_tokens = min(num_new_tokens, self.scheduler_config.max_model_len - 1 - request.num_computed_tokens)
            cut: Cause | None = None
            if self._mamba_split is not None:
                num_new_tokens, cut = self._mamba_split(request, num_new_tokens, request.num_computed_tokens)
            # A prompt as long as max_model_len gets here with -1, which vLLM goes on with; by default it is refused at the door.
            if num_new_tokens == 0 or (self.strict and num_new_tokens < 0) or request.ends_with_running_steps():
                index += 1
                continue
            new_blocks = self.kv_cache_manager.allocate_slots(request, num_new_tokens)
            while new_blocks is None:
                victim, earlier = self._preempt_for(request, plan)
                index -= earlier
                if victim is request:
                    return
                new_blocks = self.kv_cache_manager.allocate_slots(request, num_new_tokens)
            self._take(request, num_wanted, num_new_tokens, new_blocks, plan, cut)
            plan.running.append(request)
            index += 1

    def _preempt_for(self, request: Request, plan: StepPlan) -> tuple[Request, int]:
        """Preempt one running request so that `request` may fit (R7.5); also tells by how many places `request` moved forward."""
        if self.policy is SchedulingPolicy.PRIORITY:
            victim = max(self.running, key=lambda r: (r.priority, r.arrival_time))
            cause = Cause(CauseKind.LOWEST_PRIORITY, {"for_request": request.request_id, "priority": victim.priority})
            self.running.remove(victim)
            earlier = int(plan.unschedule(victim))
        else:
            victim = self.running.pop()
            cause = Cause(CauseKind.LAST_RUNNING, {"for_request": request.request_id})
            earlier = 0
        self._preempt(victim, cause)
        plan.preempted.append(victim.request_id)
        return victim, earlier

    def _preempt(self, request: Request, cause: Cause, drop_stale_output: bool = False) -> None:
        """Everything back, progress to 0, to the front of the queue. The caller has taken `request` out of `running`. Tokens that running steps still
        bring are appended all the same, or lost with `drop_stale_output`."""
        if request.status is not RequestStatus.RUNNING:
            raise EngineError(f"request {request.request_id} cannot be preempted: it is {request.status.name}")
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.waiting.prepend_request(request)
        num_lost_tokens, request.num_computed_tokens = request.num_computed_tokens, 0
        request.drop_stale_output = drop_stale_output or (request.drop_stale_output and request.num_stale_output_tokens > 0)
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.num_output_placeholders = 0
        self.reset_preempted_req_ids.add(request.request_id)
        if self._emit is not None:
            ahead = num_ahead(request, self.waiting, self.skipped_waiting)
            self._emit(RequestPreempted(cause=cause, request_id=request.request_id, num_lost_tokens=num_lost_tokens, num_ahead=ahead))
        cause = Cause(CauseKind.PREEMPTED)
        if self.strict:
            self.kv_cache_manager.evict_unwritten_blocks(request.request_id, num_lost_tokens, cause)
        self.kv_cache_manager.free(request, cause)

    def _schedule_waiting(self, plan: StepPlan) -> None:
        passed_over: list[Request] = []
        while len(self.waiting) + len(self.skipped_waiting) and plan.token_budget > 0 and len(self.running) < self.scheduler_config.max_num_seqs:
            queue = select_waiting_queue(self.waiting, self.skipped_waiting)
            request = queue.peek_request()
            if request.num_stale_output_tokens > 0 and not request.drop_stale_output:
                # A step on its way brings a token of this request: admitted now, it would sample that position again.
                passed_over.append(queue.pop_request())
            elif not self._admit(request, queue, plan):
                break  # nobody overtakes a request that does not fit (R7.3)
        for request in reversed(passed_over):
            self.skipped_waiting.prepend_request(request)

    def _admit(self, request: Request, queue: RequestQueue, plan: StepPlan) -> bool:
        """Move the head of `queue` to the running list and schedule it; False, changing nothing, when it has to wait."""
        config = self.scheduler_config
        num_free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        computed = self.kv_cache_manager.get_computed_blocks(request)
        request.shared_prefix_boundary = computed.junction
        num_wanted = request.num_tokens - computed.num_tokens
        num_new_tokens = self._capped(num_wanted)
        if num_new_tokens > plan.token_budget and not config.enable_chunked_prefill:
            return False
        num_new_tokens = min(num_new_tokens, plan.token_budget)
        cut: Cause | None = None
        if self._mamba_split is not None:
            num_new_tokens, cut = self._mamba_split(request, num_new_tokens, computed.num_tokens)
            if num_new_tokens == 0:
                return False
        new_blocks = self.kv_cache_manager.allocate_slots(
            request,
            num_new_tokens,
            computed.num_tokens,
            computed.blocks,
            full_sequence_must_fit=config.scheduler_reserve_full_isl,
            has_scheduled_reqs=bool(self.running),
        )
        if new_blocks is None:
            return False
        self.kv_cache_manager.record_prefix_cache_stats(request, computed.num_tokens)
        resumed = request.status is RequestStatus.PREEMPTED
        queue.pop_request()
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = computed.num_tokens
        (plan.resumed if resumed else plan.new).append(request)
        if self._emit is not None:
            num_required = num_free - self.kv_cache_manager.block_pool.get_num_free_blocks()
            cause = why_admitted(request, self.policy is SchedulingPolicy.PRIORITY, num_required, num_free)
            self._emit(RequestAdmitted(cause=cause, request_id=request.request_id, num_computed_tokens=computed.num_tokens, resumed=resumed))
        self._take(request, num_wanted, num_new_tokens, new_blocks, plan, cut)
        return True

    def _capped(self, num_wanted: int) -> int:
        threshold = self.scheduler_config.long_prefill_token_threshold
        return min(num_wanted, threshold) if threshold else num_wanted

    def _take(self, request: Request, num_wanted: int, num_new_tokens: int, new_blocks: KVCacheBlocks, plan: StepPlan, cut: Cause | None) -> None:
        """Write `num_new_tokens` of `request` into the plan and say why it is this number; `cut`: why it was cut at the end of a state."""
        token_budget = plan.token_budget
        plan.take(request, num_new_tokens, new_blocks)
        if self._emit is None:
            return
        cause = cut or why_so_many(request, num_wanted, self._capped(num_wanted), num_new_tokens, token_budget)
        request_id, num_computed_tokens = request.request_id, request.num_computed_tokens
        self._emit(RequestScheduled(cause=cause, request_id=request_id, num_scheduled_tokens=num_new_tokens, num_computed_tokens=num_computed_tokens))

    def _finish_plan(self, plan: StepPlan) -> SchedulerOutput:
        manager = self.kv_cache_manager
        common = manager.get_num_common_prefix_blocks(self.running[0].request_id) if self.running else [0] * manager.num_kv_cache_groups
        copies, retained = manager.take_kv_cache_block_copies()
        manager.release_copied_blocks(retained)
        output = make_scheduler_output(plan, manager, common, copies, self.finished_req_ids, self.reset_preempted_req_ids)
        for request_id, num_new_tokens in plan.num_scheduled_tokens.items():
            request = self.requests[request_id]
            request.num_computed_tokens += num_new_tokens
            request.num_in_flight_tokens += num_new_tokens
            request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens + request.num_output_placeholders
        if self.scheduler_config.async_scheduling:
            for request in [self.requests[request_id] for request_id in plan.num_scheduled_tokens]:
                request.num_output_placeholders += not request.is_prefill_chunk
        self.finished_req_ids = set()  # only now: both are part of the output
        self.reset_preempted_req_ids = set()
        if self._emit is not None:
            self._emit(
                StepScheduled(
                    cause=Cause(CauseKind.NEXT_STEP, {"num_running": len(self.running), "num_waiting": len(self.waiting)}),
                    num_scheduled_tokens=dict(plan.num_scheduled_tokens),
                    token_budget_left=plan.token_budget,
                )
            )
        return output

    # ------------------------------------------------------------------ the model has answered
    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> list[Request]:
        """Append the sampled tokens, request by request in the order of the step, and end who is done, freeing at once (R7.8). Returns those.

        Called once per schedule(), in the same order; asynchronously there may be later schedules meanwhile."""
        ended: list[Request] = []
        for request_id, num_scheduled_tokens in scheduler_output.num_scheduled_tokens.items():
            if num_scheduled_tokens <= 0:
                raise EngineError(f"a step of {num_scheduled_tokens} tokens of request {request_id} cannot have run")
            request = self.requests.get(request_id)
            if request is None:
                continue  # aborted while the model ran
            is_stale = request.step_is_over(num_scheduled_tokens)
            if request.is_finished() or (is_stale and request.drop_stale_output):
                continue
            tokens = model_runner_output.sampled.get(request_id)
            end = self._append_tokens(request, tokens, is_stale) if tokens else None
            if end is not None:
                self._finish(request, *end, stays_running=not self.strict)
                ended.append(request)
        if not self.strict:  # vLLM clears the list at the end, so an error on the way leaves finished requests in it
            self.running = [request for request in self.running if request not in ended]
        return ended

    def _append_tokens(self, request: Request, tokens: Iterable[SampledToken], is_stale: bool) -> tuple[RequestStatus, Cause] | None:
        """Append until one is the last. Asynchronously, what they fill is registered only now, because nobody knew them before (R7.7)."""
        end: tuple[RequestStatus, Cause] | None = None
        num_appended = 0
        for token in tokens:
            self._append_token(request, token)
            num_appended += 1
            end = check_stop(request, self.scheduler_config.max_model_len)
            if end is not None:
                break
        if self.scheduler_config.async_scheduling:
            if not is_stale:
                request.num_output_placeholders -= num_appended
                if request.num_output_placeholders < 0:
                    request.status = end[0] if end is not None else request.status
                    raise EngineError(f"request {request.request_id} was given more tokens than its steps had places for")
            if request.status is RequestStatus.RUNNING:
                self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens - request.num_output_placeholders)
        return end

    def _append_token(self, request: Request, token: SampledToken) -> None:
        request.append_output_token_ids(token.token_id)
        if self._emit is not None:
            self._emit(
                TokenSampled(
                    cause=token.cause,
                    request_id=request.request_id,
                    token_id=token.token_id,
                    position=request.num_tokens - 1,
                    num_block_hashes=len(request.block_hashes),
                )
            )

    def _finish(self, request: Request, status: RequestStatus, cause: Cause, stays_running: bool = False) -> None:
        if request.status is RequestStatus.RUNNING:
            if not stays_running:
                self.running.remove(request)
        else:
            (self.waiting if request in self.waiting else self.skipped_waiting).remove_request(request)
        request.status = status
        reason = FINISH_REASONS[status]
        self.finished_req_ids.add(request.request_id)
        if self._emit is not None:
            self._emit(RequestFinished(cause=cause, request_id=request.request_id, reason=reason))
        self.kv_cache_manager.free(request, Cause(CauseKind.REQUEST_FINISHED, {"reason": reason}))
        del self.requests[request.request_id]

    # ------------------------------------------------------------------ the prefix cache
    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget the prefix cache if nothing is in use; else False. With `reset_running_requests` every running request is preempted first, from
        the back, so that it succeeds (R1.14); the worker hears of them with the next step."""
        if reset_running_requests:
            while self.running:
                victim = self.running.pop()
                self._preempt(victim, Cause(CauseKind.SCENARIO, {"what": "reset"}), drop_stale_output=True)
        ok = self.kv_cache_manager.reset_prefix_cache()
        if reset_running_requests and not ok:
            raise EngineError("the prefix cache cannot be reset: blocks are in use although no request is running any more")
        return ok

    def take_events(self) -> list[KVCacheEvent]:
        """Hand over the KV events since the last call (R9.1)."""
        return self.kv_cache_manager.take_events()
