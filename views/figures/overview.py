"""Boxes in boxes and arrows between them: who talks to whom. A box leads to the scene in which it can be watched."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from views.figures.canvas import BLUE, GREEN, GREY, PURPLE, Canvas, tint

COLOURS = {"Scheduler": BLUE, "KV Cache Manager": GREEN, "Worker": PURPLE}


def overview(data: Mapping[str, Any], links: Mapping[str, str]) -> go.Figure:
    """`data`: boxes and arrows with their places in hundredths. `links`: name of a box -> address that a click on its name leads to."""
    canvas = Canvas(100, 100, 560)
    boxes = {box["name"]: box for box in data["boxes"]}
    parents = {box["parent"] for box in data["boxes"] if box["parent"]}
    for box in data["boxes"]:
        colour = _colour(box, boxes)
        canvas.box(box["x"], box["y"], box["width"], box["height"], fill=tint(colour, 0.12 if box["parent"] else 0.07), line=colour, line_width=1.6)
        name = f"<b>{box['name']}</b>"
        if box["name"] in links:
            name = f'<a href="{links[box["name"]]}" target="_self">{name} ▸</a>'
        symbol = f"<br><span style='font-size:11px'>{box['symbol']}</span>" if box["symbol"] else ""
        says = f"<br>{_wrapped(box['says'], box['width'])}" if box["says"] else ""
        if box["name"] in parents:
            canvas.words(box["x"] + box["width"] / 2, box["y"] + 6, f"{name}{symbol}", size=15)
        else:
            canvas.words(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, f"{name}{symbol}{says}", size=13)
    for arrow in data["arrows"]:
        _arrow(canvas, arrow, boxes)
    return canvas.figure()


def overview_rows(data: Mapping[str, Any]) -> list[dict[str, object]]:
    """Boxes and arrows as rows."""
    boxes: list[dict[str, object]] = [{"what": "box", "name": b["name"], "inside or to": b["parent"] or "", "says": b["says"]} for b in data["boxes"]]
    return boxes + [{"what": "arrow", "name": a["tail"], "inside or to": a["head"], "says": a["says"]} for a in data["arrows"]]


def _colour(box: Mapping[str, Any], boxes: Mapping[str, Any]) -> str:
    outer = box if box["parent"] is None else boxes[box["parent"]]
    return next((colour for name, colour in COLOURS.items() if outer["name"].startswith(name)), GREY)


def _arrow(canvas: Canvas, arrow: Mapping[str, Any], boxes: Mapping[str, Any]) -> None:
    """From edge to edge: sideways where the boxes are beside each other, else down, along, and down again."""
    tail, head = boxes[arrow["tail"]], boxes[arrow["head"]]
    middle = tail["y"] + tail["height"] / 2
    if tail["x"] + tail["width"] <= head["x"] and head["y"] <= middle <= head["y"] + head["height"]:
        start, end = tail["x"] + tail["width"], head["x"]
        canvas.arrow(start, middle, end, middle, both=arrow["both"], width=2)
        canvas.words((start + end) / 2, middle - 3.5, arrow["says"], size=12.5)
        return
    across = (tail["x"] + tail["width"] / 2, head["x"] + head["width"] / 2)
    bend = head["y"] - 8
    canvas.bent_arrow([(across[0], tail["y"] + tail["height"]), (across[0], bend), (across[1], bend), (across[1], head["y"])], width=2)
    if arrow["says"]:
        canvas.words(across[1] + 1, head["y"] - 4, arrow["says"], size=12.5, left=True)


def _wrapped(text: str, width: float) -> str:
    """Words in lines that fit a box of this width."""
    return "<br>".join(textwrap.wrap(text, max(10, int(width * 1.15))))
