"""Figure 3 of the paper with the numbers of a simulation: the slots of the memory, drawn to scale in rows, at one moment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import plotly.graph_objects as go

from views.figures.memory_style import FREE, NEVER_USED, RESERVED, USED, Kind, bar_marker, finish

SlotKind = Literal["used", "reserved", "never used", "rounding", "free"]
KINDS: dict[SlotKind, Kind] = {
    "used": USED,
    "reserved": RESERVED,
    "never used": NEVER_USED,
    "rounding": Kind("rounded up", "#a9b4c2", "\\"),
    "free": Kind("free", FREE.fill, FREE.pattern),
}


@dataclass(frozen=True)
class Segment:
    """Slots `start` .. `start + length - 1` of the memory, all of one kind. `request`: whose they are; None if free."""

    start: int
    length: int
    kind: SlotKind
    request: str | None = None


def slot_strip(segments: Sequence[Segment], num_slots: int, row_length: int, height: int = 300) -> go.Figure:
    """All slots from left to right and top to bottom, `row_length` in a row, to scale. A request's name stands where it has room.

    Raises ValueError when a segment reaches beyond the memory.
    """
    pieces: dict[SlotKind, list[tuple[int, int, int, Segment]]] = {kind: [] for kind in KINDS}
    for segment in segments:
        if segment.start < 0 or segment.length < 0 or segment.start + segment.length > num_slots:
            raise ValueError(f"slots {segment.start} to {segment.start + segment.length - 1} are not in a memory of {num_slots} slots")
        pieces[segment.kind].extend((*piece, segment) for piece in cut(segment.start, segment.length, row_length))
    rows = -(-num_slots // row_length)
    figure = go.Figure()
    for kind, look in KINDS.items():
        found = pieces[kind]
        if not found:
            continue
        figure.add_bar(
            orientation="h",
            base=[column for _, column, _, _ in found],
            x=[length for _, _, length, _ in found],
            y=[row for row, _, _, _ in found],
            width=0.84,
            name=look.words,
            marker=bar_marker(look),
            text=[_name(segment) if length * 52 >= row_length and kind == "used" else "" for _, _, length, segment in found],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            constraintext="none",
            insidetextfont={"color": look.ink, "size": 11},
            customdata=[[segment.start, segment.start + segment.length - 1, segment.length, _owner(segment)] for _, _, _, segment in found],
            hovertemplate=f"slots %{{customdata[0]}} to %{{customdata[1]}}: %{{customdata[2]}} {look.words}%{{customdata[3]}}<extra></extra>",
        )
    figure.update_xaxes(range=[0, row_length], title=None, fixedrange=True, tickvals=[0, row_length // 4, row_length // 2, 3 * row_length // 4, row_length])
    figure.update_yaxes(
        range=[rows - 0.5, -0.5],
        tickvals=list(range(rows)),
        ticktext=[f"{row * row_length:,}" for row in range(rows)],
        title={"text": "first slot of the row", "font": {"size": 12}},
        fixedrange=True,
        showgrid=False,
    )
    return finish(figure, height, barmode="overlay")


def slot_strip_rows(segments: Iterable[Segment]) -> list[dict[str, object]]:
    """The chart's data, one row a segment."""
    return [{"first_slot": s.start, "slots": s.length, "kind": s.kind, "request": s.request or ""} for s in segments]


def cut(start: int, length: int, row_length: int) -> list[tuple[int, int, int]]:
    """A run of slots as pieces of rows: (row, column, length)."""
    pieces = []
    while length > 0:
        row, column = divmod(start, row_length)
        part = min(length, row_length - column)
        pieces.append((row, column, part))
        start, length = start + part, length - part
    return pieces


def joined(segments: Iterable[Segment]) -> list[Segment]:
    """The same picture in fewer segments: neighbours of one kind and one request become one."""
    result: list[Segment] = []
    for segment in sorted((s for s in segments if s.length), key=lambda s: s.start):
        last = result[-1] if result else None
        if last and last.kind == segment.kind and last.request == segment.request and last.start + last.length == segment.start:
            result[-1] = Segment(last.start, last.length + segment.length, last.kind, last.request)
        else:
            result.append(segment)
    return result


def _name(segment: Segment) -> str:
    return segment.request or ""


def _owner(segment: Segment) -> str:
    return f", request {segment.request}" if segment.request else ""
