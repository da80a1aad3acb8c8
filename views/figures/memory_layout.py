"""Figure 1 of the paper, computed: where a card's memory goes, and how fast a growing batch fills what is left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from views.figures.memory_style import Kind, bar_marker, finish

PARAMETERS = Kind("parameters", "#8d99a8", "", "#1b2430")
KV_CACHE = Kind("KV cache", "#0072b2", "/", "#ffffff")
REST = Kind("activations and the rest", "#f0c35a", ".")
CONTIGUOUS, PAGED = "#d55e00", "#0072b2"


def memory_split(data: Mapping[str, Any], height: int = 380) -> go.Figure:
    """The card as one stacked column, beside it the paper's where the paper has one (a 13B model on 40 GB)."""
    values = data["values"]
    columns = [f"{data['shape']}, computed"]
    shares = {"parameters": [values["percent.parameters"]], "kv_cache": [values["percent.kv_cache"]], "rest": [values["percent.rest"]]}
    sizes = {"parameters": [values["parameters_gb"]], "kv_cache": [values["kv_cache_gb"]], "rest": [values["rest_gb"]]}
    texts = {name: [f"{sizes[name][0]:.1f} GB, {shares[name][0]:.1f} %"] for name in shares}
    if data["fits"]:
        parameters, kv_cache = values["paper.figure_1.parameters"], values["paper.figure_1.kv_cache"]
        columns.append("13B, the paper's")
        for name, share in (("parameters", parameters), ("kv_cache", kv_cache), ("rest", 100 - parameters - kv_cache)):
            shares[name].append(share)
        texts["parameters"].append(f"{values['paper.figure_1.parameters_bytes'] / 1e9:.0f} GB, {parameters:.0f} %")
        texts["kv_cache"].append(f"more than {kv_cache:.0f} %")
        texts["rest"].append("the rest")
    figure = go.Figure()
    for name, kind in (("parameters", PARAMETERS), ("kv_cache", KV_CACHE), ("rest", REST)):
        figure.add_bar(
            x=columns,
            y=shares[name],
            name=kind.words,
            marker=bar_marker(kind),
            text=texts[name],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            insidetextfont={"color": kind.ink, "size": 13},
            constraintext="none",
            hovertemplate=f"%{{text}} {kind.words}<extra></extra>",
        )
    figure.update_yaxes(range=[0, 100], ticksuffix=" %", fixedrange=True, title=None)
    figure.update_xaxes(fixedrange=True)
    return finish(figure, height, barmode="stack", bargap=0.12, margin={"l": 8, "r": 8, "t": 60, "b": 8})


def memory_of_batch(data: Mapping[str, Any], height: int = 380) -> go.Figure:
    """KV memory against the number of running requests, with and without paging, up to the card's limit."""
    values, cost = data["values"], data["kv_gb_per_request"]
    limit = values["kv_cache_gb"]
    most = max(values["paged.max_requests"], values["contiguous.max_requests"], 1)
    figure = go.Figure()
    for name, words, colour, dash, symbol in (
        ("contiguous", f"reserving {data['reserved_tokens']:,} tokens", CONTIGUOUS, "dash", "square"),
        ("paged", f"in blocks of {data['block_size']}", PAGED, "solid", "circle"),
    ):
        fit = values[f"{name}.max_requests"]
        figure.add_scatter(
            x=[0, fit],
            y=[0, fit * cost[name]],
            mode="lines+markers",
            name=words,
            line={"color": colour, "dash": dash, "width": 3},
            marker={"symbol": symbol, "size": 11},
            hovertemplate=f"%{{x}} requests take %{{y:.1f}} GB {words}<extra></extra>",
        )
        end = {"x": fit, "y": fit * cost[name], "ax": 0, "ay": -26, "arrowhead": 0, "arrowcolor": colour}
        figure.add_annotation(text=f"<b>{fit} requests</b>", font={"size": 14}, **end)
    figure.add_hline(y=limit, line={"dash": "dot", "color": "#7a8696", "width": 1.5})
    figure.add_annotation(x=most * 1.15, y=limit, text=f"{limit:.1f} GB for the KV cache", showarrow=False, xanchor="right", yshift=46, font={"size": 12.5})
    figure.update_xaxes(range=[0, most * 1.17], title={"text": "requests running together", "font": {"size": 13}}, fixedrange=True, rangemode="tozero")
    figure.update_yaxes(range=[0, limit * 1.35], title=None, ticksuffix=" GB", fixedrange=True)
    return finish(figure, height, margin={"l": 8, "r": 12, "t": 60, "b": 8})


def memory_layout_rows(data: Mapping[str, Any]) -> list[dict[str, object]]:
    """The card's parts, ours and the paper's."""
    values = data["values"]
    rows: list[dict[str, object]] = [
        {"part": name, "GB": round(values[f"{name}_gb"], 3), "percent": round(values[f"percent.{name}"], 2), "source": f"computed from {data['shape']}"}
        for name in ("parameters", "kv_cache", "rest")
    ]
    if data["fits"]:
        rows += [{"part": name, "percent": values[f"paper.figure_1.{name}"], "source": "paper, Figure 1"} for name in ("parameters", "kv_cache")]
    return rows


def memory_of_batch_rows(data: Mapping[str, Any]) -> list[dict[str, object]]:
    """One row per number of requests."""
    values, cost = data["values"], data["kv_gb_per_request"]
    most = max(values["paged.max_requests"], values["contiguous.max_requests"])
    return [
        {
            "requests": n,
            "reserved_GB": round(n * cost["contiguous"], 4) if n <= values["contiguous.max_requests"] else "",
            "paged_GB": round(n * cost["paged"], 4) if n <= values["paged.max_requests"] else "",
        }
        for n in range(most + 1)
    ]
