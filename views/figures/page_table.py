"""An operating system's page table beside a block table: the same lookup, drawn twice with the same place marked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from views.figures.canvas import AMBER, BLUE, GREEN, GREY, Canvas, tint

CELL = 5.6
TOP = 12.5


def page_table(data: Mapping[str, Any]) -> go.Figure:
    """Left: virtual address → page and offset → frame → physical address. Right: position → logical block and offset → physical block → slot.

    `data`: what the figure scene computed for one position.
    """
    canvas = Canvas(100, 62, 470)
    block_size, tokens = data["block_size"], data["tokens"]
    pages = [f"page {page}" for page in range(len(data["page_table"]))]
    os_words = {
        "title": "Operating system: virtual memory",
        "left": ["virtual address space", "page table", "physical memory"],
        "asked": f"address {data['virtual_address']:,}",
        "split": f"page {data['virtual_page']}, byte {data['page_offset']:,}",
        "sum": _address_sum(data),
    }
    _lookup(canvas, 1.5, os_words, pages, data["page_table"], data["num_frames"], "frame", BLUE, data["virtual_page"], data["page_offset"] / data["page_bytes"])
    blocks = [" ".join(tokens[i : i + block_size]) for i in range(0, len(tokens), block_size)]
    cache_words = {
        "title": "KV cache: PagedAttention",
        "left": ["the sequence's tokens", "block table", "GPU memory"],
        "asked": f"position {data['position']}: “{data['token']}”",
        "split": f"logical block {data['logical_block']}, offset {data['block_offset']}",
        "sum": [
            f"{data['position']} ÷ {block_size} = {data['logical_block']}, remainder {data['block_offset']}",
            f"table[{data['logical_block']}] = {data['physical_block']}",
            f"<b>slot {data['physical_block']} × {block_size} + {data['block_offset']} = {data['slot']}</b>",
        ],
    }
    offset = data["block_offset"] / block_size
    table: list[int | None] = list(data["block_table"])[: len(blocks)]
    _lookup(canvas, 52.5, cache_words, blocks, table, data["num_blocks"], "block", GREEN, data["logical_block"], offset, block_size)
    canvas.line([(50, 3), (50, 59)], dash="dot", width=1)
    return canvas.figure()


def page_table_rows(data: Mapping[str, Any]) -> list[dict[str, object]]:
    """Every token's lookup, one row each."""
    size = data["block_size"]
    return [
        {
            "position": t,
            "token": token,
            "logical_block": t // size,
            "offset": t % size,
            "physical_block": data["block_table"][t // size],
            "slot": data["block_table"][t // size] * size + t % size,
        }
        for t, token in enumerate(data["tokens"])
    ]


def _address_sum(data: Mapping[str, Any]) -> list[str]:
    size, page, byte, frame = data["page_bytes"], data["virtual_page"], data["page_offset"], data["frame"]
    division = f"{data['virtual_address']:,} ÷ {size:,} = {page}, remainder {byte:,}"
    if frame is None:
        return [division, f"table[{page}] is empty", "<b>page fault</b>"]
    return [division, f"table[{page}] = {frame}", f"<b>address {frame} × {size:,} + {byte:,} = {data['physical_address']:,}</b>"]


def _lookup(
    canvas: Canvas, x: float, words: Mapping[str, Any], names: list[str], table: list[int | None], size: int, cell: str, colour: str, row: int, part: float,
    steps: int = 0,
) -> None:  # fmt: skip
    """One side. `names`: the virtual units from the top; `table[i]`: where unit i lies among the `size` cells of memory, None for nowhere; `row` is looked up,
    `part` of the way into it; `steps`: slots per unit, 0 for so many that none is drawn."""
    canvas.words(x, 1.5, f"<b>{words['title']}</b>", size=15, left=True)
    canvas.words(x, 5.4, f"{words['asked']}  =  {words['split']}", size=13.5, left=True)
    left, middle, right = x, x + 19.5, x + 33.5
    for place, text in zip((left, middle, right), words["left"], strict=True):
        canvas.words(place, TOP - 2.4, text, size=12, left=True)
    height = min(CELL, 26 / max(len(names), 1))
    for i, name in enumerate(names):
        y = TOP + i * height
        on = i == row
        canvas.box(left, y, 17, height, fill=tint(colour, 0.16 if on else 0.05), line=colour if on else GREY, text=name, size=12)
        canvas.box(middle, y, 4.2, height, text=f"{i}", size=12, line=colour if on else GREY, fill=tint(colour, 0.16 if on else 0))
        entry = "–" if table[i] is None else str(table[i])
        canvas.box(middle + 4.2, y, 5.2, height, text=f"<b>{entry}</b>", size=13, line=colour if on else GREY, fill=tint(colour, 0.16 if on else 0))
    tall = min(CELL, 49 / size)
    owners = {entry: i for i, entry in enumerate(table) if entry is not None}
    for i in range(size):
        y = TOP + i * tall
        on = table[row] == i if row < len(table) else False
        mine = i in owners
        look = {"fill": tint(colour, 0.3 if on else 0.12) if mine else "rgba(0,0,0,0)", "line": colour if on else GREY, "dash": "solid" if mine else "dot"}
        canvas.box(right, y, 8.5, tall, **look)
        canvas.words(right - 0.5, y + tall / 2, str(i), size=11, right=True)
        if mine:
            canvas.words(right + 8.9, y + tall / 2, f"page {owners[i]}" if cell == "frame" else f"L{owners[i]}", size=11.5, left=True)
        if on:
            mark = right + 8.5 * part
            width = 8.5 / steps if steps else 0.5
            canvas.box(mark, y, width, tall, fill=tint(AMBER, 0.85), line=GREY, line_width=1, layer="above")
    here = TOP + row * height
    mark = left + 17 * part
    canvas.box(mark, here, 17 / steps if steps else 0.5, height, fill=tint(AMBER, 0.35 if steps else 0.85), line=GREY, line_width=1, layer="above")
    canvas.arrow(left + 17.1, here + height / 2, middle - 0.2, here + height / 2, colour=colour, width=2)
    entry_now = table[row] if row < len(table) else None
    if entry_now is not None:
        canvas.arrow(middle + 9.6, here + height / 2, right - 2.6, TOP + (entry_now + 0.5) * tall, colour=colour, width=2)
    for i, line in enumerate(words["sum"]):
        canvas.words(x, 42 + 4.6 * i, line, size=13.5, left=True)
