"""A recorder beside random schedulers with every mix of groups: what it shows after each event is what the engine has, and every reference is explained.

No worker runs here, so nothing is said about contents: `test_random_group_sessions` does that.
"""

from __future__ import annotations

from hypothesis import given, reject
from hypothesis import strategies as st

from engine.capture import COPY_PIN, SINK_PIN, StateCapture
from engine.core.full_attention_manager import SinkFullAttentionManager
from engine.errors import InvalidInput
from engine.trace.events import CopyQueued, Event
from engine.trace.integrity import ABOUT_CONTENTS, Recount, Violation, check_block, check_names, check_pool
from engine.trace.recorder import Snapshot
from tests.property.driven_scheduler import DrivenScheduler
from tests.property.group_mixes import mixes


class Listener:
    """Captures after every event, from `begin` on, and recounts."""

    def __init__(self) -> None:
        self.capture: StateCapture | None = None
        self.last: Snapshot | None = None

    def begin(self, driven: DrivenScheduler) -> None:
        block_size = driven.manager.coordinator.single_type_managers[0].block_size
        self.capture = StateCapture(driven.scheduler, block_size, driven.requests, {}, verify=True)

    def __call__(self, event: Event) -> None:
        if self.capture is None:
            return  # while the engine is built
        made = self.last = self.capture(event)
        assert [v for v in violations(made) if v.invariant not in ABOUT_CONTENTS] == []
        if isinstance(event, CopyQueued):
            assert COPY_PIN in made.blocks[event.source_block_id].pins
            assert COPY_PIN in made.blocks[event.destination_block_id].pins


def violations(made: Snapshot) -> list[Violation]:
    """As `check_integrity` finds them."""
    recount = Recount(made)
    requests = {request.request_id: request for request in made.requests}
    found = [v for block in made.blocks for v in check_block(block, recount, requests, "schedule")]
    num_used = sum(not block.is_null and block.ref_cnt > 0 for block in made.blocks)
    return [*found, *check_pool(made, num_used, 1), *check_names(recount, len(made.blocks), [*recount.queued], [*recount.keys])]


@st.composite
def lives(draw: st.DrawFn) -> tuple[DrivenScheduler, Listener]:
    """A few requests, some of which are aborted, evicted, reset and preempted on the way, heard to the end."""
    enable_caching = draw(st.sampled_from([True, True, True, False]))
    mix = draw(mixes(enable_caching))
    listener = Listener()
    try:
        driven = DrivenScheduler(
            mix,
            1 + mix.num_for_one_token + draw(st.integers(0, 16)),
            enable_caching=enable_caching,
            listen=listener,
            async_scheduling=draw(st.booleans()),
            max_num_seqs=draw(st.integers(1, 4)),
            max_num_batched_tokens=draw(st.sampled_from([3, 4, 8, 9, 64])),
            policy=draw(st.sampled_from(["fcfs", "priority"])),
        )
    except InvalidInput:
        reject()
    listener.begin(driven)
    for _ in range(draw(st.integers(2, 5))):
        prompt = [*([0] * draw(st.integers(0, 16))), *draw(st.lists(st.integers(0, 1), min_size=1, max_size=8))]
        request = driven.make(prompt, draw(st.lists(st.integers(0, 1), min_size=1, max_size=8)), priority=draw(st.integers(0, 2)))
        try:
            driven.add(request)
        except InvalidInput:
            continue
        for _ in range(draw(st.integers(0, 6))):
            if len(driven.in_flight) == driven.max_in_flight:
                driven.update()
            driven.schedule()
        what = draw(st.sampled_from(["", "", "", "abort", "reset", "evict"]))
        if what == "abort" and request.request_id in driven.scheduler.requests:
            driven.abort(request.request_id)
        elif what == "reset":
            driven.scheduler.reset_prefix_cache(draw(st.booleans()))
        elif what == "evict":
            driven.manager.evict_blocks(draw(st.sets(st.integers(1, len(driven.manager.block_pool.blocks) - 1), max_size=3)))
    driven.run_to_end()
    return driven, listener


@given(lives())
def test_the_recorder_shows_what_the_engine_has(life: tuple[DrivenScheduler, Listener]) -> None:
    """R1.16, R6.6: also the references of sinks and of queued copies, which stand in no table."""
    driven, listener = life
    managers = driven.manager.coordinator.single_type_managers
    if listener.last is None:
        return
    pinned = {block.block_id for block in listener.last.blocks if block.pins}
    assert pinned == {block.block_id for m in managers if isinstance(m, SinkFullAttentionManager) for block in m.sink_blocks}
    assert all(listener.last.blocks[block_id].pins == (SINK_PIN,) for block_id in pinned)
    assert list(listener.last.free_queue) == [block.block_id for block in driven.manager.block_pool.free_block_queue.get_all_free_blocks()]
