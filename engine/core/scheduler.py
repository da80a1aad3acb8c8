"""The scheduler: which requests compute how many tokens in the next step (section 7 of the rules).

There are no phases. Prefill and decode differ only in how many tokens a request is behind (R7.2), and whoever does not fit is preempted by
giving everything back and starting over later (R7.5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.core.block_hash import BlockHash
from engine.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from engine.core.kv_cache_spec import KVCacheConfig
from engine.core.kv_events import KVCacheEvent
from engine.core.output import CachedRequestData, ModelRunnerOutput, NewRequestData, SampledToken, SchedulerOutput
from engine.core.request import FINISH_REASONS, Request, RequestStatus
from engine.core.request_check import check_request
from engine.core.request_queue import RequestQueue, create_request_queue
from engine.core.scheduler_config import SchedulerConfig, SchedulingPolicy
from engine.core.step_plan import StepPlan
from engine.errors import InvalidInput
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

    `running` is in order of admission, `waiting` in order of service, `requests` holds both. `block_hasher` is given to requests that bring none (None: they
    are not hashed). With `strict`, requests that can never finish are refused at the door, a double free raises, and a request
    that leaves the plan of a step takes along the hashes of blocks that this step would have filled. Raises InvalidInput for impossible
    settings. vLLM: Scheduler; here: finished requests are handed back, and `strict` (vLLM lets such requests wait or preempt themselves for ever).
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        kv_cache_config: KVCacheConfig,
        *,
        enable_caching: bool = True,
        block_hasher: Callable[[Request], list[BlockHash]] | None = None,
        hash_block_size: int | None = None,
        use_eagle: bool = False,
        emit: Emit | None = None,
        enable_kv_cache_events: bool = False,
        strict: bool = True,
    ) -> None:
        self.scheduler_config = scheduler_config
        self.kv_cache_config = kv_cache_config
        self.enable_caching = enable_caching
        self.block_hasher = block_hasher
        self.strict = strict
        self.kv_cache_manager = KVCacheManager(
            kv_cache_config,
            scheduler_config.max_model_len,
            hash_block_size=hash_block_size,
            enable_caching=enable_caching,
            use_eagle=use_eagle,
            watermark=scheduler_config.watermark,
            enable_kv_cache_events=enable_kv_cache_events,
            emit=emit,
            strict=strict,
        )
        self.policy = SchedulingPolicy(scheduler_config.policy)
        self.waiting: RequestQueue = create_request_queue(self.policy)
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.finished_req_ids: set[str] = set()
        self.reset_preempted_req_ids: set[str] = set()
        """Finished since the last schedule(); the worker drops their rows."""
        self._emit = emit

    # ------------------------------------------------------------------ requests come and go
    def check_request(self, request: Request) -> None:
        """Raises InvalidInput when `request` could never finish here (see request_check). Changes nothing."""
        check_request(request, self.scheduler_config, self.kv_cache_config)

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
            self._emit(
                RequestAdded(
                    cause=Cause(CauseKind.SCENARIO, {"what": "arrival"}),
                    request_id=request.request_id,
                    num_prompt_tokens=request.num_prompt_tokens,
                    num_block_hashes=len(request.block_hashes),
                )
            )

    def finish_requests(self, request_ids: str | Iterable[str], finished_status: RequestStatus) -> list[Request]:
        """End requests from outside, e.g. when somebody aborts them; unknown ids are passed over. Returns the requests that ended.

        Raises ValueError when `finished_status` is not an end."""
        if not finished_status.is_finished:
            raise ValueError(f"{finished_status.name} is not the end of a request")
        ended: list[Request] = []
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            request = self.requests.get(request_id)
            if request is not None:
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
        self.kv_cache_manager.new_step_starts()
        self._schedule_running(plan)
        if not plan.preempted:
            self._schedule_waiting(plan)
        return self._finish_plan(plan)

    def _schedule_running(self, plan: StepPlan) -> None:
        index = 0
        while index < len(self.running) and plan.token_budget > 0:
            request = self.running[index]
            num_wanted = request.num_tokens - request.num_computed_tokens
            num_new_tokens = min(self._capped(num_wanted), plan.token_budget)
            # One place stays free for the token that this step will give.
            num_new_tokens = min(num_new_tokens, self.scheduler_config.max_model_len - 1 - request.num_computed_tokens)
            if num_new_tokens <= 0:
                index += 1
                continue
            new_blocks = self.kv_cache_manager.allocate_slots(request, num_new_tokens)
            while new_blocks is None:
                victim, earlier = self._preempt_for(request, plan)
                index -= earlier
                if victim is request:
                    return
                new_blocks = self.kv_cache_manager.allocate_slots(request, num_new_tokens)
            self._take(request, num_wanted, num_new_tokens, new_blocks, plan)
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

    def _preempt(self, request: Request, cause: Cause) -> None:
        """Everything back, progress to 0, to the front of the queue. The caller has taken `request` out of `running`."""
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.waiting.prepend_request(request)
        num_lost_tokens, request.num_computed_tokens = request.num_computed_tokens, 0
        if self._emit is not None:
            self._emit(RequestPreempted(cause=cause, request_id=request.request_id, num_lost_tokens=num_lost_tokens))
        cause = Cause(CauseKind.PREEMPTED)
        if self.strict:
            self.kv_cache_manager.evict_unwritten_blocks(request.request_id, num_lost_tokens, cause)
        self.kv_cache_manager.free(request, cause)

    def _schedule_waiting(self, plan: StepPlan) -> None:
        config = self.scheduler_config
        while len(self.waiting) and plan.token_budget > 0 and len(self.running) < config.max_num_seqs:
            request = self.waiting.peek_request()
            num_free = self.kv_cache_manager.block_pool.get_num_free_blocks()
            computed = self.kv_cache_manager.get_computed_blocks(request)
            num_wanted = request.num_tokens - computed.num_tokens
            num_new_tokens = self._capped(num_wanted)
            if num_new_tokens > plan.token_budget and not config.enable_chunked_prefill:
                break
            num_new_tokens = min(num_new_tokens, plan.token_budget)
            new_blocks = self.kv_cache_manager.allocate_slots(
                request,
                num_new_tokens,
                computed.num_tokens,
                computed.blocks,
                full_sequence_must_fit=config.scheduler_reserve_full_isl,
                has_scheduled_reqs=bool(self.running),
            )
            if new_blocks is None:
                break  # nobody overtakes a request that does not fit (R7.3)
            resumed = request.status is RequestStatus.PREEMPTED
            self.waiting.pop_request()
            self.running.append(request)
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = computed.num_tokens
            (plan.resumed if resumed else plan.new).append(request)
            if self._emit is not None:
                num_required = num_free - self.kv_cache_manager.block_pool.get_num_free_blocks()
                self._emit(
                    RequestAdmitted(
                        cause=Cause(CauseKind.FCFS_HEAD, {"num_required": num_required, "num_free": num_free}),
                        request_id=request.request_id,
                        num_computed_tokens=computed.num_tokens,
                        resumed=resumed,
                    )
                )
            self._take(request, num_wanted, num_new_tokens, new_blocks, plan)

    def _capped(self, num_wanted: int) -> int:
        threshold = self.scheduler_config.long_prefill_token_threshold
        return min(num_wanted, threshold) if threshold else num_wanted

    def _take(self, request: Request, num_wanted: int, num_new_tokens: int, new_blocks: KVCacheBlocks, plan: StepPlan) -> None:
        """Write `num_new_tokens` of `request` into the plan and say why it is this number."""
        token_budget = plan.token_budget
        plan.take(request, num_new_tokens, new_blocks)
        if self._emit is None:
            return
        capped = self._capped(num_wanted)
        if num_new_tokens < capped:
            cause = Cause(CauseKind.CHUNKED_BY_BUDGET, {"num_wanted": num_wanted, "num_new_tokens": num_new_tokens, "token_budget": token_budget})
        elif capped < num_wanted:
            cause = Cause(CauseKind.CHUNKED_BY_THRESHOLD, {"num_wanted": num_wanted, "num_new_tokens": num_new_tokens, "threshold": capped})
        elif num_wanted == 1 and request.num_computed_tokens >= request.num_prompt_tokens:
            cause = Cause(CauseKind.DECODE, {"num_new_tokens": num_new_tokens})
        else:
            cause = Cause(CauseKind.PREFILL, {"num_new_tokens": num_new_tokens})
        self._emit(
            RequestScheduled(
                cause=cause,
                request_id=request.request_id,
                num_scheduled_tokens=num_new_tokens,
                num_computed_tokens=request.num_computed_tokens,
            )
        )

    def _finish_plan(self, plan: StepPlan) -> SchedulerOutput:
        manager = self.kv_cache_manager
        common = manager.get_num_common_prefix_blocks(self.running[0].request_id) if self.running else [0] * manager.num_kv_cache_groups
        cached = [*plan.running, *plan.resumed]
        resumed_ids = {request.request_id for request in plan.resumed}
        output = SchedulerOutput(
            scheduled_new_reqs=[
                NewRequestData(
                    req_id=request.request_id,
                    prompt_token_ids=request.prompt_token_ids,
                    block_ids=manager.get_block_ids(request.request_id),
                    num_computed_tokens=request.num_computed_tokens,
                    sampling_params=request.sampling_params,
                )
                for request in plan.new
            ],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=[request.request_id for request in cached],
                resumed_req_ids=resumed_ids,
                all_token_ids={request.request_id: list(request.all_token_ids) for request in plan.resumed},
                new_block_ids=[
                    manager.get_block_ids(request.request_id) if request.request_id in resumed_ids else plan.new_block_ids(request) for request in cached
                ],
                num_computed_tokens=[request.num_computed_tokens for request in cached],
                num_output_tokens=[request.num_output_tokens for request in cached],
            ),
            num_scheduled_tokens=plan.num_scheduled_tokens,
            total_num_scheduled_tokens=sum(plan.num_scheduled_tokens.values()),
            num_common_prefix_blocks=common,
            finished_req_ids=self.finished_req_ids,
            preempted_req_ids={*plan.preempted, *self.reset_preempted_req_ids},
        )
        self.finished_req_ids = set()
        self.reset_preempted_req_ids = set()
        for request_id, num_new_tokens in plan.num_scheduled_tokens.items():
            self.requests[request_id].num_computed_tokens += num_new_tokens
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
        """Append the sampled tokens, request by request in the order of the step, and end who is done, freeing at once (R7.8). Returns those."""
        ended: list[Request] = []
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None:
                continue  # aborted while the model ran
            for token in model_runner_output.sampled.get(request_id, ()):
                self._append_token(request, token)
                end = self._check_stop(request)
                if end is not None:
                    self._finish(request, *end)
                    ended.append(request)
                    break
        return ended

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

    def _check_stop(self, request: Request) -> tuple[RequestStatus, Cause] | None:
        """Whether the token just appended is the last one, and why."""
        token_id = request.all_token_ids[-1]
        if token_id in request.sampling_params.stop_token_ids:
            request.stop_reason = token_id
            return RequestStatus.FINISHED_STOPPED, Cause(CauseKind.STOP_TOKEN, {"token_id": token_id})
        if request.num_output_tokens >= request.max_tokens:
            return RequestStatus.FINISHED_LENGTH_CAPPED, Cause(CauseKind.MAX_TOKENS, {"max_tokens": request.max_tokens})
        max_model_len = self.scheduler_config.max_model_len
        if request.num_tokens >= max_model_len:
            return RequestStatus.FINISHED_LENGTH_CAPPED, Cause(CauseKind.MAX_MODEL_LEN, {"max_model_len": max_model_len})
        return None

    def _finish(self, request: Request, status: RequestStatus, cause: Cause) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove_request(request)
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
                self._preempt(victim, Cause(CauseKind.SCENARIO, {"what": "reset"}))
                self.reset_preempted_req_ids.add(victim.request_id)
        return self.kv_cache_manager.reset_prefix_cache()

    def take_events(self) -> list[KVCacheEvent]:
        """Hand over the KV events since the last call (R9.1)."""
        return self.kv_cache_manager.take_events()
