"""A cursor over a trace. Stepping back is moving the cursor: nothing is undone, nothing is computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from engine.errors import InvalidInput
from engine.trace.events import EVENT_KINDS, kind_of
from engine.trace.frame import Frame, Trace

StepSize: TypeAlias = Literal["event", "operation", "step"]


class Timeline:
    """The position in a trace that may still grow. `position` is the index of the current frame. Never changes the trace.

    Raises InvalidInput when the trace has no frame.
    """

    def __init__(self, trace: Trace, position: int = 0) -> None:
        if not trace.frames:
            raise InvalidInput("the trace has no frames, so there is nothing to step through: record at least one operation first")
        self.trace = trace
        self.position = 0
        self.seek(position)

    @property
    def frame(self) -> Frame:
        """The current frame."""
        return self.trace.frames[self.position]

    @property
    def previous(self) -> Frame | None:
        """The frame before the current one, None at the start."""
        return self.trace.frames[self.position - 1] if self.position else None

    def seek(self, position: int) -> Frame:
        """Move to a frame by index; outside the trace it stops at the nearer end. Negative indices are before the start, not from the end."""
        self.position = min(max(position, 0), len(self.trace.frames) - 1)
        return self.frame

    def forward(self, size: StepSize = "event") -> Frame:
        """One step on: to the next frame, or to the last frame of the next operation or engine step. Stays at the end."""
        if size == "event":
            return self.seek(self.position + 1)
        key = _key(size)
        last = len(self.trace.frames) - 1
        if self.position < last:
            self.position += 1
        while self.position < last and key(self.trace.frames[self.position + 1]) == key(self.frame):
            self.position += 1
        return self.frame

    def back(self, size: StepSize = "event") -> Frame:
        """One step back: to the frame before, or to the last frame of the operation or engine step before. Stays at the start."""
        if size == "event":
            return self.seek(self.position - 1)
        key = _key(size)
        here = key(self.frame)
        while self.position > 0 and key(self.frame) == here:
            self.position -= 1
        return self.frame

    def next(self, kind: str, request_id: str | None = None) -> Frame | None:
        """Move to the next later frame whose event is of `kind` (and of that request, if given). None, and no move, when there is none.

        Raises InvalidInput for a kind that does not exist.
        """
        if kind not in EVENT_KINDS:
            raise InvalidInput(f"there is no event kind “{kind}”: the kinds are {', '.join(EVENT_KINDS)}")
        for position in range(self.position + 1, len(self.trace.frames)):
            event = self.trace.frames[position].event
            if kind_of(event) == kind and request_id in (None, event.request_id):
                return self.seek(position)
        return None


def _key(size: StepSize) -> Callable[[Frame], int]:
    if size == "operation":
        return lambda frame: frame.op_index
    return lambda frame: frame.step
