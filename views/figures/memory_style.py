"""What the charts of the memory screen have in common: a colour and a pattern for each kind of slot, a line for each system, the margins.

The colours are those of Okabe and Ito, which people with any kind of colour vision tell apart; a pattern, a dash or a marker says the same without colour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

INK, MUTE = "#1b2430", "#7a8696"


@dataclass(frozen=True)
class Kind:
    """What a slot of memory is doing: its words, its fill, the pattern over it ("" for none) and the colour of text on it."""

    words: str
    fill: str
    pattern: str
    ink: str = INK


USED = Kind("token states", "#0072b2", "", "#ffffff")
RESERVED = Kind("reserved", "#f0c35a", "/")
NEVER_USED = Kind("never used", "#d98cb3", "x")
FREE = Kind("external", "#d3dae3", ".")
REST = Kind("not split", "#e8ecf1", "+")


@dataclass(frozen=True)
class Line:
    """How a system is drawn over time."""

    colour: str
    dash: str
    marker: str


LINES = (
    Line("#d55e00", "dot", "square"),
    Line("#b8568f", "dash", "diamond"),
    Line("#009e73", "dashdot", "triangle-up"),
    Line("#0072b2", "solid", "circle"),
)


def bar_marker(kind: Kind) -> dict[str, Any]:
    """The `marker` of a bar trace for this kind of slot."""
    pattern = {"shape": kind.pattern, "fgcolor": "rgba(27,36,48,0.38)", "size": 6, "solidity": 0.16, "fillmode": "overlay"}
    return {"color": kind.fill, "line": {"color": "rgba(27,36,48,0.55)", "width": 0.6}, "pattern": pattern if kind.pattern else None}


def finish(figure: go.Figure, height: int, **layout: Any) -> go.Figure:
    """The same frame for every chart: height in pixels, little margin, legend in one row above, no zooming by accident."""
    settings: dict[str, Any] = {
        "height": height,
        "margin": {"l": 8, "r": 12, "t": 34, "b": 8},
        "font": {"size": 13},
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1,
            "yanchor": "bottom",
            "entrywidth": 0,
            "entrywidthmode": "pixels",
            "traceorder": "normal",
            "itemsizing": "constant",
        },
        "hoverlabel": {"font": {"size": 13}},
        "dragmode": False,
    }
    figure.update_layout(**{**settings, **layout})
    figure.update_xaxes(automargin=True)
    figure.update_yaxes(automargin=True)
    return figure
