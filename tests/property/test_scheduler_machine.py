"""Random arrivals, steps, aborts and resets in tiny pools: every invariant holds after each of them and at every report in between."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.block_hash import BlockHasher
from engine.core.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from engine.core.output import ModelRunnerOutput, SampledToken, SamplingParams, SchedulerOutput
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler, SchedulerConfig
from engine.errors import InvalidInput
from engine.trace.events import BlocksAllocated, BlocksTouched, Cause, CauseKind, Event, RequestFinished, RequestPreempted

BLOCK_SIZE = 2
GREEDY = Cause(CauseKind.GREEDY, {"probability": 1.0})


class SchedulerMachine(RuleBasedStateMachine):
    """Prompts come from a tiny alphabet, so prefixes are shared all the time."""

    @initialize(
        num_blocks=st.integers(3, 12),
        enable_caching=st.booleans(),
        max_num_seqs=st.integers(1, 4),
        max_num_batched_tokens=st.integers(1, 9),
        long_prefill_token_threshold=st.sampled_from([0, 0, 3]),
        scheduler_reserve_full_isl=st.booleans(),
        watermark=st.sampled_from([0.0, 0.3]),
        policy=st.sampled_from(["fcfs", "fcfs", "priority"]),
    )
    def build(
        self,
        num_blocks: int,
        enable_caching: bool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        long_prefill_token_threshold: int,
        scheduler_reserve_full_isl: bool,
        watermark: float,
        policy: str,
    ) -> None:
        self.num_blocks = num_blocks
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=40,
            long_prefill_token_threshold=long_prefill_token_threshold,
            scheduler_reserve_full_isl=scheduler_reserve_full_isl,
            watermark=watermark,
            policy=policy,
        )
        self.scheduler = Scheduler(
            self.config,
            KVCacheConfig(num_blocks, [KVCacheGroupSpec(["layer"], FullAttentionSpec(BLOCK_SIZE))]),
            enable_caching=enable_caching,
            block_hasher=BlockHasher(BLOCK_SIZE),
            emit=self.record,
        )
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.tables = self.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        self.arrived: dict[str, Request] = {}
        self.reset_preempted: set[str] = set()
        self.order: list[str] = []  # FCFS: the order in which requests must be admitted for the first time
        self.ended: list[str] = []
        self.reported_ends: list[str] = []

    def record(self, event: Event) -> None:
        self.books_agree()
        if isinstance(event, RequestFinished):
            assert event.request_id is not None
            assert self.arrived[event.request_id].is_finished()
            self.reported_ends.append(event.request_id)
        elif isinstance(event, RequestPreempted):
            assert event.request_id is not None
            assert self.arrived[event.request_id].status is RequestStatus.PREEMPTED
        elif isinstance(event, BlocksAllocated | BlocksTouched):
            assert event.request_id is not None
            table = [block.block_id for block in self.tables[event.request_id]]
            assert table[-len(event.block_ids) :] == event.block_ids

    # ------------------------------------------------------------------ what happens
    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        max_tokens=st.integers(1, 6),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, None, "s"]),
    )
    def arrive(self, prompt: list[int], max_tokens: int, priority: int, salt: str | None) -> None:
        request = Request(
            f"r{len(self.arrived)}",
            prompt,
            SamplingParams(max_tokens=max_tokens, stop_token_ids=(3,)),
            arrival_time=float(len(self.arrived)),
            priority=priority,
            cache_salt=salt,
        )
        self.arrived[request.request_id] = request
        fits = -(-(len(prompt) + max_tokens - 1) // BLOCK_SIZE) <= self.num_blocks - 1
        try:
            self.scheduler.add_request(request)
            assert fits
        except InvalidInput:
            assert not fits
            del self.arrived[request.request_id]

    def answer(self, output: SchedulerOutput, token: int) -> None:
        sampled: dict[str, list[SampledToken]] = {}
        for request_id in output.num_scheduled_tokens:
            request = self.arrived[request_id]
            complete = request.num_computed_tokens == request.num_tokens
            sampled[request_id] = [SampledToken(token, GREEDY)] if complete and not request.is_finished() else []
        ended = self.scheduler.update_from_output(output, ModelRunnerOutput(sampled))
        assert [request.request_id for request in ended] == self.reported_ends[len(self.ended) :]
        self.ended = list(self.reported_ends)

    def step(self, token: int) -> SchedulerOutput:
        before = {request_id: request.num_computed_tokens for request_id, request in self.arrived.items()}
        unreported = set(self.scheduler.finished_req_ids)
        output = self.scheduler.schedule()
        scheduled = output.num_scheduled_tokens
        assert sum(scheduled.values()) == output.total_num_scheduled_tokens <= self.config.max_num_batched_tokens
        assert output.finished_req_ids == unreported
        in_this_step = output.preempted_req_ids - self.reset_preempted
        assert not in_this_step & set(scheduled)
        assert output.preempted_req_ids >= self.reset_preempted  # told with the first step after the reset
        self.reset_preempted = set()
        admitted = [new.req_id for new in output.scheduled_new_reqs] + sorted(output.scheduled_cached_reqs.resumed_req_ids)
        assert not (in_this_step and admitted)  # R7.6
        for new in output.scheduled_new_reqs:
            assert new.num_computed_tokens + scheduled[new.req_id] == self.arrived[new.req_id].num_computed_tokens
            assert new.num_computed_tokens < len(new.prompt_token_ids)  # R5.1
        for request_id, num_tokens in scheduled.items():
            assert num_tokens > 0
            request = self.arrived[request_id]
            assert request.num_computed_tokens <= request.num_tokens
            assert request.num_computed_tokens <= len(self.tables[request_id]) * BLOCK_SIZE
            if request_id not in admitted:
                assert request.num_computed_tokens == before[request_id] + num_tokens
        if self.config.policy == "fcfs":
            self.order += [new.req_id for new in output.scheduled_new_reqs]
            assert self.order == sorted(self.order, key=lambda r: self.arrived[r].arrival_time)  # nobody overtakes (R7.3)
        self.answer(output, token)
        return output

    @precondition(lambda self: self.scheduler.has_unfinished_requests())
    @rule(token=st.integers(0, 3))
    def run_a_step(self, token: int) -> None:
        self.step(token)

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data(), while_it_runs=st.booleans())
    def abort(self, data: st.DataObject, while_it_runs: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
        output = self.scheduler.schedule() if while_it_runs else None
        if output is not None:
            assert output.preempted_req_ids >= self.reset_preempted
            self.reset_preempted = set()
        if output is not None and self.config.policy == "fcfs":
            self.order += [new.req_id for new in output.scheduled_new_reqs]
        (ended,) = self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        assert ended is self.arrived[request_id]
        assert request_id not in self.tables
        self.ended = list(self.reported_ends)
        if output is not None:
            self.answer(output, 1)

    @rule(running=st.booleans())
    def reset(self, running: bool) -> None:
        if running:
            self.reset_preempted |= {request.request_id for request in self.scheduler.running}
        ok = self.scheduler.reset_prefix_cache(running)
        assert ok is (running or not any(self.tables.values()))
        if ok:
            assert len(self.pool.cached_block_hash_to_block) == 0

    @precondition(lambda self: self.scheduler.requests)
    @rule()
    def run_to_the_end(self) -> None:
        """Whatever was let in finishes, alone or not (no request can wait for ever)."""
        for _ in range(2000):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step(1)
        assert not self.scheduler.has_unfinished_requests()
        assert self.pool.get_num_free_blocks() == self.num_blocks - 1

    # ------------------------------------------------------------------ what holds
    @invariant()
    def books_agree(self) -> None:
        entries = Counter(block.block_id for table in self.tables.values() for block in table)
        queued = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
        assert len(queued) == len(set(queued)) == self.pool.get_num_free_blocks()
        for block in self.pool.blocks[1:]:
            assert block.ref_cnt == entries[block.block_id]
            assert (block.block_id in queued) == (block.ref_cnt == 0)
        registered = {(key, block_id) for key, ids in self.pool.cached_block_hash_to_block.items() for block_id in ids}
        assert registered == {(block.block_hash, block.block_id) for block in self.pool.blocks if block.block_hash is not None}
        for request_id, table in self.tables.items():
            request = self.arrived[request_id]
            for index, block in enumerate(table):
                if block.block_hash is not None:
                    assert block.block_hash[:-4] == request.block_hashes[index]
                    assert block.block_hash_num_tokens == (index + 1) * BLOCK_SIZE <= request.num_tokens

    @invariant()
    def requests_are_in_one_place(self) -> None:
        running = [request.request_id for request in self.scheduler.running]
        waiting = [request.request_id for request in self.scheduler.waiting]
        assert sorted(running + waiting) == sorted(self.scheduler.requests)
        assert len(running) <= self.config.max_num_seqs
        for request in self.scheduler.running:
            assert request.status is RequestStatus.RUNNING
        for request in self.scheduler.waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert request.num_computed_tokens == 0
            assert request.request_id not in self.tables


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(stateful_step_count=25)
