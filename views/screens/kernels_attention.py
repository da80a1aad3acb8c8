"""The attention kernel at work: its launch grid, the row of the block table that a program walks, and its online softmax."""

from __future__ import annotations

import streamlit as st

from engine.trace.closeup import LaneCloseup, LaunchCloseup, RowProgress
from views import state
from views.figures.kernel_grid import lane_name, lane_words, launch_grid, launch_grid_rows
from views.figures.kernel_softmax import softmax_progress, softmax_rows, softmax_steps, softmax_words
from views.figures.kernel_style import colour_of, plural
from views.figures.kernel_walk import Walk, block_table_walk, block_table_walk_rows, walk_words
from views.screens.charts import show_chart
from views.screens.kernels_choice import choose, preset, widget
from views.screens.kernels_look import explain
from views.screens.kernels_view import View

GRID_HEIGHT = 330
SOFTMAX_HEIGHT = 226
PLAYING = "kernels-playing"
SECONDS_PER_TILE = 1.2
NOTHING_ON_GPU = (
    "This program has no queries and does nothing. Whoever launches the kernel does not wait for the GPU to learn how long the requests are, "
    "so there are as many programs as a batch of this size may need at most."
)
NOTHING_HERE = "This lane has no queries and does nothing: the number of lanes is rounded up to a power of two."
WORDS = {
    "Grid": "all programs of one launch. A GPU runs as many at a time as it has room for.",
    "Program": "one run of the kernel's code, on its own share of the work; it cannot see the others.",
    "Lane": "one share: a block of queries of one request, with one KV head. On a GPU a program has one lane; here, where a program is slow, one has many.",
    "Tile": "the keys that go through a program's loop at a time.",
}


def attention_part(view: View) -> None:
    """Grid on the left, row and softmax on the right."""
    launch = next((launch for launch in view.launches if launch.attention), None)
    if launch is None:
        st.info("The attention kernel did not run here, so there is no grid to look at.")
        return
    left, right = st.columns([1, 2.1], gap="medium")
    with left:
        lane = _grid(view, launch)
    with right:
        _row_and_softmax(view, launch, lane)


def _grid(view: View, launch: LaunchCloseup) -> LaneCloseup:
    """The grid and a list with the same choices; returns the chosen lane."""
    lanes = {(lane.program, lane.lane): lane for lane in launch.attention}
    program = view.choices.pick("program", sorted({program for program, _ in lanes}))
    number = view.choices.pick("lane", sorted(place for where, place in lanes if where == program))
    lane = lanes[program, number]
    shape, many = " × ".join(map(str, launch.grid)), launch.lanes > 1
    one = launch.grid == (1,)
    st.markdown(
        f"**Launch grid**: {shape} program{'' if one else 's'} with {plural(launch.lanes, 'lane')}{'' if one else ' each'}. "
        f"In a cell: the number of a {'lane' if many else 'program'}; click one."
    )
    figure = launch_grid(launch, view.colours, (program, number), GRID_HEIGHT - 12)
    tall = figure.layout.height > GRID_HEIGHT
    with st.container(height=GRID_HEIGHT if tall else "content", border=False, key="kernels-grid"):
        said = f"{plural(len(lanes), 'lane')} in {shape} programs. Chosen: {lane_words(lane, launch.lanes)}."
        show_chart(figure, launch_grid_rows(launch), "kernels-grid", alt=said, on_click=_clicked)
    places = sorted(lanes)
    preset(widget("place"), (program, number))
    st.selectbox(
        "Program" if not many else "Lane",
        places,
        key=widget("place"),
        format_func=lambda place: lane_name(lanes[place], launch.lanes),
        on_change=_selected,
        label_visibility="collapsed",
    )
    explain(WORDS)
    return lane


def _clicked() -> None:
    if place := state.clicked("kernels-grid"):
        _choose_lane(*place)


def _selected() -> None:
    _choose_lane(*state.kept(widget("place"), (0, 0)))


def _choose_lane(program: int, lane: int) -> None:
    choose("program", program)
    choose("lane", lane)


def _row_and_softmax(view: View, launch: LaunchCloseup, lane: LaneCloseup) -> None:
    """The loop of the chosen lane, by itself while it plays."""
    if not lane.tiles or lane.row is None:
        st.info(NOTHING_ON_GPU if view.as_gpu else NOTHING_HERE)
        return
    playing = state.kept(PLAYING, False)
    st.fragment(_loop, run_every=SECONDS_PER_TILE if playing else None)(view, launch, lane, playing)


def _loop(view: View, launch: LaunchCloseup, lane: LaneCloseup, ticks: bool) -> None:
    """`ticks`: whether this part of the page runs again by itself, which only a run of the whole page can change."""
    if state.kept(PLAYING, False) != ticks:
        st.rerun()
    closeup = view.closeup
    tile_size = int(launch.constants.get("TILE") or 1)
    index, row = _controls(view, lane, [step.positions[0] // tile_size for step in lane.tiles])
    view.choices.to_address()
    table_row = next(table_row for table_row in closeup.table if table_row.row == lane.row)
    query = view.tokens[row.token].position if row else lane.first_position
    walk = Walk(lane, table_row, index, tile_size, closeup.block_size, closeup.sliding_window, query)
    said = walk_words(walk)
    st.markdown(
        f"**Row {lane.row} of the block table** (request {lane.request_id}), in tiles of {tile_size} keys. The amber line: what the chosen query may see."
    )
    show_chart(block_table_walk(walk, colour_of(view.colours, lane.request_id)), block_table_walk_rows(walk), "kernels-walk", alt=said)
    st.markdown(said)
    if row is None:
        st.caption("The kernel was not asked how this lane's softmax grew.")
        return
    steps = softmax_steps(row, walk.numbers)
    words = softmax_words(steps, min(index, len(steps) - 1), bool(launch.constants.get("SPLIT")))
    if launch.constants.get("ONE_TILE"):
        words += " One tile holds all keys, so this launch never rescales anything."
    chart, text = st.columns([1.75, 1], gap="small")
    with chart:
        show_chart(softmax_progress(steps, index, SOFTMAX_HEIGHT), softmax_rows(steps), "kernels-softmax", alt=words)
    with text:
        st.markdown(f"**Online softmax.** {words}")
        st.caption(
            "A softmax needs the largest score and the sum of the weights 2^(score − largest). The loop keeps both, as far as it has come, so it never "
            "needs all scores at once. Scores are logarithms to base 2, because exp2 is what a GPU has in hardware."
        )


def _controls(view: View, lane: LaneCloseup, numbers: list[int]) -> tuple[int, RowProgress | None]:
    """Which iteration of the loop, and which row of the lane's matrix. `numbers`: of the tiles."""
    last = len(lane.tiles) - 1
    playing = state.kept(PLAYING, False)
    index = view.choices.pick("tile", range(last + 1))
    if playing and state.kept("kernels-ticked", False):
        index = min(index + 1, last)
        view.choices.set("tile", index)
    state.keep("kernels-ticked", playing)
    if playing and index == last:
        state.keep(PLAYING, False)
    with st.container(key="kernels-loop", horizontal=True, vertical_alignment="center", gap="small"):
        st.button("◀", key="kernels-back", disabled=index == 0, on_click=choose, args=("tile", index - 1), help="The tile before")
        st.button("▶", key="kernels-on", disabled=index == last, on_click=choose, args=("tile", index + 1), help="The next tile")
        st.button("Stop" if playing else "Play", key="kernels-play", disabled=not last, on_click=_play, args=(index, last))
        if last:
            st.select_slider(
                "Iteration of the loop",
                range(last + 1),
                key=widget("tile"),
                format_func=lambda i: f"tile {numbers[i]}",
                label_visibility="collapsed",
                width=190,
            )
        else:
            _one_tile(view)
        if not lane.rows:
            return index, None
        longest = max(range(len(lane.rows)), key=lambda i: (lane.rows[i].token, -lane.rows[i].q_head))
        chosen = view.choices.pick("row", range(len(lane.rows)), longest)
        st.selectbox("Row", range(len(lane.rows)), key=widget("row"), format_func=lambda i: _row_name(view, lane.rows[i]), label_visibility="collapsed")
    return index, lane.rows[chosen]


def _play(index: int, last: int) -> None:
    playing = not state.kept(PLAYING, False)
    state.keep(PLAYING, playing)
    state.keep("kernels-ticked", False)
    if playing and index == last:
        choose("tile", 0)


def _one_tile(view: View) -> None:
    """Instead of the slider where the loop runs once."""
    if not view.as_gpu:
        st.markdown("One tile: the loop runs once.", width=200)
        return
    hint = "The context fits into one tile, so the loop runs once. With tiles of a block each, it can be watched at work."
    st.button("One tile: take smaller ones", key="kernels-smaller", on_click=_smaller, args=(view.closeup.block_size,), help=hint)


def _smaller(block_size: int) -> None:
    choose("keys", next((keys for keys in (4, 8, 16) if keys >= block_size), 16))


def _row_name(view: View, row: RowProgress) -> str:
    token = view.tokens[row.token]
    text = f" “{token.text.strip()}”" if token.text.strip() else ""
    return f"query of {token.request_id}, position {token.position}{text}, query head {row.q_head}"
