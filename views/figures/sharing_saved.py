"""Figure 15 of the paper, measured again: the share of blocks that sharing saves when a request has several outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from views.figures.memory_style import NEVER_USED, RESERVED, USED, Kind, bar_marker, finish

MEASURED = Kind("counted here, small model", USED.fill, "", USED.ink)
ARITHMETIC = Kind("arithmetic, chosen requests", RESERVED.fill, RESERVED.pattern)
PAPER = Kind("paper (OPT-13B, Alpaca)", NEVER_USED.fill, NEVER_USED.pattern)


@dataclass(frozen=True)
class Saving:
    """One place on the axis, such as parallel sampling with 4 outputs; percent of the blocks saved. None: not measured, or not printed in the paper.

    `lowest` and `highest`: of the requests measured. `unconfirmed`: no source confirms the paper's value.
    """

    group: str
    setting: str
    measured: float | None = None
    lowest: float | None = None
    highest: float | None = None
    arithmetic: float | None = None
    paper: float | None = None
    unconfirmed: bool = False


def sharing_saved(savings: Sequence[Saving], height: int = 400) -> go.Figure:
    """Bars side by side, values above them; `?` marks what no source confirms."""
    figure = go.Figure()
    places = [[s.group for s in savings], [s.setting for s in savings]]
    for kind, name in ((MEASURED, "measured"), (ARITHMETIC, "arithmetic"), (PAPER, "paper")):
        values = [getattr(s, name) for s in savings]
        if all(value is None for value in values):
            continue
        marks = ["?" if name == "paper" and s.unconfirmed else "" for s in savings]
        figure.add_bar(
            x=places,
            y=values,
            name=kind.words,
            marker=bar_marker(kind),
            text=["" if value is None else f"{value:.1f}{mark}" for value, mark in zip(values, marks, strict=True)],
            textposition="outside",
            textangle=0,
            constraintext="none",
            cliponaxis=False,
            customdata=[_spread(s) if name == "measured" else "" for s in savings],
            hovertemplate=f"%{{x}}: %{{y:.2f}} % saved, {kind.words}<br>%{{customdata}}<extra></extra>",
        )
    figure.update_xaxes(fixedrange=True)
    values = [value for s in savings for value in (s.measured, s.arithmetic, s.paper) if value is not None]
    top = min(100.0, 1.12 * max(values, default=100.0))
    figure.update_yaxes(title="blocks saved, %", range=[0, top], fixedrange=True)
    return finish(figure, height, barmode="group", bargap=0.22)


def sharing_rows(savings: Sequence[Saving]) -> list[dict[str, object]]:
    """The chart's data, one row a place on the axis."""
    return [
        {
            "decoding": s.group,
            "setting": s.setting,
            "measured_percent": _cell(s.measured),
            "lowest_percent": _cell(s.lowest),
            "highest_percent": _cell(s.highest),
            "arithmetic_percent": _cell(s.arithmetic),
            "paper_percent": _cell(s.paper),
            "paper_value_unconfirmed": s.unconfirmed,
        }
        for s in savings
    ]


def _spread(saving: Saving) -> str:
    if saving.lowest is None or saving.highest is None:
        return ""
    return f"{saving.lowest:.1f} to {saving.highest:.1f} % from request to request"


def _cell(value: float | None) -> object:
    return "" if value is None else round(value, 4)
