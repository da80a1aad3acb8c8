"""One event in, one checked frame out; bounded, and never past a broken state."""

from __future__ import annotations

import pytest

from engine.trace.events import EngineFailed, Event, RecordingStopped, StepStarted
from engine.trace.frame import Frame
from engine.trace.integrity import ABOUT_CONTENTS, IntegrityError, check_integrity
from engine.trace.recorder import Recorder, Snapshot
from tests.unit.trace import frames as f


def snapshot(frame: Frame) -> Snapshot:
    return Snapshot(*(getattr(frame, name) for name in Snapshot._fields))


EVENT = StepStarted(cause=f.CAUSE, token_budget=64)


def test_frames_are_numbered_by_event_operation_and_step() -> None:
    recorder = Recorder(f.trace(), lambda event: snapshot(f.frame()), max_frames=10)
    recorder.emit(EVENT)
    recorder.begin_step()
    recorder.begin_op("schedule")
    recorder.emit(EVENT)
    recorder.emit(EVENT)
    assert [(x.seq, x.step, x.op, x.op_index) for x in recorder.trace.frames] == [(0, 0, "start", 0), (1, 1, "schedule", 1), (2, 1, "schedule", 1)]


def test_a_full_recorder_says_so_once_and_loses_nothing_before() -> None:
    recorder = Recorder(f.trace(), lambda event: snapshot(f.frame()), max_frames=3)
    for _ in range(10):
        recorder.emit(EVENT)
    events = [x.event for x in recorder.trace.frames]
    assert events[:3] == [EVENT] * 3
    assert isinstance(events[3], RecordingStopped)
    assert len(events) == 4
    assert recorder.is_full


def test_the_event_that_found_no_room_is_still_followed() -> None:
    """The last frame shows the state after it, so whoever reads the state must hear of it, and of nothing after."""
    heard: list[Event] = []

    def capture(event: Event) -> Snapshot:
        heard.append(event)
        return snapshot(f.frame())

    recorder = Recorder(f.trace(), capture, max_frames=1)
    events = [StepStarted(cause=f.CAUSE, token_budget=budget) for budget in range(3)]
    for event in events:
        recorder.emit(event)
    assert heard == events[:2]


def test_a_broken_state_stops_the_run_and_stays_in_the_trace() -> None:
    recorder = Recorder(f.trace(), lambda event: snapshot(f.frame(free_queue=())), max_frames=10)
    with pytest.raises(IntegrityError, match="frame 0 breaks"):
        recorder.emit(EVENT)
    assert len(recorder.trace.frames) == 1


def test_a_run_that_reproduces_mistakes_may_break_what_it_must() -> None:
    half = f.with_block(f.frame(), 1, token_ids=(10, 11, None, None), num_filled=2)
    recorder = Recorder(f.trace(), lambda event: snapshot(half), max_frames=10, tolerated=ABOUT_CONTENTS)
    recorder.begin_op("update_from_output")
    recorder.emit(EVENT)
    assert {v.invariant for v in check_integrity(recorder.trace.frames[0])} == {"only full blocks are hashed"}
    recorder = Recorder(f.trace(), lambda event: snapshot(f.frame(free_queue=())), max_frames=10, tolerated=ABOUT_CONTENTS)
    with pytest.raises(IntegrityError):
        recorder.emit(EVENT)


def test_a_failure_is_the_last_frame_even_when_the_state_is_broken() -> None:
    seen: list[Event] = []

    def capture(event: Event) -> Snapshot:
        seen.append(event)
        return snapshot(f.frame(free_queue=()))

    recorder = Recorder(f.trace(), capture, max_frames=10)
    recorder.fail("the pool is on fire")
    assert isinstance(recorder.trace.frames[-1].event, EngineFailed)
    assert seen[-1] is recorder.trace.frames[-1].event
