"""Two Gantt charts of the same arrivals, one under the other: who computes, who waits, and which places of the batch stand idle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from views.figures.canvas import AMBER, BLUE, GREY, PURPLE, Canvas, Fill, tint

FILLS = {
    "prompt": Fill("computes its prompt, first token", BLUE, "/", 0.75, "rgba(255,255,255,0.8)"),
    "decode": Fill("generates a token", BLUE, "", 0.45),
    "padding": Fill("finished, but its place stays taken", PURPLE, "x", 0.4),
    "waits": Fill("waits", GREY, ".", 0.16),
}
POLICIES = ("request", "iteration")


def batching(data: Mapping[str, Any], iteration: int) -> go.Figure:
    """Rows: requests in order of arrival, then the idle places. Both charts have one scale; `iteration` is marked in both."""
    end = max(data[policy]["end"] for policy in POLICIES)
    num_rows = len(data["request"]["rows"])
    tall = num_rows + 3.1
    canvas = Canvas(100, 2 * tall, 470)
    unit = 86 / end
    for i, policy in enumerate(POLICIES):
        _chart(canvas, data, policy, i * tall, unit, end, iteration)
    return canvas.figure()


def batching_rows(data: Mapping[str, Any]) -> list[dict[str, object]]:
    """One row per stretch of a request's life."""
    return [
        {"policy": policy, "request": row["request_id"], "first_iteration": part["start"], "iterations": part["end"] - part["start"], "what": part["activity"]}
        for policy in POLICIES
        for row in data[policy]["rows"]
        for part in row["segments"]
    ]


def doing(data: Mapping[str, Any], policy: str, iteration: int) -> dict[str, list[str]]:
    """Activity -> the requests that are at it in this iteration."""
    found: dict[str, list[str]] = {}
    for row in data[policy]["rows"]:
        for part in row["segments"]:
            if part["start"] <= iteration < part["end"]:
                found.setdefault(part["activity"], []).append(row["request_id"])
    return found


def idle_places(data: Mapping[str, Any], policy: str, iteration: int) -> int:
    """Places of the batch that compute nothing that anybody wants in this iteration."""
    at_it = doing(data, policy, iteration)
    return int(data["max_batch_size"]) - len(at_it.get("prompt", [])) - len(at_it.get("decode", []))


def _chart(canvas: Canvas, data: Mapping[str, Any], policy: str, top: float, unit: float, end: int, iteration: int) -> None:
    values, left = data["values"], 8.0
    told = (
        f"<b>{data[policy]['name']}</b>: {values[f'{policy}.num_iterations']} iterations, answers (▸) after {values[f'{policy}.mean_latency']:.1f} on average, "
    )
    told += f"places used {values[f'{policy}.utilisation_percent']:.0f} %"
    canvas.words(1, top + 0.45, told, size=13.5, left=True)
    canvas.box(left + iteration * unit, top + 1.1, unit, len(data[policy]["rows"]) + 1.6, fill=tint(AMBER, 0.22), line=AMBER, line_width=1.5)
    for i, row in enumerate(data[policy]["rows"]):
        y = top + 1.3 + i
        canvas.words(left - 0.8, y + 0.42, f"<b>{row['request_id']}</b>", size=13, right=True)
        for part in row["segments"]:
            length = part["end"] - part["start"]
            hover = f"{row['request_id']}: {FILLS[part['activity']].name}, iterations {part['start']} to {part['end'] - 1}"
            canvas.area(left + part["start"] * unit, y, length * unit, 0.84, FILLS[part["activity"]], hover)
        canvas.words(left + row["returned"] * unit + 0.4, y + 0.42, f"▸ {row['latency']}", size=11.5, left=True)
    y = top + 1.3 + len(data[policy]["rows"])
    canvas.words(left - 0.8, y + 0.45, "idle", size=12, right=True)
    for t in range(end):
        idle = idle_places(data, policy, t)
        over = t >= data[policy]["end"]
        if not over:
            canvas.box(left + t * unit, y + 0.05, unit, 0.8, text=str(idle) if idle else "", size=12, fill=tint(GREY, 0.16 * idle), line_width=0.7)
        canvas.words(left + (t + 0.5) * unit, y + 1.2, str(t), size=11)
