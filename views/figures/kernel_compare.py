"""Reference against Triton: how far apart the two outputs are, for each token of the batch and each query head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from engine.trace.closeup import Comparison
from views.figures.canvas import AMBER, INK
from views.figures.kernel_style import number
from views.figures.memory_style import finish

LOWEST, HIGHEST = -9, -3
"""Powers of ten at the ends of the colour scale."""
EXACT = "#ffffff"
SCALE = ((0.0, "#eef3f8"), (0.34, "#9ecae9"), (0.67, "#3a86c0"), (1.0, "#0b3a66"))
"""Lightness alone tells the order, so any kind of colour vision reads it."""


class Largest(NamedTuple):
    """Where the two outputs differ most."""

    token: int
    q_head: int
    difference: float


def largest_difference(comparison: Comparison) -> Largest:
    """The largest difference, with its first place; token 0 and head 0 for an empty comparison."""
    places = ((value, -token, -head) for token, heads in enumerate(comparison.difference) for head, value in enumerate(heads))
    value, token, head = max(places, default=(0.0, 0, 0))
    return Largest(-token, -head, value)


def exponent(difference: float) -> int | None:
    """The power of ten that a difference is rounded up to; None for no difference at all."""
    return math.ceil(math.log10(difference)) if difference > 0 else None


def difference_map(comparison: Comparison, tokens: Sequence[str], chosen: tuple[int, int], height: int = 300) -> go.Figure:
    """One cell per token and query head, the darker the further apart; the largest has a frame and its number. `tokens`: a name for each token of the batch;
    `chosen`: token and head with an amber frame. A click on a cell selects a point whose `customdata` are token and head."""
    num_tokens, num_heads = len(comparison.difference), len(comparison.difference[0]) if comparison.difference else 0
    logarithms = [[math.log10(comparison.difference[t][h]) if comparison.difference[t][h] > 0 else None for t in range(num_tokens)] for h in range(num_heads)]
    wide, tall = 560 / max(num_tokens, 1), (height - 80) / max(num_heads, 1)
    written = wide >= 40 and tall >= 13
    texts = [[_short(comparison.difference[t][h]) if written else "" for t in range(num_tokens)] for h in range(num_heads)]
    top = largest_difference(comparison)
    if top.difference and wide >= 64:
        texts[top.q_head][top.token] = f"<b>{number(top.difference)}</b>"
    hovers = [[f"{tokens[t]}, query head {h}: {_value(comparison.difference[t][h])}" for t in range(num_tokens)] for h in range(num_heads)]
    ticks = list(range(LOWEST, HIGHEST + 1, 2))
    figure = go.Figure(
        go.Heatmap(
            z=logarithms, text=texts, hovertext=hovers, hovertemplate="%{hovertext}<extra></extra>", texttemplate="%{text}", textfont={"size": 12},
            zmin=LOWEST, zmax=HIGHEST, colorscale=[list(stop) for stop in SCALE], xgap=1, ygap=1, hoverongaps=True,
            colorbar={"tickvals": ticks, "ticktext": [f"1e{tick}" for tick in ticks], "thickness": 12, "title": {"text": "difference", "font": {"size": 12}}},
        )
    )  # fmt: skip
    frames = [(top.token, top.q_head, INK, 3.5, "dot")] if top.difference else []
    for token, head, colour, width, dash in [*frames, (*chosen, AMBER, 3, "solid")]:
        line = {"color": colour, "width": width, "dash": dash}
        figure.add_shape(type="rect", x0=token - 0.5, x1=token + 0.5, y0=head - 0.5, y1=head + 0.5, line=line)
    if top.difference and wide < 64:
        figure.add_annotation(
            x=top.token, y=top.q_head - 0.5, text=f"largest: {number(top.difference)}", ax=0, ay=-22, arrowhead=2, bgcolor="rgba(255,255,255,0.9)",
            font={"size": 13, "color": INK}, yanchor="bottom",
        )  # fmt: skip
    points = [(t, h) for t in range(num_tokens) for h in range(num_heads)]
    unseen = {"marker": {"opacity": 0}}
    figure.add_scatter(
        x=[t for t, _ in points], y=[h for _, h in points], customdata=[[t, h] for t, h in points], text=[hovers[h][t] for t, h in points], mode="markers",
        marker={"size": max(6, min(wide, tall) - 2), "symbol": "square", "opacity": 0}, selected=unseen, unselected=unseen, showlegend=False,
        hovertemplate="%{text}<extra></extra>", name="cells",
    )  # fmt: skip
    step = -(-num_tokens // max(1, 560 // (9 * max(map(len, tokens), default=1) + 10)))
    shown = list(range(0, num_tokens, max(step, 1)))
    heads = list(range(0, num_heads, -(-num_heads // 16)))
    figure.update_xaxes(tickvals=shown, ticktext=[tokens[i] for i in shown], range=[-0.5, num_tokens - 0.5], fixedrange=True, showgrid=False, tickangle=0)
    title = {"text": "query head", "font": {"size": 12}}
    figure.update_yaxes(tickvals=heads, range=[num_heads - 0.5, -0.5], title=title, fixedrange=True, showgrid=False, zeroline=False)
    finish(figure, height, clickmode="event+select")
    figure.update_layout(margin={"l": 8, "r": 8, "t": 52, "b": 8})
    return figure


def difference_rows(comparison: Comparison, tokens: Sequence[str]) -> list[Mapping[str, object]]:
    """The chart's data, one row for each token and head."""
    return [
        {"token": tokens[token], "query_head": head, "largest_difference": value}
        for token, heads in enumerate(comparison.difference)
        for head, value in enumerate(heads)
    ]


def comparison_words(comparison: Comparison, tokens: Sequence[str]) -> str:
    """The largest difference in a sentence."""
    top = largest_difference(comparison)
    if not top.difference:
        return "Both outputs are the same, bit by bit."
    return f"The largest difference of all is {_value(top.difference)}: {tokens[top.token]}, query head {top.q_head}."


def _short(difference: float) -> str:
    power = exponent(difference)
    return "0" if power is None else f"1e{power}"


def _value(difference: float) -> str:
    return f"{difference:.2e}" if difference else "none at all"
