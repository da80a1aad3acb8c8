"""The launch grid of the attention kernel: one cell per lane, under the KV head and beside the queries that it works for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import plotly.graph_objects as go

from engine.trace.closeup import LaneCloseup, LaunchCloseup
from views.figures.canvas import AMBER, GREY, INK, Canvas, tint
from views.figures.kernel_style import colour_of, plural, short_name, span

WIDTH = 380
LABELS = 126
ABOVE, TOP = 30, 20
CELL = 34
SMALLEST_CELL = 20


def launch_grid(launch: LaunchCloseup, colours: Mapping[str, str], chosen: tuple[int, int], height: int = 330) -> go.Figure:
    """All lanes of the launch, a line for each block of queries. `chosen`: program and lane with a thick frame. `height` in pixels: less if that is
    enough, more if the lines need it.

    A click on a cell selects a point whose `customdata` are program and lane. Several lanes in one program have a frame around them.
    """
    lines = lines_of(launch)
    columns = max((len(line) for line in lines), default=1)
    size = max(SMALLEST_CELL, min(CELL, (height - ABOVE - TOP) // max(len(lines), 1)))
    pixels = ABOVE + TOP + size * len(lines) + 6
    canvas = Canvas(WIDTH, pixels - ABOVE - 2, pixels)
    width = min(92.0, (WIDTH - LABELS) / columns)
    points: list[tuple[float, float, list[int], str]] = []
    for place, heading in enumerate(_headings(lines)):
        canvas.words(LABELS + (place + 0.5) * width, TOP - 10, heading if width >= 56 else heading.split()[-1], size=12)
    if width < 56:
        canvas.words(LABELS - 8, TOP - 10, "KV head", size=12, right=True)
    for index, line in enumerate(lines):
        y = TOP + index * size
        canvas.words(LABELS - 8, y + size / 2, _label(line[0]), size=13, right=True)
        for place, lane in enumerate(line):
            x = LABELS + place * width
            mine, idle = (lane.program, lane.lane) == chosen, not lane.tokens
            canvas.box(
                x + 2, y + 2, width - 4, size - 4,
                fill="rgba(0,0,0,0)" if idle else tint(colour_of(colours, lane.request_id), 0.30 if mine else 0.14),
                line=AMBER if mine else GREY if idle else colour_of(colours, lane.request_id), line_width=3.5 if mine else 1.2,
                dash="dot" if idle and not mine else "solid",
            )  # fmt: skip
            name = str(lane.program if launch.lanes == 1 else lane.lane)
            if width >= 9 * len(name) + 4:
                canvas.words(x + width / 2, y + size / 2, f"<b>{name}</b>" if mine else name, size=13)
            points.append((x + width / 2, y + size / 2, [lane.program, lane.lane], lane_words(lane, launch.lanes)))
    if launch.lanes > 1:
        _program_frames(canvas, lines, width, size)
    figure = canvas.figure()
    figure.add_trace(_click_targets(points, min(size, int(width))))
    figure.update_layout(clickmode="event+select", margin={"l": 0, "r": 0, "t": ABOVE, "b": 2})
    return figure


def launch_grid_rows(launch: LaunchCloseup) -> list[dict[str, object]]:
    """The chart's data, one row a lane."""
    return [
        {
            "program": lane.program,
            "lane": lane.lane,
            "request": lane.request_id or "",
            "kv_head": lane.kv_head,
            "first_query_position": lane.first_position if lane.tokens else "",
            "queries": len(lane.tokens),
            "tiles": len(lane.tiles),
            "block_ids": " ".join(str(block) for tile in lane.tiles for block in tile.block_ids),
        }
        for lane in launch.attention
    ]


def lines_of(launch: LaunchCloseup) -> list[list[LaneCloseup]]:
    """The lanes in the order of the grid, a list for each block of queries: those that work for the same queries stand side by side."""
    lanes = sorted(launch.attention, key=lambda lane: (lane.program, lane.lane))
    busy = [lane for lane in lanes if lane.tokens]
    lines = [list(line) for _, line in groupby(busy, key=lambda lane: lane.tokens[0])]
    idle = [lane for lane in lanes if not lane.tokens]
    wide = max((len(line) for line in lines), default=len(idle) or 1)
    return lines + [idle[i : i + wide] for i in range(0, len(idle), wide)]


def lane_words(lane: LaneCloseup, lanes: int) -> str:
    """What the lane works for, in a line."""
    who = f"Program {lane.program}" if lanes == 1 else f"Lane {lane.lane} of program {lane.program}"
    if not lane.tokens:
        return f"{who}: no queries, it does nothing"
    end = lane.first_position + len(lane.tokens)
    where = f"queries at positions {span(lane.first_position, end)}" if len(lane.tokens) > 1 else f"the query at position {lane.first_position:,}"
    return f"{who}: request {lane.request_id}, KV head {lane.kv_head}, {where}; {plural(len(lane.tiles), 'tile')}"


def lane_name(lane: LaneCloseup, lanes: int) -> str:
    """The same in a few words, for a list."""
    who = f"Program {lane.program}" if lanes == 1 else f"Lane {lane.lane}"
    if not lane.tokens:
        return f"{who}: no queries"
    return f"{who}: {lane.request_id} at {span(lane.first_position, lane.first_position + len(lane.tokens))}, KV head {lane.kv_head}"


def _label(lane: LaneCloseup) -> str:
    if not lane.tokens:
        return "no queries"
    return f"<b>{short_name(lane.request_id or '?')}</b>  at {span(lane.first_position, lane.first_position + len(lane.tokens))}"


def _headings(lines: Sequence[Sequence[LaneCloseup]]) -> list[str]:
    line = max(lines, key=lambda line: (bool(line[0].tokens), len(line)), default=[])
    return [f"KV head {lane.kv_head}" for lane in line]


def _program_frames(canvas: Canvas, lines: Sequence[Sequence[LaneCloseup]], width: float, size: float) -> None:
    """A frame around the cells of each program that carries several lanes."""
    places: dict[int, list[tuple[float, float]]] = {}
    for index, line in enumerate(lines):
        for place, lane in enumerate(line):
            places.setdefault(lane.program, []).append((LABELS + place * width, TOP + index * size))
    for cells in places.values():
        left, top = min(x for x, _ in cells), min(y for _, y in cells)
        right, bottom = max(x for x, _ in cells) + width, max(y for _, y in cells) + size
        canvas.box(left - 1, top - 1, right - left + 2, bottom - top + 2, line=GREY, line_width=2, dash="dash")


def _click_targets(points: Sequence[tuple[float, float, list[int], str]], size: int) -> go.Scatter:
    """Markers that nobody sees, over the cells: the mouse finds them."""
    unseen = {"marker": {"opacity": 0}}
    return go.Scatter(
        x=[x for x, _, _, _ in points],
        y=[y for _, y, _, _ in points],
        customdata=[data for _, _, data, _ in points],
        text=[words for _, _, _, words in points],
        mode="markers",
        marker={"size": max(size - 4, 12), "symbol": "square", "opacity": 0, "color": INK},
        selected=unseen,
        unselected=unseen,
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
        name="programs",
    )
