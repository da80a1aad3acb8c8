"""A run as plain text: one line per frame."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from engine.trace.events import BeamsChosen, kind_of
from engine.trace.frame import Frame, Trace

MAX_VALUE = 72


def walk(
    trace: Trace,
    notes: Mapping[int, str],
    corrections: Mapping[int, Sequence[Mapping[str, str]]] | None = None,
    unconfirmed: Collection[int] = (),
) -> Iterator[str]:
    """One line per frame (number, engine step, operation, event, request, group if there are several, fields, cause); a scenario's note follows its frame,
    indented, with a remark if a value in it is `unconfirmed`, and then the `corrections` of what one may have read."""
    for frame in trace.frames:
        yield frame_line(frame, trace)
        if frame.seq in notes:
            yield f"{'':>5} │ {notes[frame.seq]}{' (A value in this sentence is confirmed by no source.)' if frame.seq in unconfirmed else ''}"
        for correction in (corrections or {}).get(frame.seq, ()):
            yield f"{'':>5} │ What you may have read: {correction['read']}"
            yield f"{'':>5} │ What happens ({correction['rule']}): {correction['really']}"


def placed_in(trace: Trace) -> tuple[dict[int, str], dict[int, list[dict[str, str]]], set[int]]:
    """Notes, corrections and frames with unconfirmed notes as a trace's header has them. What does not look like that is left out: a file may say anything."""
    scenario = trace.header.scenario
    notes = scenario.get("resolved_notes")
    corrections = scenario.get("resolved_corrections")
    unconfirmed = scenario.get("unconfirmed_notes")
    return (
        {int(seq): str(text) for seq, text in notes.items() if str(seq).isdigit()} if isinstance(notes, dict) else {},
        {int(seq): _corrections(found) for seq, found in corrections.items() if str(seq).isdigit()} if isinstance(corrections, dict) else {},
        {seq for seq in unconfirmed if isinstance(seq, int)} if isinstance(unconfirmed, list) else set(),
    )


def _corrections(found: Any) -> list[dict[str, str]]:
    entries = [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
    return [{name: str(entry.get(name, "")) for name in ("read", "really", "rule")} for entry in entries]


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
    if isinstance(event, BeamsChosen):
        del fields["candidates"]
        gone_on = [c for c in event.candidates if c.sequence_id is not None or c.finished]
        fields["survivors"] = ", ".join(f"{c.parent_id}+{vocabulary.get(c.token_id, '')}→{c.sequence_id or 'finished'}" for c in gone_on)
        fields["num_dropped"] = len(event.candidates) - len(gone_on)
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
