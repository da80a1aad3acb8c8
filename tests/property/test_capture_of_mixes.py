"""A recorder beside random schedulers with every mix of groups: what it shows after each event is what the engine has, and every reference is explained.

No worker runs here, so nothing is said about contents: `test_random_group_sessions` does that.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.capture import COPY_PIN, SINK_PIN, StateCapture
from engine.core.full_attention_manager import SinkFullAttentionManager
from engine.trace.events import CopyQueued, Event
from engine.trace.integrity import ABOUT_CONTENTS, Recount, Violation, check_block, check_names, check_pool
from engine.trace.recorder import Snapshot
from tests.property.driven_scheduler import DrivenScheduler
from tests.property.heard_life import live, make_scheduler


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
    listener = Listener()
    driven = make_scheduler(draw, listener)
    listener.begin(driven)
    live(draw, driven)
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
