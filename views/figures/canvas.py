"""A drawing board for what is no chart: boxes, words and arrows in coordinates of one's own, as a Plotly figure, so that it can be saved like every other.

The colours are those of Okabe and Ito. Words outside filled boxes have no colour of their own, so that they follow the light or dark theme of the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

BLUE, ORANGE, GREEN, PURPLE, AMBER, GREY = "#0072b2", "#d55e00", "#009e73", "#b8568f", "#f0b429", "#7a8696"
INK = "#1b2430"
MARK = "rgba(112,124,142,0.8)"
"""Lines and patterns that are seen on light and on dark pages."""


def tint(colour: str, share: float) -> str:
    """A colour that lets `share` of itself be seen over whatever is behind it: right on light and on dark pages."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{share:g})"


@dataclass(frozen=True)
class Fill:
    """How a kind of area looks: its name in the legend, its colour, and the pattern (in the colour `mark`) that says the same without colour,
    "" for none."""

    name: str
    colour: str
    pattern: str = ""
    share: float = 0.85
    mark: str = MARK


@dataclass
class Canvas:
    """Collects parts; `figure` makes them one. x grows to the right and y downwards, in the units of `width` and `height`; `pixels`: height on screen."""

    width: float
    height: float
    pixels: int
    shapes: list[dict[str, Any]] = field(default_factory=list)
    annotations: list[dict[str, Any]] = field(default_factory=list)
    hovers: list[tuple[float, float, str]] = field(default_factory=list)
    areas: dict[Fill, list[tuple[float, float, float, float, str]]] = field(default_factory=dict)

    def box(self, x: float, y: float, width: float, height: float, **look: Any) -> None:
        """A rectangle. `look`: `fill`, `line`, `line_width`, `dash`, `text` in its middle with `size` and `colour`, `hover`."""
        line = {"color": look.get("line", GREY), "width": look.get("line_width", 1.2), "dash": look.get("dash", "solid")}
        corners = {"x0": x, "x1": x + width, "y0": y, "y1": y + height}
        self.shapes.append({"type": "rect", **corners, "line": line, "fillcolor": look.get("fill", "rgba(0,0,0,0)"), "layer": look.get("layer", "below")})
        if look.get("text"):
            self.words(x + width / 2, y + height / 2, look["text"], size=look.get("size", 13), colour=look.get("colour"))
        if look.get("hover"):
            self.hovers.append((x + width / 2, y + height / 2, look["hover"]))

    def area(self, x: float, y: float, width: float, height: float, fill: Fill, hover: str = "") -> None:
        """A rectangle with a pattern, which the legend explains."""
        self.areas.setdefault(fill, []).append((x, y, width, height, hover))

    def words(
        self, x: float, y: float, text: str, *, size: float = 13, colour: str | None = None, left: bool = False, right: bool = False, **more: Any
    ) -> None:
        """Text around (x, y), or to the right or left of it."""
        font: dict[str, Any] = {"size": size}
        if colour:
            font["color"] = colour
        anchor = "left" if left else "right" if right else "center"
        self.annotations.append(
            {"x": x, "y": y, "text": text, "showarrow": False, "xanchor": anchor, "align": anchor, "font": font, "borderpad": 0, "yanchor": "middle", **more}
        )

    def arrow(self, x0: float, y0: float, x1: float, y1: float, *, colour: str = GREY, width: float = 1.6, both: bool = False) -> None:
        """An arrow from the first point to the second."""
        place = {"x": x1, "y": y1, "ax": x0, "ay": y0, "xref": "x", "yref": "y", "axref": "x", "ayref": "y"}
        look = {"showarrow": True, "text": "", "arrowhead": 2, "arrowsize": 1.1, "arrowwidth": width, "arrowcolor": colour, "standoff": 1}
        back = {"arrowside": "end+start", "startarrowhead": 2, "startarrowsize": 1.1, "startstandoff": 1} if both else {}
        self.annotations.append({**place, **look, **back})

    def line(self, points: Sequence[tuple[float, float]], *, colour: str = GREY, width: float = 1.6, dash: str = "solid") -> None:
        """Straight lines from point to point."""
        path = "M " + " L ".join(f"{x:g},{y:g}" for x, y in points)
        line = {"color": colour, "width": width, "dash": dash}
        self.shapes.append({"type": "path", "path": path, "line": line, "layer": "below"})

    def bent_arrow(self, points: Sequence[tuple[float, float]], *, colour: str = GREY, width: float = 1.6) -> None:
        """A line from point to point with the arrow's head at its end."""
        if len(points) > 2:
            self.line(points[:-1], colour=colour, width=width)
        self.arrow(*points[-2], *points[-1], colour=colour, width=width)

    def figure(self) -> go.Figure:
        """Everything as one figure without axes, made at once: Plotly takes far longer for the same parts one after another."""
        traces = [self._area(fill, found) for fill, found in self.areas.items()]
        told = [*self.hovers, *((x + width / 2, y + height / 2, words) for found in self.areas.values() for x, y, width, height, words in found if words)]
        if told:
            x, y, text = zip(*told, strict=True)
            marker = {"size": 24, "opacity": 0, "symbol": "square"}
            hover = {"type": "scatter", "x": x, "y": y, "text": text, "hovertemplate": "%{text}<extra></extra>"}
            traces.append({**hover, "mode": "markers", "marker": marker, "showlegend": False})
        hidden = {"visible": False, "fixedrange": True}
        layout = {
            "height": self.pixels,
            "margin": {"l": 4, "r": 4, "t": 38 if self.areas else 30, "b": 4},
            "xaxis": {**hidden, "range": [0, self.width]},
            "yaxis": {**hidden, "range": [self.height, 0]},
            "shapes": self.shapes,
            "annotations": self.annotations,
            "dragmode": False,
            "hovermode": "closest",
            "showlegend": bool(self.areas),
            "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "itemclick": False, "itemdoubleclick": False},
        }
        return go.Figure(data=traces, layout=layout)

    def _area(self, fill: Fill, found: list[tuple[float, float, float, float, str]]) -> dict[str, Any]:
        """One trace per kind, its rectangles one after another with gaps between them."""
        x: list[float | None] = []
        y: list[float | None] = []
        for left, top, width, height, _ in found:
            x += [left, left + width, left + width, left, left, None]
            y += [top, top, top + height, top + height, top, None]
        look: dict[str, Any] = {"type": "scatter", "mode": "lines", "line": {"width": 0.8, "color": MARK}, "hoverinfo": "skip"}
        if fill.pattern:
            look["fillpattern"] = {"shape": fill.pattern, "fgcolor": fill.mark, "size": 6, "solidity": 0.18, "fillmode": "overlay"}
        return {**look, "x": x, "y": y, "fill": "toself", "fillcolor": tint(fill.colour, fill.share), "name": fill.name, "showlegend": True}
