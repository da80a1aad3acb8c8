"""What one token costs: the factors one by one, and models of several shapes side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from views.figures.canvas import BLUE, GREEN, GREY, ORANGE, Canvas, tint
from views.figures.memory_style import finish


def kv_formula(shape: Mapping[str, Any], request_tokens: int) -> go.Figure:
    """The product for one shape, a box per factor, and what a whole request costs."""
    canvas = Canvas(100, 32, 210)
    factors = [
        ("2", "a key and<br>a value", BLUE),
        (f"{shape['width']:,}", f"{shape['num_kv_heads']} KV heads<br>× {shape['head_size']}", BLUE),
        (f"{shape['num_layers']}", "layers", BLUE),
        (f"{shape['dtype_bytes']}", "bytes per<br>number", BLUE),
    ]
    x = 1.0
    for i, (number, words, colour) in enumerate(factors):
        _factor(canvas, x, 1, 12.5, number, words, colour)
        canvas.words(x + 14.2, 7.5, "=" if i == len(factors) - 1 else "×", size=20)
        x += 16
    _factor(canvas, x, 1, 33, f"{shape['bytes_per_token']:,} bytes", f"per token ({shape['bytes_per_token'] / 1024:,.5g} KiB)", ORANGE)
    tokens = f"× {request_tokens:,} tokens of a request ="
    canvas.words(x - 1.5, 25.5, tokens, size=14, right=True)
    size = shape["bytes_per_request"]
    _factor(canvas, x, 18.5, 33, _size(size), f"per request ({size:,} bytes)", GREEN)
    return canvas.figure()


def kv_bytes(shapes: Sequence[Mapping[str, Any]], height: int = 290) -> go.Figure:
    """Bytes per token of every shape, on a logarithmic scale, with the numbers written out."""
    names = [shape["name"] for shape in shapes]
    sizes = [shape["bytes_per_token"] for shape in shapes]
    figure = go.Figure()
    figure.add_bar(
        orientation="h",
        x=sizes,
        y=names,
        marker={"color": [ORANGE if shape["paper"] else "#8d99a8" for shape in shapes]},
        text=[f"{shape['bytes_per_token']:,} B a token, {_size(shape['bytes_per_request'])} a request" for shape in shapes],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{text}<extra>%{y}</extra>",
    )
    most = max(sizes)
    figure.update_xaxes(type="log", range=[2.7, _log(most) + 2.9], title={"text": "bytes per token, logarithmic", "font": {"size": 12}}, fixedrange=True)
    figure.update_xaxes(tickvals=[10**n for n in range(3, 8)], ticktext=["1 kB", "10 kB", "100 kB", "1 MB", "10 MB"])
    figure.update_yaxes(autorange="reversed", fixedrange=True)
    return finish(figure, height, showlegend=False, bargap=0.3, margin={"l": 8, "r": 8, "t": 30, "b": 8})


def kv_bytes_rows(shapes: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
    """One row per shape, with its factors."""
    fields = ("name", "num_layers", "num_kv_heads", "head_size", "dtype_bytes", "bytes_per_token", "bytes_per_request", "source")
    return [{field: shape[field] for field in fields} for shape in shapes]


def _factor(canvas: Canvas, x: float, y: float, width: float, number: str, words: str, colour: str) -> None:
    canvas.box(x, y, width, 12.5, fill=tint(colour, 0.12), line=colour if colour != GREY else GREY)
    canvas.words(x + width / 2, y + 4.2, f"<b>{number}</b>", size=18)
    canvas.words(x + width / 2, y + 9.3, words, size=11.5)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _log(value: float) -> float:
    return len(str(int(value))) - 1
