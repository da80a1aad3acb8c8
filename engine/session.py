"""A session: requests and settings in, a trace out.

It turns the crank of the engine loop (arrivals, schedule, execute_model, update_from_output) one operation at a time, so that a screen can show the
first frames while the model still loads. It is deterministic: the same inputs give the same trace, byte for byte.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from engine.capture import StateCapture, WorkerView
from engine.core.block_hash import BlockHasher
from engine.core.kv_cache_spec import KVCacheConfig
from engine.core.output import ModelRunnerOutput, SchedulerOutput
from engine.core.request import Request, RequestStatus
from engine.core.request_check import num_blocks_for
from engine.core.scheduler import Scheduler, SchedulerConfig
from engine.core.single_type_kv_cache_manager import ids_of
from engine.errors import EngineError, InvalidInput
from engine.group_config import GroupConfig as GroupConfig
from engine.model_groups import with_groups_of_model
from engine.session_base import DEFAULT_MAX_MODEL_LEN, SessionBase, token_ids_of
from engine.session_base import NO_MODEL as NO_MODEL
from engine.session_base import InterpretedLayers as InterpretedLayers
from engine.session_config import ActionSpec as ActionSpec
from engine.session_config import RequestSpec as RequestSpec
from engine.session_config import SessionConfig as SessionConfig
from engine.trace.events import (
    BlocksAllocated,
    BlocksFreed,
    BlocksTouched,
    Cause,
    CauseKind,
    Event,
    RequestAdded,
    TraceStarted,
)
from engine.trace.frame import Trace
from engine.trace.integrity import ABOUT_CONTENTS
from engine.trace.recorder import Recorder


class Runner(WorkerView, Protocol):
    """What executes a step: `engine.worker.model_runner.ModelRunner`, or `engine.bookkeeping.BookkeepingRunner`."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput: ...


class Session(SessionBase[SessionConfig, RequestSpec]):
    """One run of vLLM V1's engine, made, driven and refused as `SessionBase` says. Without a model every output must be forced."""

    def _prepare(self, model_name: str, backend: str | None, interpreted_layers: InterpretedLayers) -> None:
        config = self.config = with_groups_of_model(self.config, model_name)
        self._requests: dict[str, Request] = {}
        from engine.runner import choose_runner  # the one place that may load torch, and only when it has to

        self._runner_choice = choose_runner(config, model_name, backend, interpreted_layers)
        self.trace = Trace(self._header(self._runner_choice), [])
        self._scheduler = self._make_scheduler()
        self._block_size = config.group_specs()[0].kv_cache_spec.block_size
        self._capture = StateCapture(self._scheduler, self._block_size, self._requests, self._pins)
        tolerated = ABOUT_CONTENTS if config.compat is not None else ()
        self._recorder = Recorder(self.trace, self._capture, max_frames=config.max_frames, tolerated=tolerated)

    # ------------------------------------------------------------------ the engine loop

    def _operations(self) -> Iterator[None]:
        """The run as a generator that pauses before each execution of the model.

        With async scheduling the next step is planned before the output of this one is known, so two batches are in flight (R7.7). vLLM: EngineCore.step
        and step_with_batch_queue; here: the model runs when its step is planned, not beside it."""
        recorder, scheduler = self._recorder, self._scheduler
        self._begin()
        pending = sorted(self._inputs["requests"], key=lambda r: r.arrival_step)
        actions = sorted(self._inputs["actions"], key=lambda a: a.at_step)
        in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        num_in_flight = 2 if self.config.async_scheduling else 1
        runner: Runner | None = None
        while True:
            if not scheduler.has_unfinished_requests() and not in_flight and (pending or actions):
                recorder.step = max(recorder.step, min(x for x in _steps(pending, actions)) - 1)  # nothing runs: go on to what comes next
                scheduler.current_step = recorder.step
            while pending and pending[0].arrival_step <= recorder.step + 1:
                self._arrive(pending.pop(0))
            while actions and actions[0].at_step <= recorder.step + 1:
                self._act(actions.pop(0))
            if scheduler.has_unfinished_requests():
                recorder.begin_step()
                recorder.begin_op("schedule")
                output = scheduler.schedule()
                if not output.num_scheduled_tokens and not output.preempted_req_ids and not (pending or actions or in_flight):
                    raise EngineError(self._stuck())
                yield
                if recorder.is_full:
                    return
                recorder.begin_op("execute_model")
                if runner is None:
                    runner = self._runner_choice.make(self._emit)
                    self._capture.worker = runner
                in_flight.append((output, runner.execute_model(output)))
                if output.num_scheduled_tokens and len(in_flight) < num_in_flight:
                    continue
            if in_flight:
                recorder.begin_op("update_from_output")
                scheduler.update_from_output(*in_flight.popleft())
            elif not (pending or actions):
                return

    def _begin(self) -> None:
        """The fresh pool, and its free queue in the order that the scenario wants."""
        config = self.config
        sizes = [group.kv_cache_spec.block_size for group in config.group_specs()]
        several = sizes if len(sizes) > 1 else []
        self._emit(TraceStarted(cause=Cause(CauseKind.SCENARIO), num_blocks=config.num_blocks, block_size=self._block_size, group_block_sizes=several))
        if config.free_queue_order:
            self._order_free_queue()

    def _order_free_queue(self) -> None:
        """Rule S24: blocks freed without a hash are prepended as a unit, so freeing them in the wanted order makes them be popped in that order."""
        self._recorder.begin_op("prepare")
        pool = self._scheduler.kv_cache_manager.block_pool
        first = self.config.free_queue_order
        order = [*first, *(b for b in range(1, self.config.num_blocks) if b not in first)]
        blocks = pool.get_new_blocks(len(order))
        self._pins.update({b.block_id: ("scenario",) for b in blocks})
        cause = Cause(CauseKind.PREPARED)
        self._emit(BlocksAllocated(cause=cause, block_ids=[b.block_id for b in blocks]))
        self._pins.clear()
        prepended, appended, still_referenced = ids_of(pool.free_blocks([pool.blocks[b] for b in order]))
        self._emit(BlocksFreed(cause=cause, block_ids=order, prepended=prepended, appended=appended, still_referenced=still_referenced))

    def _arrange(self, order: tuple[int, ...]) -> None:
        """Another order for the free queue, hashes and all: every block in it is held for a moment and let go again. Raises EngineError unless `order`
        names the blocks that are in it. vLLM: none; here: for drawings that follow an older rule."""
        pool = self._scheduler.kv_cache_manager.block_pool
        queue = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        if sorted(order) != sorted(queue):
            raise EngineError(f"arrange_free_queue names the blocks {list(order)}, but those in the free queue are {queue}; name each of them once")
        blocks = [pool.blocks[block_id] for block_id in order]
        cause = Cause(CauseKind.PREPARED)
        pool.touch(blocks)
        self._pins.update(dict.fromkeys(order, ("scenario",)))
        self._emit(BlocksTouched(cause=cause, block_ids=list(order), left_free_queue=list(order)))
        self._pins.clear()
        for block in blocks:
            block.ref_cnt -= 1
        pool.free_block_queue.append_n(blocks)
        self._emit(BlocksFreed(cause=cause, block_ids=list(order), prepended=[], appended=list(order), still_referenced=[]))

    def _arrive(self, spec: RequestSpec) -> None:
        self._recorder.begin_op(f"add_request {spec.request_id}")
        request = self._make_request(spec)
        self._requests[spec.request_id] = request
        self._scheduler.add_request(request)

    def _act(self, action: ActionSpec) -> None:
        if action.kind == "reset_prefix_cache":
            self._recorder.begin_op("reset_prefix_cache")
            self._scheduler.reset_prefix_cache()
        elif action.kind == "evict_blocks":
            self._recorder.begin_op("evict_blocks")
            self._scheduler.kv_cache_manager.block_pool.evict_blocks(action.block_ids)
        elif action.kind == "arrange_free_queue":
            self._recorder.begin_op("arrange_free_queue")
            self._arrange(action.block_ids)
        elif action.request_id is not None:
            self._recorder.begin_op(f"abort {action.request_id}")
            self._scheduler.finish_requests(action.request_id, RequestStatus.FINISHED_ABORTED)

    def _stuck(self) -> str:
        scheduler = self._scheduler
        request = (list(scheduler.waiting) or list(scheduler.running))[0]
        needed = num_blocks_for(request.num_tokens, scheduler.kv_cache_config)
        return (
            f"no request can go on: {request.request_id} needs {needed} blocks for its {request.num_tokens} tokens and the pool has "
            f"{self.config.num_blocks - 1} besides the null block; give the scenario a larger num_blocks"
        )

    # ------------------------------------------------------------------ plumbing

    def _shown_token_ids(self, event: Event) -> list[int]:
        if isinstance(event, RequestAdded) and event.request_id is not None:
            return list(self._requests[event.request_id].all_token_ids)
        return token_ids_of(event)

    def _make_request(self, spec: RequestSpec) -> Request:
        return Request(
            request_id=spec.request_id,
            prompt_token_ids=list(spec.prompt_token_ids),
            sampling_params=spec.sampling_params,
            arrival_time=float(len(self._requests)),
            priority=spec.priority,
            cache_salt=spec.cache_salt,
            lora_name=spec.lora_name,
            lora_int_id=spec.lora_int_id,
            mm_features=spec.mm_features,
            block_hasher=self._hasher if self.config.enable_prefix_caching else None,
        )

    def _make_scheduler(self) -> Scheduler:
        config = self.config
        scheduler_block_size, hash_block_size = config.block_sizes()
        self._hasher = BlockHasher(hash_block_size=hash_block_size, algorithm=config.hash_algo, seed=config.hash_seed, compat=config.compat)
        scheduler_config = SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len or DEFAULT_MAX_MODEL_LEN,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            scheduler_reserve_full_isl=config.scheduler_reserve_full_isl,
            watermark=config.watermark,
            policy=config.policy,
            async_scheduling=config.async_scheduling,
        )
        return Scheduler(
            scheduler_config,
            KVCacheConfig(num_blocks=config.num_blocks, kv_cache_groups=config.group_specs()),
            enable_caching=config.enable_prefix_caching,
            block_hasher=self._hasher,
            hash_block_size=hash_block_size,
            scheduler_block_size=scheduler_block_size,
            block_size=config.block_size,
            use_eagle=config.use_eagle,
            retention_interval=config.retention_interval,
            dcp_world_size=config.decode_context_parallel_size,
            emit=self._emit,
            compat=config.compat,
        )

    def _check(self, requests: tuple[RequestSpec, ...], actions: tuple[ActionSpec, ...], model_name: str) -> None:
        if not requests:
            raise InvalidInput("there are no requests: give the scenario at least one")
        seen: set[str] = set()
        for spec in requests:
            if spec.request_id in seen:
                raise InvalidInput(f"request id {spec.request_id} is used twice: give each request its own id")
            seen.add(spec.request_id)
            self._scheduler.check_request(self._make_request(spec))
            self._runner_choice.check_token_ids(spec.request_id, spec.prompt_token_ids)
            if model_name == NO_MODEL and len(spec.sampling_params.forced_token_ids) < spec.sampling_params.max_tokens:
                raise InvalidInput(f"request {spec.request_id} has outputs that nothing decides: without a model, force all {spec.sampling_params.max_tokens}")


def _steps(pending: list[RequestSpec], actions: list[ActionSpec]) -> Iterator[int]:
    yield from (r.arrival_step for r in pending)
    yield from (a.at_step for a in actions)
