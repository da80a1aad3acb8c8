"""Figure 3 of the paper: two contiguous chunks slot by slot and to scale, and the same tokens in blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from views.figures.canvas import AMBER, BLUE, GREY, PURPLE, Canvas, Fill, tint

USED = Fill("token states", BLUE, "", 0.3)
RESERVED = Fill("reserved (used later)", AMBER, "/", 0.45)
NEVER = Fill("internal (never used)", PURPLE, "x", 0.4)
GAP = Fill("external (the gap)", GREY, ".", 0.35)
LABELS = 1.2


def reservation_strips(data: Mapping[str, Any]) -> go.Figure:
    """From the top: the memory to scale, each chunk's slots with their words, the same tokens in blocks."""
    canvas = Canvas(100, 74, 550)
    _to_scale(canvas, data)
    for i, chunk in enumerate(data["chunks"]):
        _strip(canvas, chunk, 17.5 + 14.5 * i, gap=i + 1 < len(data["chunks"]))
    _blocks(canvas, data, 48)
    return canvas.figure()


def reservation_rows(data: Mapping[str, Any]) -> list[dict[str, object]]:
    """One row per kind of slots and request."""
    rows: list[dict[str, object]] = []
    for chunk in data["chunks"]:
        for name in ("prompt", "now", "later", "never"):
            rows.append({"request": chunk["id"], "layout": "contiguous", "slots": chunk[name], "what": name})
        rows.append({"request": chunk["id"], "layout": f"blocks of {data['block_size']}", "slots": chunk["prompt"] + chunk["now"], "what": "prompt and now"})
        rows.append({"request": chunk["id"], "layout": f"blocks of {data['block_size']}", "slots": chunk["paged"]["empty"], "what": "empty"})
    return [*rows, {"request": "", "layout": "contiguous", "slots": data["gap_slots"], "what": "gap (length not given by the paper)"}]


def _to_scale(canvas: Canvas, data: Mapping[str, Any]) -> None:
    total = data["values"]["contiguous_slots"]
    canvas.words(LABELS, 1, "<b>The memory, to scale</b>", size=13.5, left=True)
    left, wide = LABELS, 97.0

    def at(slot: float) -> float:
        return left + wide * slot / total

    for chunk in data["chunks"]:
        start = chunk["start"]
        used, later = chunk["prompt"] + chunk["now"], chunk["later"]
        canvas.area(at(start), 3.5, wide * used / total, 5.5, USED, f"{chunk['id']}: {used} token states")
        canvas.area(at(start + used), 3.5, wide * later / total, 5.5, RESERVED, f"{chunk['id']}: {later} used later")
        canvas.area(at(start + used + later), 3.5, wide * chunk["never"] / total, 5.5, NEVER, f"{chunk['id']}: {chunk['never']:,} never used")
        canvas.words(at(start + chunk["slots"] / 2), 6.2, f"<b>{chunk['id']}: {chunk['slots']:,} slots</b>", size=13)
        end = start + chunk["slots"]
        if end < total:
            canvas.area(at(end), 3.5, wide * data["gap_slots"] / total, 5.5, GAP, "between the chunks; the paper gives no length")
            canvas.words(at(end + data["gap_slots"] / 2), 6.2, "gap", size=12)
    canvas.words(LABELS, 10.9, "all tokens that exist are the thin line at each chunk's left end", size=11.5, left=True)


def _strip(canvas: Canvas, chunk: Mapping[str, Any], y: float, *, gap: bool) -> None:
    """The words of one chunk; what lies between the last two cells is left out. `<eos>` bears no kind: the drawing does not count both alike."""
    counts = (("prompt", "prompt"), ("now", "generated now"), ("later", "used later"), ("never", "never used"))
    told = "  +  ".join(f"<b>{chunk[name]:,}</b> {words}" for name, words in counts)
    canvas.words(LABELS, y - 2.6, f"<b>Request {chunk['id']}</b>:  {told}  =  {chunk['slots']:,} slots", size=13, left=True)
    words = [*chunk["words"], "…", "&lt;resv&gt;"]
    cell = 6.3
    used, later = chunk["prompt"] + chunk["now"], chunk["later"]
    for i, word in enumerate(words):
        x = LABELS + i * cell
        shown = word.replace("<", "&lt;").replace(">", "&gt;") if word.startswith("<") else word
        if word == "…":
            canvas.words(x + cell / 2, y + 2.6, "…", size=16)
            continue
        if word == "<eos>":
            canvas.box(x, y, cell, 5.2, dash="dash", line_width=1.4)
        else:
            canvas.area(x, y, cell, 5.2, USED if i < used else RESERVED if i < used + later and "resv" not in word else NEVER)
        canvas.words(x + cell / 2, y + 2.6, f"<b>{shown}</b>" if i == chunk["prompt"] else shown, size=12)
    now = LABELS + (chunk["prompt"] + 0.5) * cell
    canvas.arrow(now, y + 8.2, now, y + 5.5, width=1.8)
    canvas.words(now + 1, y + 7.7, "current iteration", size=11.5, left=True)
    if gap:
        canvas.area(LABELS + len(words) * cell + 0.6, y, 97 - len(words) * cell - 0.6, 5.2, GAP)
        canvas.words((LABELS + len(words) * cell + 99) / 2, y + 2.6, "gap", size=12)


def _blocks(canvas: Canvas, data: Mapping[str, Any], y: float) -> None:
    size, values = data["block_size"], data["values"]
    told = f"<b>The same {values['used']} tokens in blocks of {size}</b>: {values['used']} of {values['paged_slots']} slots hold a token "
    told += f"({values['paged_used_percent']:.0f} %), instead of {values['used']} of {values['contiguous_slots']:,} ({values['contiguous_used_percent']:.1f} %)"
    canvas.words(LABELS, y - 1, told, size=13.5, left=True)
    cell = min(6.3, 88 / max(size, 1))
    for row, chunk in enumerate(data["chunks"]):
        top = y + 3 + row * 11
        tokens = chunk["words"][: chunk["prompt"] + chunk["now"]]
        x = LABELS
        for block in range(chunk["paged"]["blocks"]):
            for slot in range(size):
                index = block * size + slot
                word = tokens[index] if index < len(tokens) else ""
                if word:
                    canvas.area(x, top, cell, 5.2, USED)
                    canvas.words(x + cell / 2, top + 2.6, word, size=12 if cell > 6 else 11)
                else:
                    canvas.box(x, top, cell, 5.2, dash="dot", line_width=0.8)
                x += cell
            canvas.box(x - size * cell, top, size * cell, 5.2, line_width=2.2, line=BLUE, fill=tint(BLUE, 0))
            canvas.words(x - size * cell / 2, top + 7.1, f"{chunk['id']}, logical block {block}", size=11.5)
            x += 1.6
