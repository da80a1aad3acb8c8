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
    """The number of running requests at each iteration. `sizes[i]` is that of iteration `i * every + 1`, or the mean of `every` iterations from there on."""

    system: str
    sizes: Sequence[float]
    every: int = 1


def batch_over_time(lines: Sequence[BatchLine], height: int = 400) -> go.Figure:
    """One line a system, told apart by colour, dash and marker, each with its name at its highest point. At most four systems."""
    figure = go.Figure()
    for line, look in zip(lines, LINES, strict=False):
        iterations, sizes = thinned(line)
        marks = max(1, len(sizes) // MARKS)
        figure.add_scatter(
            x=iterations,
            y=sizes,
            name=f"{line.system}: {mean(line):.1f} on average",
            mode="lines",
            line={"color": look.colour, "dash": look.dash, "width": 2.2},
            hovertemplate=f"iteration %{{x:,}}: %{{y:.1f}} requests<extra>{line.system}</extra>",
            legendgroup=line.system,
        )
        figure.add_scatter(
            x=iterations[marks // 2 :: marks],
            y=sizes[marks // 2 :: marks],
            mode="markers",
            marker={"color": look.colour, "symbol": look.marker, "size": 8},
            showlegend=False,
            hoverinfo="skip",
            legendgroup=line.system,
        )
    figure.update_xaxes(title="iteration", fixedrange=True, rangemode="tozero")
    figure.update_yaxes(title="requests running", fixedrange=True, rangemode="tozero")
    return finish(figure, height)


def batch_rows(lines: Sequence[BatchLine]) -> list[dict[str, object]]:
    """The chart's data, one row a system and point drawn."""
    return [
        {"system": line.system, "iteration": iteration, "requests_running": round(size, 3)}
        for line in lines
        for iteration, size in zip(*thinned(line), strict=True)
    ]


def mean(line: BatchLine) -> float:
    """The mean over all iterations."""
    return sum(line.sizes) / len(line.sizes) if line.sizes else 0.0


def thinned(line: BatchLine) -> tuple[list[int], list[float]]:
    """Iterations (counted from 1) and sizes, at most MAX_POINTS of them: each is then the mean of equally many iterations."""
    bundle = -(-len(line.sizes) // MAX_POINTS) or 1
    parts = [line.sizes[first : first + bundle] for first in range(0, len(line.sizes), bundle)]
    return [first * line.every + 1 for first in range(0, len(line.sizes), bundle)], [sum(part) / len(part) for part in parts]
