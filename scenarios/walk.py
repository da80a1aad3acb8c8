"""A run as plain text: one line per frame."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.trace.events import kind_of
from engine.trace.frame import Frame, Trace

MAX_VALUE = 72


def walk(trace: Trace, notes: dict[int, str]) -> Iterator[str]:
    """One line per frame (number, engine step, operation, event, request, group if there are several, fields, cause); a scenario's note follows its frame,
    indented."""
    for frame in trace.frames:
        yield frame_line(frame, trace)
        if frame.seq in notes:
            yield f"{'':>5} │ {notes[frame.seq]}"


def frame_line(frame: Frame, trace: Trace) -> str:
    """``  12  step 2  schedule            blocks_allocated    A  block_ids=[3]  (head_of_free_queue: num_required=1)``."""
    event = frame.event
    skip = ("cause", "request_id", "group_id")
    fields = {name: getattr(event, name) for name in event.__struct_fields__ if name not in skip}
    vocabulary = trace.header.vocabulary
    if "token_id" in fields:
        fields["token"] = vocabulary.get(fields.pop("token_id"), "")
    if "token_ids" in fields:
        fields["tokens"] = " ".join(vocabulary.get(t, f"<{t}>") for t in fields.pop("token_ids"))
    if fields.get("groups"):
        fields["groups"] = ", ".join(f"g{g.group_id} {g.block_ids} {g.cause.kind.value}" for g in fields["groups"])
    for name in ("block_hash", "parent_hash"):
        if fields.get(name):
            fields[name] = f"{fields[name][:8]}…"
    facts = ", ".join(f"{name}={_value(value)}" for name, value in event.cause.facts.items())
    cause = f"({event.cause.kind.value}{': ' if facts else ''}{facts})"
    shown = "  ".join(f"{name}={_value(value)}" for name, value in fields.items())
    group = f"g{event.group_id} " if event.group_id is not None and len(trace.header.config.get("kv_cache_groups") or ()) > 1 else ""
    line = f"{frame.seq:>5}  step {frame.step:<3} {frame.op:<20} {kind_of(event):<19} {event.request_id or '-':<4} {group}{shown}  {cause}"
    return " ".join(line.splitlines()).rstrip()


def _value(value: Any) -> str:
    text = f"“{value}”" if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 1]}…"
