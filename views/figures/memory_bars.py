"""Figure 2 of the paper, computed again: what the memory of the KV cache holds under four systems, beside the bars that the paper prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from views.figures.memory_style import FREE, NEVER_USED, RESERVED, REST, USED, Kind, bar_marker, finish

FIELDS: tuple[tuple[str, Kind], ...] = (
    ("token_states", USED),
    ("reservation", RESERVED),
    ("internal", NEVER_USED),
    ("external", FREE),
    ("rest", REST),
)
NARROW = 4.2
"""A part of fewer percent has no room for its number, which then stands behind the bar."""


@dataclass(frozen=True)
class MemoryShares:
    """One bar, in percent of the KV cache's memory. `source`: who says so, under the system's name. `unconfirmed`: fields whose value no source confirms.

    `rest`: what is not split any further. A field that is None is not told.
    """

    system: str
    source: str
    token_states: float
    reservation: float | None = 0.0
    internal: float | None = 0.0
    external: float | None = 0.0
    rest: float | None = 0.0
    unconfirmed: frozenset[str] = frozenset()


def memory_bars(bars: Sequence[MemoryShares], height: int = 400) -> go.Figure:
    """Horizontal stacked bars from top to bottom in the order given; bars of one system lie together. Values are written in the bars; `?` marks unconfirmed
    ones."""
    figure = go.Figure()
    places = [[bar.system for bar in bars], [bar.source for bar in bars]]
    for name, kind in FIELDS:
        values = [getattr(bar, name) or 0.0 for bar in bars]
        if not any(values):
            continue
        texts = [_text(bar, name) if value >= NARROW else "" for bar, value in zip(bars, values, strict=True)]
        figure.add_bar(
            orientation="h",
            x=values,
            y=places,
            name=kind.words,
            marker=bar_marker(kind),
            text=texts,
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            constraintext="none",
            insidetextfont={"color": kind.ink, "size": 13},
            customdata=[_text(bar, name) for bar in bars],
            hovertemplate=f"%{{customdata}} % {kind.words}<extra></extra>",
        )
    for bar in bars:
        if not any(getattr(bar, name) for name, _ in FIELDS):
            figure.add_annotation(x=0, y=[bar.system, bar.source], text="serves none of these requests", showarrow=False, xanchor="left", xshift=6)
        behind = [f"{_text(bar, name)} {kind.words}" for name, kind in FIELDS if 0.05 <= (getattr(bar, name) or 0.0) < NARROW]
        if behind:
            figure.add_annotation(
                x=100, y=[bar.system, bar.source], text="<br>".join(behind), showarrow=False, xanchor="left", align="left", xshift=4, font={"size": 11}
            )
    figure.update_xaxes(range=[0, 100], ticksuffix=" %", title=None, fixedrange=True)
    figure.update_yaxes(autorange="reversed", fixedrange=True, showdividers=False)
    return finish(figure, height, barmode="stack", bargap=0.16, margin={"l": 8, "r": 96, "t": 34, "b": 8})


def memory_bar_rows(bars: Sequence[MemoryShares]) -> list[dict[str, object]]:
    """The chart's data, one row a bar: percent of the KV cache's memory, and which values are unconfirmed."""
    return [
        {
            "system": bar.system,
            "source": bar.source,
            **{f"{name}_percent": getattr(bar, name) for name, _ in FIELDS},
            "unconfirmed": " ".join(sorted(bar.unconfirmed)),
        }
        for bar in bars
    ]


def _text(bar: MemoryShares, name: str) -> str:
    return f"{getattr(bar, name) or 0.0:.1f}{'?' if name in bar.unconfirmed else ''}"
