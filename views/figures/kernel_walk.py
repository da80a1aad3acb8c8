"""The block-table row that a lane walks: columns with block ids, the tiles of its loop over them, and under each column its slots."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import plotly.graph_objects as go

from engine.trace.closeup import LaneCloseup, TableRow
from views.figures.canvas import AMBER, GREY, Canvas, Fill, tint
from views.figures.kernel_style import ELSEWHERE, MASKED, SKIPPED, TO_COME, listed, plural, span

WIDTH = 800
PLACES = 128
"""So many places are drawn at most, unless one tile has more, those of the tile that is looked at among them; of the other tiles there is an overview."""
LINE = 64
LINE_HEIGHT = 100
LABELS = 76
WIDEST = 24
OVERVIEW = 26
CLEAR = 6
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
    def first_key(self) -> int:
        """The first key that any query of the lane may see."""
        return max(0, self.lane.first_position - self.window + 1) if self.window else 0

    @property
    def numbers(self) -> list[int]:
        """The number of each tile of the loop: its first place / TILE."""
        return [step.positions[0] // self.tile for step in self.lane.tiles]

    @property
    def all_tiles(self) -> int:
        """Tiles that the request's row has, whether this lane walks them or not."""
        in_row = len(self.row.block_ids) * self.block_size
        return max(1, -(-max(self.end_key, in_row if in_row <= PLACES else 0) // self.tile))

    def kind(self, position: int) -> str:
        """What becomes of a place: read now, earlier or later, masked, outside the window, another program's, or nothing."""
        tile = position // self.tile
        for index, step in enumerate(self.lane.tiles):
            if step.positions[0] <= position < step.positions[1]:
                return NOW if index == self.index else BEFORE if index < self.index else TO_COME.name
        if position < self.first_key:
            return SKIPPED.name
        if position < self.end_key:
            return ELSEWHERE.name
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
    above = OVERVIEW if (first, end) != (0, walk.all_tiles * walk.tile) else 0
    pixels = 38 + above + LINE_HEIGHT * len(lines)
    canvas = Canvas(WIDTH, pixels - 42, pixels)
    fills = {
        NOW: Fill(NOW, colour, "", 0.75),
        BEFORE: Fill(BEFORE, colour, ".", 0.30),
        **{fill.name: fill for fill in (TO_COME, MASKED, SKIPPED, ELSEWHERE)},
    }
    if above:
        _overview(canvas, walk, fills)
    for index, (start, stop) in enumerate(lines):
        _line(canvas, walk, fills, start, stop, width, above + index * LINE_HEIGHT)
    return canvas.figure()


def shown_places(walk: Walk) -> tuple[int, int]:
    """Which places are drawn: whole tiles around the one that is looked at, as many as have room."""
    tiles = walk.all_tiles
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
    noun = "slot" if end - first == 1 else "slots"
    slots = listed([f"{a}" if b - a == 1 else f"{a}–{b - 1}" for a, b in step.slots], 6)
    said = [
        f"Tile {tile} has places {tile * walk.tile:,} to {(tile + 1) * walk.tile - 1:,}. The kernel reads {plural(end - first, 'key')} there: {columns} of row "
        f"{walk.row.row}, {'block' if len(blocks) == 1 else 'blocks'} {listed([str(b) for b in blocks])}, {noun} {slots}."
    ]
    behind, before = (tile + 1) * walk.tile - end, first - tile * walk.tile
    if behind and end == walk.end_key:
        said.append(f"{plural(behind, 'place')} behind the last key {'is' if behind == 1 else 'are'} masked: nothing is read there.")
    if before and walk.window:
        said.append(f"{plural(before, 'place')} before the window {'is' if before == 1 else 'are'} masked.")
    if left_out := walk.first_key // walk.tile:
        said.append(f"The window of {walk.window} leaves out {'tile' if left_out == 1 else 'tiles'} {span(0, left_out)}: the loop begins behind.")
    if walk.numbers[0] > left_out or walk.lane.tiles[-1].positions[1] < walk.end_key:
        said.append("Other programs read the rest of the row: few requests with long contexts are split over several.")
    return " ".join(said)


def _overview(canvas: Canvas, walk: Walk, fills: dict[str, Fill]) -> None:
    """All tiles of the request in one line, where only some are drawn below."""
    width = (WIDTH - LABELS) / walk.all_tiles
    canvas.words(LABELS - 8, 8, "all tiles", size=12, right=True)
    for tile in range(walk.all_tiles):
        first, end = tile * walk.tile, (tile + 1) * walk.tile
        index = walk.numbers.index(tile) if tile in walk.numbers else None
        kind = NOW if index == walk.index else BEFORE if index is not None and index < walk.index else TO_COME.name if index is not None else ""
        hover = f"tile {tile}: places {span(first, end)}"
        if not kind:
            kind = SKIPPED.name if end <= walk.first_key else ELSEWHERE.name
        canvas.area(LABELS + tile * width, 0, width, 15, fills[kind], hover)


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
            words += ": left out" if (tile + 1) * walk.tile <= walk.first_key and (right - left) * width > 110 else ""
        canvas.box(
            x(left) + 1, y, (right - left) * width - 2, 17, fill=tint(AMBER, 0.35) if now else "rgba(0,0,0,0)", line=AMBER if now else GREY,
            line_width=2 if now else 1, dash="solid" if tile in numbers else "dot", text=f"<b>{words}</b>" if now else words, size=12,
        )  # fmt: skip
    columns = range(start // walk.block_size, min(-(-stop // walk.block_size), len(walk.row.block_ids)))
    least = width * min(walk.block_size, stop - start)
    has_numbers = least >= 8 * max((len(str(column)) for column in columns), default=0) + 2
    has_ids = least >= 8 * max((len(str(walk.row.block_ids[column])) for column in columns), default=0) + 3
    read_now = range(*walk.lane.tiles[walk.index].columns) if walk.lane.tiles else range(0)
    for column in columns:
        left, right = max(column * walk.block_size, start), min((column + 1) * walk.block_size, stop)
        block, on = walk.row.block_ids[column], column in read_now
        room = (right - left) * width
        if has_numbers:
            canvas.words((x(left) + x(right)) / 2, y + 26, str(column), size=12)
        hover = f"column {column} of row {walk.row.row}: block {block}, positions {span(column * walk.block_size, (column + 1) * walk.block_size)}"
        colour = fills[NOW].colour
        canvas.box(
            x(left) + 0.5, y + 34, room - 1, 22, fill=tint(colour, 0.22) if on else "rgba(0,0,0,0)", line=colour if on else GREY, line_width=2 if on else 1,
            text=(f"<b>{block}</b>" if on else str(block)) if has_ids else "", size=13, hover=hover,
        )  # fmt: skip
    for kind, places in groupby(range(start, stop), key=walk.kind):
        run = list(places)
        for position in run if width >= CLEAR else run[:1]:
            if kind:
                canvas.area(x(position), y + 57, width if width >= CLEAR else width * len(run), 14, fills[kind])
    left, right = (min(max(p, start), stop) for p in walk.sees())
    if left < right:
        canvas.line([(x(left) + 1, y + 75), (x(right) - 1, y + 75)], colour=AMBER, width=3)
    canvas.words(LABELS - 8, y + 84, "position", size=12, right=True)
    every = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if n * width >= 26 or n >= stop - start)
    for position in range(start, stop, every):
        canvas.words(x(position + 0.5) if width >= 14 else x(position), y + 84, str(position), size=12, left=width < 14)
