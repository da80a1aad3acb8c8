"""What a block size costs: slots wasted in last blocks, computed on a workload, above the time of the kernels, measured on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from views.figures.memory_style import LINES, NEVER_USED, bar_marker, finish


@dataclass(frozen=True)
class WasteAtBlockSize:
    """Percent of the slots of allocated blocks that no token uses."""

    block_size: int
    percent: float


@dataclass(frozen=True)
class CostAtBlockSize:
    """Median microseconds of one launch: attention over the paged cache, and the copy of one block."""

    block_size: int
    attention_us: float
    copy_us: float


def block_size_sweep(waste: Sequence[WasteAtBlockSize], costs: Sequence[CostAtBlockSize], chosen: int | None = None, height: int = 430) -> go.Figure:
    """Two charts over the same block sizes. Without `costs` the lower one is empty and says so. `chosen`: this block size is marked."""
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.1, row_heights=[0.5, 0.5])
    sizes = [str(w.block_size) for w in waste]
    figure.add_bar(
        x=sizes,
        y=[w.percent for w in waste],
        marker=bar_marker(NEVER_USED),
        text=[f"<b>{w.percent:.1f}</b>" if w.block_size == chosen else f"{w.percent:.1f}" for w in waste],
        textposition="outside",
        cliponaxis=False,
        name="empty slots",
        hovertemplate="block size %{x}: %{y:.2f} % of the allocated slots stay empty<extra></extra>",
        row=1,
        col=1,
    )
    for name, look, values in (
        ("attention kernel", LINES[3], [c.attention_us for c in costs]),
        ("copy of one block", LINES[0], [c.copy_us for c in costs]),
    ):
        figure.add_scatter(
            x=[str(c.block_size) for c in costs] or [None],
            y=values or [None],
            mode="lines+markers",
            name=name,
            line={"color": look.colour, "dash": look.dash, "width": 2.2},
            marker={"symbol": look.marker, "size": 8},
            hovertemplate=f"block size %{{x}}: %{{y:.0f}} µs, {name}<extra></extra>",
            row=2,
            col=1,
        )
    if not costs:
        figure.add_annotation(text="not measured yet", showarrow=False, font={"size": 14}, xref="x2 domain", yref="y2 domain", x=0.5, y=0.5)
    highest = max((w.percent for w in waste), default=1.0)
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=sizes, fixedrange=True, range=[-0.5, max(len(sizes), 1) - 0.5])
    figure.update_xaxes(showticklabels=True, row=1, col=1)
    figure.update_xaxes(title="block size (tokens)", row=2, col=1)
    figure.update_yaxes(title="empty slots, %<br>(computed)", range=[0, highest * 1.2 or 1], fixedrange=True, row=1, col=1)
    figure.update_yaxes(title="µs a launch<br>(measured here)", rangemode="tozero", fixedrange=True, showticklabels=bool(costs), row=2, col=1)
    return finish(figure, height)


def block_size_rows(waste: Sequence[WasteAtBlockSize], costs: Sequence[CostAtBlockSize]) -> list[dict[str, object]]:
    """The charts' data, one row a block size; times are empty where nothing was measured."""
    measured = {c.block_size: c for c in costs}
    return [
        {
            "block_size": w.block_size,
            "empty_slots_percent": round(w.percent, 4),
            "attention_microseconds": round(measured[w.block_size].attention_us, 2) if w.block_size in measured else "",
            "copy_microseconds": round(measured[w.block_size].copy_us, 2) if w.block_size in measured else "",
        }
        for w in waste
    ]
