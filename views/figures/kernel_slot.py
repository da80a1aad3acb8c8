"""From a token's position to its slot: the calculation line by line, and the same as a picture (R8.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from engine.trace.closeup import SlotArithmetic
from views.figures.canvas import AMBER, GREY, Canvas, tint
from views.figures.kernel_style import plural, span

WIDTH, PIXELS = 640, 310
LABELS, CELL = 226, 26


@dataclass(frozen=True)
class Line:
    """One line of the calculation: what is worked out, from which numbers, and what comes out. `says`: in words."""

    name: str
    formula: str
    result: str
    says: str


def slot_lines(a: SlotArithmetic) -> list[Line]:
    """The calculation as the kernel does it. What one GPU alone has no need of stays in: it is divided by 1."""
    per_block = a.block_size // a.kernel_block_size
    lines = [
        Line(
            "virtual block", f"{a.position} // ({a.block_size} · {a.cp_world_size})", str(a.virtual_block),
            f"a block has {plural(a.block_size, 'token')}" if a.cp_world_size == 1 else f"{a.cp_world_size} ranks share {a.virtual_block_size} tokens",
        ),
        Line("offset", f"{a.position} % {a.virtual_block_size}", str(a.offset), "place within it"),
    ]  # fmt: skip
    if a.cp_world_size > 1:
        turn = a.cp_world_size * a.cp_interleave
        lines += [
            Line("rank", f"{a.offset} // {a.cp_interleave} % {a.cp_world_size}", str(a.rank), f"the ranks take turns, {plural(a.cp_interleave, 'token')} each"),
            Line(
                "local offset", f"{a.offset} // {turn} · {a.cp_interleave} + {a.offset} % {a.cp_interleave}", str(a.local_offset),
                f"place among the tokens of rank {a.rank}",
            ),
        ]  # fmt: skip
        if a.rank != a.cp_rank:
            return [*lines, Line("slot", f"rank {a.rank} ≠ rank {a.cp_rank}", str(a.slot), f"rank {a.rank} keeps this token; rank {a.cp_rank} writes nothing")]
    inner = a.local_offset // a.kernel_block_size
    if per_block > 1:
        said = f"a block of the manager is {per_block} blocks of the kernel"
        lines.append(Line("column", f"{a.virtual_block} · {per_block} + {a.local_offset} // {a.kernel_block_size}", str(a.column), said))
    else:
        lines.append(Line("column", f"{a.virtual_block} + {a.local_offset} // {a.kernel_block_size}", str(a.column), "of the block-table row"))
    if a.kernel_block_id is None:
        return [*lines, Line("slot", f"the row has no column {a.column}", str(a.slot), "nothing lies there, nothing is looked up")]
    if per_block > 1:
        said = (
            f"the manager's block {a.block_id} is the kernel's {span(a.block_id * per_block, (a.block_id + 1) * per_block)}" if a.block_id is not None else ""
        )
        lines.append(Line("block number", f"row[{a.column}] = {a.block_id} · {per_block} + {inner}", str(a.kernel_block_id), said))
    else:
        lines.append(Line("block number", f"row[{a.column}]", str(a.kernel_block_id), "what stands in the row"))
    return [
        *lines,
        Line("block offset", f"{a.local_offset} % {a.kernel_block_size}", str(a.kernel_offset), "place within the block"),
        Line("slot", f"{a.kernel_block_id} · {a.kernel_block_size} + {a.kernel_offset}", str(a.slot), "block number · block size + offset"),
    ]


def slot_picture(a: SlotArithmetic, row: Sequence[int], colour: str, token: str) -> go.Figure:
    """The block with the token's position, the row of the block table, and the block with the slot. `row`: the manager's block ids; `token`: its text."""
    canvas = Canvas(WIDTH, PIXELS - 38, PIXELS)
    at = _line(canvas, 24, colour, _positions(a, token))
    columns = _columns(a, row)
    below = _line(canvas, 122, colour, columns) if columns.chosen is not None else None
    if below is None:
        if columns.cells:
            _line(canvas, 122, colour, columns)
        why = f"rank {a.rank} keeps this token" if a.rank != a.cp_rank else f"the row has no column {a.column}"
        canvas.words(at, 232, f"<b>slot −1</b>: {why}", size=15, left=at < WIDTH * 0.45, right=at >= WIDTH * 0.45)
        canvas.arrow(at, 24 + CELL + 2, at, 216, colour=AMBER, width=2)
        return canvas.figure()
    canvas.arrow(at, 24 + CELL + 2, below, 104, colour=AMBER, width=2)
    here = _line(canvas, 220, colour, _slots(a))
    canvas.arrow(below, 122 + CELL + 2, here, 202, colour=AMBER, width=2)
    return canvas.figure()


def slot_rows(a: SlotArithmetic) -> list[dict[str, object]]:
    """The calculation as rows."""
    return [{"name": line.name, "formula": line.formula, "result": line.result} for line in slot_lines(a)]


def slot_words(a: SlotArithmetic) -> str:
    """The calculation in one sentence."""
    steps = "; ".join(f"{line.name} {line.formula} = {line.result}" if line.name != "slot" else f"slot {line.result}" for line in slot_lines(a))
    return f"Position {a.position}: {steps}."


@dataclass(frozen=True)
class _Cells:
    """A line of cells: its name in one or two lines, the number over each cell, what is in it, what its hint says, and which one is the token's."""

    name: str
    above: list[str]
    cells: list[str]
    hovers: list[str]
    chosen: int | None


def _line(canvas: Canvas, y: float, colour: str, line: _Cells) -> float:
    """Draw as many cells as have room, the chosen one among them; returns its middle."""
    longest = max(len(text) for text in (*line.above, *line.cells))
    room = WIDTH - LABELS
    most = max(4, min(16, int(room / (8.2 * longest + 6))))
    middle = line.chosen or 0
    start = min(max(0, middle - most // 2), max(0, len(line.cells) - most))
    shown = range(start, min(len(line.cells), start + most))
    width = min(46.0, room / len(shown))
    name = line.name + (f"<br>{len(shown)} of {len(line.cells)} are shown" if len(shown) < len(line.cells) else "")
    canvas.words(LABELS - 14, y + CELL / 2, name, size=13, right=True)
    for place, index in enumerate(shown):
        x, on = LABELS + place * width, index == line.chosen
        canvas.words(x + width / 2, y - 9, line.above[index], size=12)
        canvas.box(
            x + 1, y, width - 2, CELL, fill=tint(AMBER, 0.55) if on else tint(colour, 0.1), line=AMBER if on else GREY, line_width=2.5 if on else 1,
            text=f"<b>{line.cells[index]}</b>" if on else line.cells[index], size=13, hover=line.hovers[index],
        )  # fmt: skip
    return LABELS + (middle - start + 0.5) * width


def _positions(a: SlotArithmetic, token: str) -> _Cells:
    """The positions that block (or, with several ranks, virtual block) holds."""
    size, first = a.virtual_block_size, a.virtual_block * a.virtual_block_size
    positions = range(first, first + size)
    text = f"position {a.position}" + (f": “{token}”" if token else "")
    if a.cp_world_size == 1:
        return _Cells(
            f"<b>block {a.virtual_block}</b> of the request<br>{text}", [""] * size, [str(p) for p in positions], [f"position {p}" for p in positions], a.offset
        )
    ranks = [offset // a.cp_interleave % a.cp_world_size for offset in range(size)]
    hovers = [f"position {p}: kept by rank {rank}" for p, rank in zip(positions, ranks, strict=True)]
    name = f"<b>virtual block {a.virtual_block}</b><br>{text}<br>in a cell: the rank"
    return _Cells(name, [str(p) for p in positions], [f"r{rank}" for rank in ranks], hovers, a.offset)


def _columns(a: SlotArithmetic, row: Sequence[int]) -> _Cells:
    """The row as the kernel reads it."""
    per_block = a.block_size // a.kernel_block_size
    blocks = [block * per_block + i for block in row for i in range(per_block)]
    name = "<b>row of the block table</b><br>" + ("in blocks of the kernel" if per_block > 1 else "one block per column")
    hovers = [f"column {column}: block {block}" for column, block in enumerate(blocks)]
    return _Cells(name, [str(c) for c in range(len(blocks))], [str(b) for b in blocks], hovers, None if a.kernel_block_id is None else a.column)


def _slots(a: SlotArithmetic) -> _Cells:
    """The slots of the block."""
    block, size = a.kernel_block_id or 0, a.kernel_block_size
    slots = range(block * size, (block + 1) * size)
    name = f"<b>{'block' if size == a.block_size else 'block of the kernel'} {block}</b>: its slots<br>the token's: <b>slot {a.slot}</b>"
    return _Cells(name, [f"+{i}" for i in range(size)], [str(slot) for slot in slots], [f"slot {slot}" for slot in slots], a.kernel_offset)
