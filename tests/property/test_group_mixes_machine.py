"""Random arrivals, steps, aborts, evictions and resets for random mixes of attention types: no block is lost, none is read that holds something else."""

from __future__ import annotations

from typing import Any

from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.kv_cache_spec import ChunkedLocalAttentionSpec, MambaSpec, RSWASpec, SlidingWindowSpec
from engine.errors import InvalidInput
from engine.trace.events import Event
from tests.property.block_books import check_books
from tests.property.driven_scheduler import DrivenScheduler
from tests.property.group_mixes import mixes

RELEASING = (SlidingWindowSpec, ChunkedLocalAttentionSpec, RSWASpec, MambaSpec)


class GroupMixesMachine(RuleBasedStateMachine):
    """Prompts come from a tiny alphabet and begin as earlier ones did, so prefixes are shared all the time."""

    @initialize(
        data=st.data(),
        enable_caching=st.sampled_from([True, True, True, True, False]),
        recording=st.booleans(),
        num_spare=st.sampled_from([12, 4, 8, 20, 2]),
        settings_=st.fixed_dictionaries(
            {
                "async_scheduling": st.booleans(),
                "max_num_seqs": st.integers(1, 4),
                "max_num_batched_tokens": st.sampled_from([1, 3, 4, 8, 9, 16, 64]),
                "long_prefill_token_threshold": st.sampled_from([0, 0, 3]),
                "scheduler_reserve_full_isl": st.booleans(),
                "watermark": st.sampled_from([0.0, 0.0, 0.2]),
                "policy": st.sampled_from(["fcfs", "priority"]),
            }
        ),
    )
    def build(self, data: st.DataObject, enable_caching: bool, recording: bool, num_spare: int, settings_: dict[str, Any]) -> None:
        mix = data.draw(mixes(enable_caching))
        try:
            self.it = DrivenScheduler(
                mix, 1 + mix.num_for_one_token + num_spare, enable_caching=enable_caching, listen=self.hear if recording else None, **settings_
            )
        except InvalidInput:
            assume(False)
        self.pool = self.it.manager.block_pool

    def hear(self, event: Event) -> None:
        if hasattr(self, "it"):
            check_books(self.it.manager)

    @rule(
        data=st.data(),
        tail=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        shared=st.sampled_from([0, 1, 5, 20, 24, 24]),
        outputs=st.lists(st.sampled_from([0, 0, 1, 1, 1, 3]), min_size=1, max_size=9),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, None, "s"]),
    )
    def arrive(self, data: st.DataObject, tail: list[int], shared: int, outputs: list[int], priority: int, salt: str | None) -> None:
        """Most go on with what an earlier one had."""
        earlier = list(self.it.requests.values())
        known = data.draw(st.sampled_from(earlier)).all_token_ids if earlier else [0] * 16
        request = self.it.make([*known[: min(shared, 22)], *tail], outputs, priority=priority, salt=salt)
        try:
            self.it.add(request)
        except InvalidInput:
            assert request.request_id not in self.it.scheduler.requests

    @precondition(lambda self: self.it.scheduler.has_unfinished_requests() and len(self.it.in_flight) < self.it.max_in_flight)
    @rule()
    def plan_a_step(self) -> None:
        self.it.schedule()

    @precondition(lambda self: self.it.scheduler.has_unfinished_requests())
    @rule(num_steps=st.integers(1, 12))
    def go_on(self, num_steps: int) -> None:
        """As many steps, as full as they may be."""
        for _ in range(num_steps):
            if len(self.it.in_flight) == self.it.max_in_flight:
                self.it.update()
            self.it.schedule()
            self.it.check()

    @precondition(lambda self: self.it.in_flight)
    @rule()
    def hear_the_model(self) -> None:
        self.it.update()

    @precondition(lambda self: self.it.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.it.abort(data.draw(st.sampled_from(sorted(self.it.scheduler.requests))))

    @rule(running=st.booleans())
    def reset(self, running: bool) -> None:
        unused = self.pool.get_num_free_blocks() == self.it.num_unused
        ok = self.it.scheduler.reset_prefix_cache(running)
        assert ok is (running or unused)
        if ok:
            assert len(self.pool.cached_block_hash_to_block) == 0

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        cached = [block.block_id for block in self.pool.blocks if block.block_hash is not None]
        self.pool.evict_blocks(sorted(data.draw(st.sets(st.sampled_from(cached or [1]), max_size=2))))

    @precondition(lambda self: self.it.scheduler.requests)
    @rule()
    def run_to_the_end(self) -> None:
        """Whatever was let in finishes, and all blocks come back.

        Only a request that gives blocks back on its way and was preempted far along may never get in again, here as in vLLM: it has to bring back in one
        step what it never held at one time."""
        while (stuck := self.it.run_to_end()) is not None:
            assert self.it.requests[stuck].num_preemptions > 0
            assert any(isinstance(group.kv_cache_spec, RELEASING) for group in self.it.manager.coordinator.single_type_managers)
            self.it.abort(stuck)
        assert self.pool.get_num_free_blocks() == self.it.num_unused

    @invariant()
    def everything_holds(self) -> None:
        self.it.check()


TestGroupMixesMachine = GroupMixesMachine.TestCase
TestGroupMixesMachine.settings = settings(stateful_step_count=25)
