"""A scheduler with the dumb model behind it: one call per thing that can happen, and everything that must hold checked on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from engine.core.block_hash import BlockHasher
from engine.core.kv_cache_spec import KVCacheConfig
from engine.core.output import ModelRunnerOutput, SampledToken, SamplingParams, SchedulerOutput
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler, SchedulerConfig
from engine.trace.events import Cause, CauseKind, Event
from tests.property.block_books import check_books
from tests.property.dumb_model import DumbModel, batch_of
from tests.property.group_mixes import MAX_MODEL_LEN, Mix

GREEDY = Cause(CauseKind.GREEDY, {"probability": 1.0})
STOP = 3


class DrivenScheduler:
    """`requests`: all that ever arrived. Outputs are decided at arrival, so the model may run ahead of what the scheduler knows (R7.7)."""

    def __init__(
        self,
        mix: Mix,
        num_blocks: int,
        *,
        enable_caching: bool = True,
        listen: Callable[[Event], None] | None = None,
        watermark: float = 0.0,
        **settings: Any,
    ) -> None:
        self.config = SchedulerConfig(max_model_len=MAX_MODEL_LEN, watermark=watermark, **settings)
        self.scheduler = Scheduler(
            self.config,
            KVCacheConfig(num_blocks, mix.groups),
            enable_caching=enable_caching,
            hash_block_size=mix.hash_block_size,
            use_eagle=mix.use_eagle,
            retention_interval=mix.retention_interval if enable_caching else None,
            emit=listen,
        )
        self.manager = self.scheduler.kv_cache_manager
        self.hash_block_size = self.manager.coordinator.hash_block_size
        self.scheduler.block_hasher = BlockHasher(self.hash_block_size, "sha256_cbor")
        self.model = DumbModel(mix.specs)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.in_flight: deque[tuple[SchedulerOutput, dict[str, list[SampledToken]]]] = deque()
        self.max_in_flight = 2 if self.config.async_scheduling else 1
        self.num_unused = self.manager.block_pool.get_num_free_blocks()
        """Free blocks of the fresh pool."""

    # ------------------------------------------------------------------ what happens
    def make(self, prompt: Sequence[int], outputs: Sequence[int], *, priority: int = 0, salt: str | None = None) -> Request:
        """A request that will say `outputs`, unless one of them stops it."""
        request_id = f"r{len(self.requests)}"
        params = SamplingParams(max_tokens=len(outputs), stop_token_ids=(STOP,))
        request = Request(request_id, prompt, params, arrival_time=float(len(self.requests)), priority=priority, cache_salt=salt)
        self.tokens[request_id] = [*prompt, *outputs, *([0] * MAX_MODEL_LEN)]
        return request

    def add(self, request: Request, *, at_the_door: bool = True) -> None:
        """`at_the_door` False: past the check whether it can finish."""
        if at_the_door:
            self.scheduler.add_request(request)
        else:
            self.scheduler.requests[request.request_id] = request
            self.scheduler.waiting.add_request(request)
        self.requests[request.request_id] = request
        self.learn()

    def schedule(self) -> SchedulerOutput:
        """Plan a step and run it at once: steps run in the order in which they are planned."""
        assert len(self.in_flight) < self.max_in_flight
        known = {r: request.num_tokens + request.num_output_placeholders for r, request in self.requests.items()}
        output = self.scheduler.schedule()
        scheduled = output.num_scheduled_tokens
        assert sum(scheduled.values()) == output.total_num_scheduled_tokens <= self.config.max_num_batched_tokens
        assert all(num_tokens > 0 for num_tokens in scheduled.values())
        assert len(self.scheduler.running) <= self.config.max_num_seqs
        start = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        start |= dict(zip(output.scheduled_cached_reqs.req_ids, output.scheduled_cached_reqs.num_computed_tokens, strict=True))
        sampled: dict[str, list[SampledToken]] = {}
        for request_id, num_tokens in scheduled.items():
            request = self.requests[request_id]
            end = start[request_id] + num_tokens
            assert request.num_computed_tokens == end <= known[request_id]
            assert start[request_id] < known[request_id]  # one token always runs (R5.1)
            if threshold := self.config.long_prefill_token_threshold:
                assert num_tokens <= threshold
            sampled[request_id] = [] if end < known[request_id] else [SampledToken(self.tokens[request_id][end], GREEDY)]
        self.model.follow(output)
        self.model.run(batch_of(scheduled, start, self.requests, self.tokens), output.kv_cache_block_copies)
        self.in_flight.append((output, sampled))
        return output

    def update(self) -> list[Request]:
        """The oldest step's tokens arrive."""
        output, sampled = self.in_flight.popleft()
        ended = self.scheduler.update_from_output(output, ModelRunnerOutput(sampled))
        self.learn()
        return ended

    def abort(self, request_id: str) -> None:
        (ended,) = self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        assert ended is self.requests[request_id]

    def run_to_end(self, patience: int = 4 * MAX_MODEL_LEN) -> str | None:
        """Step until nothing is left; None, or the request at which nothing goes on: no token came in `patience` steps, or two steps in a row were idle."""
        num_in_vain, num_idle, num_known = 0, 0, -1
        while self.scheduler.has_unfinished_requests() or self.in_flight:
            if len(self.in_flight) < self.max_in_flight:
                output = self.schedule()
                num_idle = 0 if output.num_scheduled_tokens or output.preempted_req_ids else num_idle + 1
            while len(self.in_flight) == self.max_in_flight or (self.in_flight and not self.scheduler.has_unfinished_requests()):
                self.update()
            self.check()
            num_known_before, num_known = num_known, sum(request.num_tokens for request in self.requests.values())
            num_in_vain = num_in_vain + 1 if num_known == num_known_before else 0
            if (num_in_vain > patience or num_idle > self.max_in_flight) and self.scheduler.requests:
                head: Request = [*self.scheduler.running, *self.scheduler.skipped_waiting, *self.scheduler.waiting][0]
                return head.request_id
        return None

    def learn(self) -> None:
        for request in self.requests.values():
            self.model.learn(request, self.hash_block_size)

    # ------------------------------------------------------------------ what holds
    def check(self) -> None:
        """After every call."""
        check_books(self.manager)
        self.model.check_cache(self.manager)
        scheduler = self.scheduler
        running = [request.request_id for request in scheduler.running]
        waiting = [request.request_id for queue in (scheduler.waiting, scheduler.skipped_waiting) for request in queue]
        assert sorted(running + waiting) == sorted(scheduler.requests)
        assert all(request.status is RequestStatus.RUNNING for request in scheduler.running)
        tables = {request_id for group in self.manager.coordinator.single_type_managers for request_id in group.req_to_blocks}
        assert tables <= set(running)
        for request_id, request in self.requests.items():
            assert request.all_token_ids == self.tokens[request_id][: request.num_tokens]
            assert request.num_computed_tokens <= request.num_tokens + request.num_output_placeholders
            if request_id in waiting:
                assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
                assert request.num_computed_tokens == 0
            if request_id not in scheduler.requests:
                assert request.is_finished()
        if not running:
            assert self.manager.block_pool.get_num_free_blocks() == self.num_unused
