"""Moving the cursor: three step sizes, both ways, and to the next event of a kind."""

from __future__ import annotations

import msgspec
import pytest

from engine.errors import InvalidInput
from engine.trace.events import KVWritten, StepStarted
from engine.trace.timeline import Timeline
from tests.unit.trace import frames as f


def timeline() -> Timeline:
    """Frames 0..6 with (step, op_index): (0,0) (1,1) (1,1) (1,2) (2,3) (2,3) (2,4); frames 3 and 6 are writes of A and B."""
    places = [(0, 0), (1, 1), (1, 1), (1, 2), (2, 3), (2, 3), (2, 4)]
    made = [msgspec.structs.replace(f.frame(), seq=i, step=s, op_index=o) for i, (s, o) in enumerate(places)]
    made[3] = msgspec.structs.replace(made[3], event=f.write([10], [16], "A"))
    made[6] = msgspec.structs.replace(made[6], event=f.write([10], [16], "B"))
    return Timeline(f.trace(*made))


def test_event_steps_go_frame_by_frame_and_stop_at_the_ends() -> None:
    t = timeline()
    assert [t.forward().seq for _ in range(8)] == [1, 2, 3, 4, 5, 6, 6, 6]
    assert [t.back().seq for _ in range(8)] == [5, 4, 3, 2, 1, 0, 0, 0]


def test_operation_and_engine_steps_stop_at_the_last_frame_of_each() -> None:
    t = timeline()
    assert [t.forward("operation").seq for _ in range(5)] == [2, 3, 5, 6, 6]
    assert [t.back("operation").seq for _ in range(5)] == [5, 3, 2, 0, 0]
    assert [t.forward("step").seq for _ in range(3)] == [3, 6, 6]
    assert [t.back("step").seq for _ in range(3)] == [3, 0, 0]


def test_forward_then_back_by_the_same_size_returns() -> None:
    t = timeline()
    t.forward("operation")
    here = t.position
    t.forward("operation")
    t.back("operation")
    assert t.position == here


def test_seek_stops_at_the_nearer_end() -> None:
    t = timeline()
    assert t.seek(99).seq == 6
    assert t.seek(-5).seq == 0
    assert t.previous is None


def test_next_finds_kind_and_request_and_stays_when_there_is_none() -> None:
    t = timeline()
    found = t.next("kv_written")
    assert found is not None
    assert isinstance(found.event, KVWritten)
    assert found.seq == 3
    assert t.next("kv_written", "A") is None
    assert t.position == 3
    assert t.next("kv_written", "B") is t.trace.frames[6]
    assert isinstance(t.seek(0).event, StepStarted)


def test_an_unknown_kind_and_an_empty_trace_are_said_plainly() -> None:
    with pytest.raises(InvalidInput, match="there is no event kind “block_eaten”: the kinds are trace_started, "):
        timeline().next("block_eaten")
    with pytest.raises(InvalidInput, match="has no frames"):
        Timeline(f.trace())
