"""How many requests run at once, iteration by iteration, under each system."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from views.figures.memory_style import LINES, finish

MAX_POINTS = 240
MARKS = 7


@dataclass(frozen=True)
class BatchLine:
    """(iteration, requests running from then on), in order; the last entry is the end. `mean`: what the legend says about the line, over its iterations."""

    system: str
    changes: Sequence[tuple[int, float]]
    mean: float


def batch_over_time(lines: Sequence[BatchLine], height: int = 400) -> go.Figure:
    """One line a system, told apart by colour, dash and marker. Ends where its last request has finished. At most four systems."""
    figure = go.Figure()
    for line, look in zip(lines, LINES, strict=False):
        points = thinned(line.changes)
        every = max(1, len(points) // MARKS)
        for part, settings in (
            (points, {"mode": "lines", "line": {"color": look.colour, "dash": look.dash, "width": 2.2}, "name": f"{line.system}, mean {line.mean:.1f}"}),
            (points[every // 2 :: every], {"mode": "markers", "marker": {"color": look.colour, "symbol": look.marker, "size": 8}, "showlegend": False}),
        ):
            figure.add_scatter(
                x=[iteration for iteration, _ in part],
                y=[size for _, size in part],
                hovertemplate=f"iteration %{{x:,}}: %{{y:.1f}} requests<extra>{line.system}</extra>",
                legendgroup=line.system,
                **settings,
            )
    figure.update_xaxes(title="iteration", fixedrange=True, rangemode="tozero")
    figure.update_yaxes(title="requests running", fixedrange=True, rangemode="tozero")
    return finish(figure, height, margin={"l": 8, "r": 12, "t": 64, "b": 8})  # the legend is long: it lies below the buttons


def batch_rows(lines: Sequence[BatchLine]) -> list[dict[str, object]]:
    """The chart's data, one row a system and point drawn."""
    return [{"system": line.system, "iteration": iteration, "requests_running": round(size, 3)} for line in lines for iteration, size in thinned(line.changes)]


def thinned(changes: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The same in at most MAX_POINTS points and the end: each stands for equally many iterations, with their mean, at the first of them."""
    if len(changes) < 2:
        return list(changes)
    first, end = changes[0][0], changes[-1][0]
    span = max(1, -(-(end - first) // MAX_POINTS))
    points: list[tuple[int, float]] = []
    at = 0
    for start in range(first, end, span):
        stop = min(start + span, end)
        total = 0.0
        while True:
            (begin, size), until = changes[at], changes[at + 1][0]
            total += size * (min(until, stop) - max(begin, start))
            if until > stop or at + 2 == len(changes):
                break
            at += 1
        points.append((start, total / (stop - start)))
    return [*points, changes[-1]]
