"""The block-table row that a lane walks: columns with block ids, the tiles of its loop over them, and under each column its slots."""

from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go

from engine.trace.closeup import LaneCloseup, TableRow
from views.figures.canvas import AMBER, GREY, Canvas, Fill, tint
from views.figures.kernel_style import MASKED, SKIPPED, TO_COME, listed, plural, span

WIDTH = 800
PLACES = 256
"""So many places of tiles are drawn at most, unless one tile has more; the tile that is looked at is among them."""
LINE = 64
LINE_HEIGHT = 100
LABELS = 62
WIDEST = 24
NOW, BEFORE = "read now", "read earlier"


@dataclass(frozen=True)
class Walk:
    """What is drawn: lane, its request's row, the tile of the loop that is looked at (an index of `lane.tiles`), and the launch's and the cache's sizes.
    `query`: position of the query that is followed."""

    lane: LaneCloseup
    row: TableRow
    index: int
    tile: int
    block_size: int
    window: int | None
    query: int

    @property
    def end_key(self) -> int:
        """Keys that any query of the lane may see, from the request's start."""
        return self.lane.first_position + len(self.lane.tokens)

    @property
    def numbers(self) -> list[int]:
        """The number of each tile of the loop: its first place / TILE."""
        return [step.positions[0] // self.tile for step in self.lane.tiles]

    def kind(self, position: int) -> str:
        """What becomes of a place: read now, earlier or later, masked, outside the window, or nothing."""
        tile = position // self.tile
        for index, step in enumerate(self.lane.tiles):
            if step.positions[0] <= position < step.positions[1]:
                return NOW if index == self.index else BEFORE if index < self.index else TO_COME.name
        first = self.lane.tiles[0].positions[0] if self.lane.tiles else 0
        if position < first:
            return SKIPPED.name
        return MASKED.name if tile in self.numbers else ""

    def sees(self) -> tuple[int, int]:
        """The positions that the followed query may see: first, end."""
        return (max(0, self.query - self.window + 1) if self.window else 0, self.query + 1)


def block_table_walk(walk: Walk, colour: str) -> go.Figure:
    """The row in lines of places, above each line its tiles. Its height follows from what is to be drawn."""
    first, end = shown_places(walk)
    per_line = min(max(LINE, -(-(end - first) // 4)), end - first)
    width = min(WIDEST, (WIDTH - LABELS) / per_line)
    lines = [(start, min(start + per_line, end)) for start in range(first, end, per_line)]
    pixels = 38 + LINE_HEIGHT * len(lines)
    canvas = Canvas(WIDTH, pixels - 42, pixels)
    fills = {
        NOW: Fill(NOW, colour, "", 0.75),
        BEFORE: Fill(BEFORE, colour, ".", 0.30),
        **{fill.name: fill for fill in (TO_COME, MASKED, SKIPPED)},
    }
    for index, (start, stop) in enumerate(lines):
        _line(canvas, walk, fills, start, stop, width, index * LINE_HEIGHT)
    return canvas.figure()


def shown_places(walk: Walk) -> tuple[int, int]:
    """Which places are drawn: whole tiles around the one that is looked at, as many as have room."""
    reach = max(walk.end_key, len(walk.row.block_ids) * walk.block_size if len(walk.row.block_ids) * walk.block_size <= PLACES else 0)
    tiles = max(1, -(-reach // walk.tile))
    room = max(1, PLACES // walk.tile)
    now = walk.numbers[walk.index] if walk.lane.tiles else 0
    first = 0 if tiles <= room else min(max(0, now - room // 2), tiles - room)
    return first * walk.tile, min(tiles, first + room) * walk.tile


def block_table_walk_rows(walk: Walk) -> list[dict[str, object]]:
    """The chart's data, one row for each tile of the loop."""
    return [
        {
            "tile": tile,
            "first_key": step.positions[0],
            "keys": step.positions[1] - step.positions[0],
            "columns": " ".join(map(str, range(*step.columns))),
            "block_ids": " ".join(map(str, step.block_ids)),
            "slots": " ".join(f"{a}-{b - 1}" for a, b in step.slots),
        }
        for tile, step in zip(walk.numbers, walk.lane.tiles, strict=True)
    ]


def walk_words(walk: Walk) -> str:
    """What the tile reads, in a sentence or two."""
    if not walk.lane.tiles:
        return "This lane has no queries: it reads nothing."
    step, tile = walk.lane.tiles[walk.index], walk.numbers[walk.index]
    first, end = step.positions
    if end <= first:
        return f"Iteration {walk.index + 1} of {len(walk.lane.tiles)}: no key of this lane lies in this tile, so all its places are masked."
    blocks = list(dict.fromkeys(step.block_ids))
    columns = f"column {step.columns[0]}" if step.columns[1] - step.columns[0] == 1 else f"columns {span(*step.columns)}"
    slots = listed([f"{a}" if b - a == 1 else f"{a}–{b - 1}" for a, b in step.slots], 6)
    said = [
        f"Tile {tile} has places {tile * walk.tile:,} to {(tile + 1) * walk.tile - 1:,}. The kernel reads {plural(end - first, 'key')} there: {columns} of row "
        f"{walk.row.row}, {'block' if len(blocks) == 1 else 'blocks'} {listed([str(b) for b in blocks])}, slots {slots}."
    ]
    behind, before = (tile + 1) * walk.tile - end, first - tile * walk.tile
    if behind:
        said.append(f"{plural(behind, 'place')} behind the last key {'is' if behind == 1 else 'are'} masked: nothing is read there.")
    if before and walk.window:
        said.append(f"{plural(before, 'place')} before the window {'is' if before == 1 else 'are'} masked, too.")
    if walk.numbers[0]:
        tiles = f"tile {span(0, walk.numbers[0])}" if walk.numbers[0] == 1 else f"tiles {span(0, walk.numbers[0])}"
        said.append(f"The window of {walk.window} leaves out {tiles}: the loop begins behind.")
    return " ".join(said)


def _line(canvas: Canvas, walk: Walk, fills: dict[str, Fill], start: int, stop: int, width: float, y: float) -> None:
    """One line of places `start` up to `stop`, `width` pixels each: tiles, columns, blocks, slots, what the followed query may see, positions."""

    def x(position: float) -> float:
        return LABELS + (position - start) * width

    for height, label in ((8, "tile"), (26, "column"), (45, "block"), (64, "slots")):
        canvas.words(LABELS - 8, y + height, label, size=12, right=True)
    numbers = walk.numbers
    for tile in range(start // walk.tile, -(-stop // walk.tile)):
        left, right = max(tile * walk.tile, start), min((tile + 1) * walk.tile, stop)
        now = bool(numbers) and tile == numbers[walk.index]
        words = f"tile {tile}" if (right - left) * width > 44 else str(tile)
        if tile not in numbers:
            words += ": left out" if numbers and tile < numbers[0] and (right - left) * width > 110 else ""
        canvas.box(
            x(left) + 1, y, (right - left) * width - 2, 17, fill=tint(AMBER, 0.35) if now else "rgba(0,0,0,0)", line=AMBER if now else GREY,
            line_width=2 if now else 1, dash="solid" if tile in numbers else "dot", text=f"<b>{words}</b>" if now else words, size=12,
        )  # fmt: skip
    read_now = range(*walk.lane.tiles[walk.index].columns) if walk.lane.tiles else range(0)
    for column in range(start // walk.block_size, -(-stop // walk.block_size)):
        if column >= len(walk.row.block_ids):
            break
        left, right = max(column * walk.block_size, start), min((column + 1) * walk.block_size, stop)
        block, on = walk.row.block_ids[column], column in read_now
        room = (right - left) * width
        if room >= 8 * len(str(column)) + 2:
            canvas.words((x(left) + x(right)) / 2, y + 26, str(column), size=12)
        hover = f"column {column} of row {walk.row.row}: block {block}, positions {span(column * walk.block_size, (column + 1) * walk.block_size)}"
        colour = fills[NOW].colour
        fits = room >= 8 * len(str(block)) + 3
        canvas.box(
            x(left) + 0.5, y + 34, room - 1, 22, fill=tint(colour, 0.22) if on else "rgba(0,0,0,0)", line=colour if on else GREY, line_width=2 if on else 1,
            text=(f"<b>{block}</b>" if on else str(block)) if fits else "", size=13, hover=hover,
        )  # fmt: skip
    for position in range(start, stop):
        if kind := walk.kind(position):
            canvas.area(x(position), y + 57, width, 14, fills[kind])
    left, right = (min(max(p, start), stop) for p in walk.sees())
    if left < right:
        canvas.line([(x(left) + 1, y + 75), (x(right) - 1, y + 75)], colour=AMBER, width=3)
    canvas.words(LABELS - 8, y + 84, "position", size=12, right=True)
    every = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if n * width >= 26 or n >= stop - start)
    for position in range(start, stop, every):
        canvas.words(x(position + 0.5), y + 84, str(position), size=12)
