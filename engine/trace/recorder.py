"""The recorder: one event in, one checked frame out.

It knows neither scheduler nor worker: a `capture` callable hands it the logical state. It is bounded, with a visible last frame instead of silent
loss, and it refuses to record a state that breaks an invariant (`IntegrityError`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, cast

from engine.trace.events import AnyEvent, Cause, CauseKind, EngineFailed, Event, RecordingStopped
from engine.trace.frame import BlockState, Counters, Frame, RequestState, Trace, WorkerRow
from engine.trace.integrity import IntegrityError
from engine.trace.running_check import RunningCheck


class Snapshot(NamedTuple):
    """The logical state at one moment: a frame without its place in the run. Fields as in `Frame`."""

    blocks: Sequence[BlockState]
    free_queue: Sequence[int]
    hash_map: Sequence[tuple[str, tuple[int, ...]]]
    requests: Sequence[RequestState]
    running: tuple[str, ...]
    waiting: tuple[str, ...]
    rows: tuple[WorkerRow, ...]
    slot_mapping: tuple[int, ...]
    scheduled: dict[str, int]
    counters: Counters
    cpu_blocks: Sequence[BlockState] = ()
    cpu_free_queue: Sequence[int] = ()
    swapped: tuple[str, ...] = ()


class Recorder:
    """Appends frames to `trace`. `max_frames` bounds it: the frame after the last one that fits is a `RecordingStopped`, then nothing more.

    `capture(event)` is called once per event, after it happened, and must not change anything. `tolerated`: names of invariants that the run may break, as
    one that reproduces vLLM's mistakes does.
    """

    def __init__(self, trace: Trace, capture: Callable[[Event], Snapshot], *, max_frames: int, tolerated: Collection[str] = ()) -> None:
        self.trace = trace
        self.step = 0
        self.is_full = False
        self._capture = capture
        self._check = RunningCheck()
        self._max_frames = max_frames
        self._tolerated = tolerated
        self._op = "start"
        self._op_index = 0

    def begin_op(self, op: str) -> None:
        """Frames from here on belong to a new operation."""
        self._op = op
        self._op_index += 1

    def begin_step(self) -> None:
        """Frames from here on belong to the next engine step."""
        self.step += 1

    def emit(self, event: Event) -> None:
        """Record `event` and the state after it. Mutates the trace. Raises IntegrityError (the broken frame is recorded, so it can be looked at)."""
        if self.is_full:
            return
        if len(self.trace.frames) >= self._max_frames:
            self.is_full = True
            cause = Cause(CauseKind.RECORDER_FULL, {"max_frames": self._max_frames})
            self._append(RecordingStopped(cause=cause, num_frames=len(self.trace.frames)), after=event)
            return
        previous = self.trace.frames[-1] if self.trace.frames else None
        frame = self._append(event)
        violations = [v for v in self._check.check(frame, previous) if v.invariant not in self._tolerated]
        if violations:
            raise IntegrityError(frame.seq, violations)

    def fail(self, message: str) -> None:
        """Record the last frame of a run that raised: the state as it is, unchecked, and the sentence."""
        self._append(EngineFailed(cause=Cause(CauseKind.ERROR), message=message))

    def _append(self, event: Event, after: Event | None = None) -> Frame:
        """A frame for `event` with the state after it, or after an event that gets no frame of its own."""
        state = self._capture(after if after is not None else event)
        frame = Frame(seq=len(self.trace.frames), step=self.step, op=self._op, op_index=self._op_index, event=cast(AnyEvent, event), **state._asdict())
        self.trace.frames.append(frame)
        return frame
