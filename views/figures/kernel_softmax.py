"""Online softmax, tile by tile: the largest score so far and the sum of the weights so far, as the kernel had them in registers."""

from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go

from engine.trace.closeup import RowProgress
from views.figures.canvas import AMBER, BLUE, GREEN, GREY
from views.figures.kernel_style import number
from views.figures.memory_style import finish

UNSEEN = -1.0e37
"""A maximum below it is the kernel's start value: the row has seen no key yet."""


@dataclass(frozen=True)
class SoftmaxStep:
    """One tile of a row's loop. `old_maximum` None: nothing was seen before. `scale` = 2^(old - new maximum), by which the sum of before is multiplied;
    `added`: the weights of the tile's keys, relative to the new maximum."""

    tile: int
    old_maximum: float | None
    maximum: float | None
    old_total: float
    scale: float
    added: float
    total: float


def softmax_steps(row: RowProgress, tiles: list[int]) -> list[SoftmaxStep]:
    """The row's progress with what lies between two tiles worked out. `tiles`: the numbers of the loop's tiles."""
    steps: list[SoftmaxStep] = []
    old: float | None = None
    old_total = 0.0
    for tile, value, total in zip(tiles, row.maxima, row.totals, strict=False):
        new = None if value < UNSEEN else value
        if new is None:
            steps.append(SoftmaxStep(tile, old, None, old_total, 1.0, 0.0, total))
            continue
        scale = 2.0 ** (old - new) if old is not None else 0.0
        steps.append(SoftmaxStep(tile, old, new, old_total, scale, total - old_total * scale, total))
        old, old_total = new, total
    return steps


def softmax_progress(steps: list[SoftmaxStep], index: int, height: int = 196) -> go.Figure:
    """Maximum on the left, sum on the right, up to tile `index` of the loop; what comes later is not drawn, but has its place."""
    done = steps[: index + 1]
    labels = [str(step.tile) for step in steps]
    figure = go.Figure()
    for values, axis, name, colour, symbol in (
        ([s.maximum for s in done], "", "largest score", BLUE, "circle"),
        ([s.total if s.maximum is not None else None for s in done], "2", "sum of weights", GREEN, "square"),
    ):
        x = [str(step.tile) for step in done]
        figure.add_scatter(
            x=x, y=values, xaxis=f"x{axis}", yaxis=f"y{axis}", name=name, mode="lines+markers+text", line={"color": colour, "width": 2, "shape": "hv"},
            marker={"symbol": symbol, "size": [13 if i == index else 8 for i in range(len(done))], "color": colour,
                    "line": {"color": [AMBER if i == index else colour for i in range(len(done))], "width": 2.5}},
            text=[number(v) if i == index and v is not None else "" for i, v in enumerate(values)], textposition="top center", textfont={"size": 13},
            hovertemplate="after tile %{x}: %{y:.6g}<extra></extra>", cliponaxis=False,
        )  # fmt: skip
    maxima = [s.maximum for s in steps if s.maximum is not None] or [0.0]
    totals = [s.total for s in steps if s.maximum is not None] or [1.0]
    low, high = min(maxima), max(maxima)
    room = max(high - low, abs(high) * 0.1, 1.0)
    places = {"type": "category", "categoryorder": "array", "categoryarray": labels, "range": [-0.6, len(labels) - 0.4], "fixedrange": True, "showgrid": False}
    ticks = {"tickvals": labels[:: -(-len(labels) // 10)]}
    figure.update_layout(
        xaxis={**places, **ticks, "domain": [0, 0.46], "anchor": "y", "title": {"text": "after tile", "font": {"size": 12}, "standoff": 2}},
        xaxis2={**places, **ticks, "domain": [0.56, 1], "anchor": "y2", "title": {"text": "after tile", "font": {"size": 12}, "standoff": 2}},
        yaxis={"range": [low - 0.25 * room, high + 0.45 * room], "fixedrange": True, "nticks": 5},
        yaxis2={"range": [0, max(totals) * 1.4], "fixedrange": True, "anchor": "x2", "nticks": 5, "ticklabeloverflow": "allow"},
    )
    finish(figure, height)
    figure.update_layout(margin={"l": 8, "r": 12, "t": 30, "b": 6}, plot_bgcolor="rgba(0,0,0,0)")
    figure.update_xaxes(linecolor=GREY)
    return figure


def softmax_rows(steps: list[SoftmaxStep]) -> list[dict[str, object]]:
    """The chart's data, one row a tile."""
    return [
        {"tile": s.tile, "maximum": s.maximum, "scale_of_what_was_before": s.scale, "weights_added": s.added, "total": s.total}
        for s in steps
    ]  # fmt: skip


def _bracketed(value: float) -> str:
    """A number behind a minus."""
    return number(value) if value >= 0 else f"({number(value)})"


def softmax_words(steps: list[SoftmaxStep], index: int, split: bool = False) -> str:
    """What happened to the row in this tile. `split`: the keys are shared by several programs."""
    if not steps:
        return "The kernel told nothing about this row."
    step = steps[index]
    if step.maximum is None:
        return f"This query sees no key of tile {step.tile}. What the loop adds up here weighs nothing: the first key that it does see scales it by 0."
    if step.old_maximum is None:
        start = (
            f"Tile {step.tile} is the first with keys for this query: its largest score is {number(step.maximum)}, its weights add up to {number(step.total)}."
        )
    elif step.maximum > step.old_maximum:
        start = (
            f"Tile {step.tile} found a larger score, {number(step.maximum)} instead of {number(step.old_maximum)}: all that was summed up before is scaled by "
            f"2^({number(step.old_maximum)} − {_bracketed(step.maximum)}) = {number(step.scale)}. "
            f"Sum: {number(step.old_total)} · {number(step.scale)} + {number(step.added)} = {number(step.total)}."
        )
    else:
        start = (
            f"Tile {step.tile} found no larger score than {number(step.maximum)}: what was summed up before stays. "
            f"Sum: {number(step.old_total)} + {number(step.added)} = {number(step.total)}."
        )
    if index == len(steps) - 1 and split:
        start += " The loop ends: a second kernel merges what this program and those beside it have found, by the same rule."
    elif index == len(steps) - 1:
        start += f" The loop ends: the weighted sum of the values, divided by {number(step.total)}, is the output."
    return start
