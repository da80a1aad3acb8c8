"""The pictures of the kernels screen as pure functions: what is drawn is what the close-up says, and each has the same in words."""

from __future__ import annotations

import math
import re

import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.trace.closeup import Comparison, LaneCloseup, RowProgress, TableRow, TileStep
from engine.trace.slot_arithmetic import slot_arithmetic
from tests.figures.closeup_sample import closeup_sample
from views.figures.canvas import AMBER
from views.figures.kernel_compare import comparison_words, difference_map, difference_rows, largest_difference
from views.figures.kernel_grid import lane_words, launch_grid, launch_grid_rows, lines_of
from views.figures.kernel_slot import slot_lines, slot_picture, slot_rows, slot_words
from views.figures.kernel_softmax import softmax_progress, softmax_rows, softmax_steps, softmax_words
from views.figures.kernel_style import request_colours
from views.figures.kernel_walk import Walk, block_table_walk, block_table_walk_rows, shown_places, walk_words

COLOURS = request_colours(["A", "B"])
GPU = next(launch for launch in closeup_sample().gpu if launch.attention)
INTERPRETED = next(launch for launch in closeup_sample().interpreted if launch.attention)


def words_of(figure: go.Figure) -> list[str]:
    """Everything that is written in a drawing, without its formatting."""
    return [re.sub(r"<[^>]+>", "", annotation.text) for annotation in figure.layout.annotations]


def line_of(figure: go.Figure, label: str) -> list[str]:
    """What is written beside a label, from left to right."""
    name = next(a for a in figure.layout.annotations if re.sub(r"<[^>]+>", "", a.text.split("<br>")[0]).split(":")[0] == label)
    beside = [(a.x, re.sub(r"<[^>]+>", "", a.text)) for a in figure.layout.annotations if a is not name and abs(a.y - name.y) < 1.5]
    return [text for _, text in sorted(beside)]


def amber_boxes(figure: go.Figure) -> list[tuple[float, float]]:
    """Middles of the boxes with an amber frame."""
    return [((shape.x0 + shape.x1) / 2, (shape.y0 + shape.y1) / 2) for shape in figure.layout.shapes if shape.type == "rect" and shape.line.color == AMBER]


def targets(figure: go.Figure) -> dict[tuple[int, int], tuple[float, float]]:
    """What a click finds: customdata to place."""
    trace = next(trace for trace in figure.data if trace.customdata is not None)
    return {tuple(data): (x, y) for data, x, y in zip(trace.customdata, trace.x, trace.y, strict=True)}


# ---------------------------------------------------------------------- the launch grid


def test_the_grid_has_a_cell_for_each_program_under_its_kv_head_and_beside_its_queries() -> None:
    figure = launch_grid(GPU, COLOURS, (3, 0))
    places = targets(figure)
    assert set(places) == {(program, 0) for program in range(8)}  # 3 query blocks of A and one of B, with 2 KV heads each
    assert len({y for _, y in places.values()}) == 4
    assert len({x for x, _ in places.values()}) == 2
    words = words_of(figure)
    assert [word for word in words if word.startswith("KV head")] == ["KV head 0", "KV head 1"]
    assert [word for word in words if " at " in word] == ["A  at 0 to 3", "A  at 4 to 7", "A  at 8 to 9", "B  at 5"]
    assert amber_boxes(figure) == [pytest.approx(places[3, 0])]


def test_interpreted_all_lanes_lie_in_the_frame_of_one_program() -> None:
    figure = launch_grid(INTERPRETED, COLOURS, (0, 5))
    assert set(targets(figure)) == {(0, lane) for lane in range(8)}
    frames = [shape for shape in figure.layout.shapes if shape.line.dash == "dash"]
    assert len(frames) == 1
    assert all(frames[0].x0 <= x <= frames[0].x1 and frames[0].y0 <= y <= frames[0].y1 for x, y in targets(figure).values())
    assert lane_words(INTERPRETED.attention[5], INTERPRETED.lanes).startswith("Lane 5 of program 0: request A, KV head 1")


def test_lanes_without_queries_stand_below_and_say_that_they_do_nothing() -> None:
    idle = LaneCloseup(program=0, lane=8, request_id=None, row=None, tokens=[], first_position=0, kv_head=0, tiles=[], rows=[])
    launch = type(INTERPRETED)(kernel=INTERPRETED.kernel, grid=(1,), lanes=9, constants={}, lines={}, attention=[*INTERPRETED.attention, idle])
    assert lines_of(launch)[-1] == [idle]
    assert "no queries" in words_of(launch_grid(launch, COLOURS, (0, 0)))
    assert lane_words(idle, 9) == "Lane 8 of program 0: no queries, it does nothing"


def test_the_grid_as_rows_names_the_blocks_of_each_program() -> None:
    rows = launch_grid_rows(GPU)
    assert [row["block_ids"] for row in rows[::2]] == ["7", "7 1", "7 1 3", "5 2"]  # the rows of the block table, as far as each lane sees
    assert [row["tiles"] for row in rows[::2]] == [1, 2, 3, 2]


# ---------------------------------------------------------------------- the row and its tiles

# A decode at position 18 with a window of 8 tokens sees 11 to 18; tiles of 4 keys, so the loop begins with tile 2, of which one key is in the window.
WINDOW_LANE = LaneCloseup(
    program=0,
    lane=0,
    request_id="A",
    row=0,
    tokens=[0],
    first_position=18,
    kv_head=0,
    tiles=[
        TileStep(positions=(11, 12), columns=(2, 3), block_ids=[3], slots=[(15, 16)]),
        TileStep(positions=(12, 16), columns=(3, 4), block_ids=[4], slots=[(16, 20)]),
        TileStep(positions=(16, 19), columns=(4, 5), block_ids=[13], slots=[(52, 55)]),
    ],
    rows=[],
)
WINDOW_ROW = TableRow(request_id="A", row=0, block_ids=[1, 2, 3, 4, 13], tokens=(0, 1), first_position=18, slots=[54])


def sample_walk(program: int, index: int) -> Walk:
    lane = GPU.attention[program]
    row = next(row for row in closeup_sample().table if row.row == lane.row)
    return Walk(lane, row, index, 4, 4, None, lane.first_position)


def test_each_place_is_what_the_tile_makes_of_it() -> None:
    walk = sample_walk(4, 1)  # the last two queries of A: keys 0 to 9 in three tiles
    kinds = [walk.kind(position) for position in range(13)]
    assert kinds == ["read earlier"] * 4 + ["read now"] * 4 + ["read later"] * 2 + ["masked"] * 2 + [""]


def test_the_window_leaves_out_whole_tiles_and_part_of_the_first() -> None:
    walk = Walk(WINDOW_LANE, WINDOW_ROW, 0, 4, 4, 8, 18)
    assert [walk.kind(position) for position in range(20)] == ["outside the window"] * 11 + ["read now"] + ["read later"] * 7 + ["masked"]
    assert walk.numbers == [2, 3, 4]
    assert walk.sees() == (11, 19)
    said = walk_words(walk)
    assert "The window of 8 leaves out tiles 0 to 1" in said
    assert "reads 1 key there: column 2 of row 0, block 3, slot 15." in said
    assert "3 places before the window are masked" in said


def test_the_row_is_drawn_with_its_block_ids_and_the_column_that_is_read_stands_out() -> None:
    figure = block_table_walk(sample_walk(4, 2), COLOURS["A"])
    assert line_of(figure, "block") == ["7", "1", "3"]
    assert line_of(figure, "column") == ["0", "1", "2"]
    assert line_of(figure, "tile") == ["tile 0", "tile 1", "tile 2"]
    assert "<b>3</b>" in [annotation.text for annotation in figure.layout.annotations]
    assert "<b>7</b>" not in [annotation.text for annotation in figure.layout.annotations]
    assert {trace.name for trace in figure.data if trace.showlegend} == {"read earlier", "read now", "masked"}


def test_kinds_of_places_differ_in_more_than_colour() -> None:
    figure = block_table_walk(Walk(WINDOW_LANE, WINDOW_ROW, 1, 4, 4, 8, 18), COLOURS["A"])
    looks = [(trace.fillpattern.shape, trace.fillcolor) for trace in figure.data if trace.showlegend]
    assert len(looks) == 5
    assert len({pattern for pattern, _ in looks}) == 4  # read now is full, read later empty; the others have a pattern each


def test_where_several_programs_share_a_row_each_says_that_others_read_the_rest() -> None:
    tiles = [TileStep(positions=(4, 8), columns=(1, 2), block_ids=[1], slots=[(4, 8)])]
    lane = LaneCloseup(program=2, lane=0, request_id="A", row=0, tokens=[0], first_position=9, kv_head=0, tiles=tiles, rows=[])
    walk = Walk(lane, TableRow("A", 0, [7, 1, 3], (0, 1), 9, [13]), 0, 4, 4, None, 9)
    assert [walk.kind(position) for position in range(12)] == ["another program's"] * 4 + ["read now"] * 4 + ["another program's"] * 2 + [""] * 2
    said = walk_words(walk)
    assert "Other programs read the rest" in said
    assert "window" not in said
    assert "masked" not in said
    assert "a second kernel merges" in softmax_words(softmax_steps(RowProgress(0, 0, [1.0], [2.0]), [1]), 0, split=True)


def test_the_masked_part_of_the_last_tile_is_counted() -> None:
    assert "2 places behind the last key are masked: nothing is read there." in walk_words(sample_walk(4, 2))
    assert "masked" not in walk_words(sample_walk(4, 0))
    assert block_table_walk_rows(sample_walk(4, 2))[2] == {"tile": 2, "first_key": 8, "keys": 2, "columns": "2", "block_ids": "3", "slots": "12-13"}


@given(st.integers(1, 3000), st.sampled_from([16, 32, 64, 128, 512]), st.integers(0, 100))
def test_however_long_the_row_the_tile_that_is_looked_at_is_shown(keys: int, tile: int, wanted: int) -> None:
    tiles = [TileStep((start, min(start + tile, keys)), (0, 1), [0], []) for start in range(0, keys, tile)]
    index = min(wanted, len(tiles) - 1)
    lane = LaneCloseup(0, 0, "A", 0, [0], keys - 1, 0, tiles, [])
    first, end = shown_places(Walk(lane, TableRow("A", 0, [1] * -(-keys // 16), (0, 1), keys - 1, [0]), index, tile, 16, None, keys - 1))
    assert first <= index * tile < (index + 1) * tile <= end
    assert end - first <= max(128, tile)
    assert first % tile == end % tile == 0


# ---------------------------------------------------------------------- online softmax

SCORES = st.lists(st.lists(st.floats(-30, 30, allow_nan=False), min_size=1, max_size=6), min_size=1, max_size=6)


def progress_of(tiles: list[list[float]]) -> RowProgress:
    """What a kernel holds after each tile, from the definition: the maximum of all scores so far, and the sum of 2^(score - maximum)."""
    maxima = [max(score for tile in tiles[: i + 1] for score in tile) for i in range(len(tiles))]
    totals = [math.fsum(2.0 ** (score - maxima[i]) for tile in tiles[: i + 1] for score in tile) for i in range(len(tiles))]
    return RowProgress(token=0, q_head=0, maxima=maxima, totals=totals)


@given(SCORES)
def test_between_two_tiles_the_old_sum_is_scaled_and_the_new_weights_are_added(tiles: list[list[float]]) -> None:
    steps = softmax_steps(progress_of(tiles), list(range(len(tiles))))
    for i, step in enumerate(steps):
        assert step.added == pytest.approx(math.fsum(2.0 ** (score - step.maximum) for score in tiles[i]), rel=1e-9, abs=1e-9)
        assert step.old_total * step.scale + step.added == pytest.approx(step.total)


def test_what_happened_is_said_with_its_numbers() -> None:
    steps = softmax_steps(RowProgress(0, 0, maxima=[1.0, 3.0, 3.0], totals=[1.5, 1.375, 1.5]), [0, 1, 2])
    assert "Tile 0 is the first with keys for this query: its largest score is 1, its weights add up to 1.5." in softmax_words(steps, 0)
    second = softmax_words(steps, 1)
    assert "Tile 1 found a larger score, 3 instead of 1: all that was summed up before is scaled by 2^(1 − 3) = 0.25." in second
    assert "Sum: 1.5 · 0.25 + 1 = 1.375." in second
    last = softmax_words(steps, 2)
    assert "no larger score than 3" in last
    assert "Sum: 1.375 + 0.125 = 1.5." in last
    assert "The loop ends" in last
    assert softmax_rows(steps)[1] == {"tile": 1, "maximum": 3.0, "scale_of_what_was_before": 0.25, "weights_added": 1.0, "total": 1.375}


def test_a_row_that_has_seen_no_key_yet_says_so_and_draws_no_number() -> None:
    steps = softmax_steps(RowProgress(0, 0, maxima=[-1e38, 2.0], totals=[64.0, 3.0]), [3, 4])
    assert "sees no key of tile 3" in softmax_words(steps, 0)
    assert "Tile 4 is the first with keys" in softmax_words(steps, 1)
    figure = softmax_progress(steps, 1)
    assert [list(trace.y) for trace in figure.data] == [[None, 2.0], [None, 3.0]]


def test_later_tiles_have_their_place_but_no_point_yet() -> None:
    row = GPU.attention[4].rows[0]
    figure = softmax_progress(softmax_steps(row, [0, 1, 2]), 1)
    assert [list(trace.x) for trace in figure.data] == [["0", "1"]] * 2
    assert list(figure.data[0].y) == row.maxima[:2]
    assert list(figure.data[1].y) == row.totals[:2]
    assert list(figure.layout.xaxis.categoryarray) == ["0", "1", "2"]


# ---------------------------------------------------------------------- slot arithmetic


def test_the_slot_of_a_token_is_worked_out_line_by_line() -> None:
    a = slot_arithmetic(9, [7, 1, 3], block_size=4)  # R8.4: row[9 // 4] * 4 + 9 % 4
    assert [(line.name, line.formula, line.result) for line in slot_lines(a)] == [
        ("virtual block", "9 // (4 · 1)", "2"),
        ("offset", "9 % 4", "1"),
        ("column", "2 + 1 // 4", "2"),
        ("block number", "row[2]", "3"),
        ("block offset", "1 % 4", "1"),
        ("slot", "3 · 4 + 1", "13"),
    ]
    assert slot_words(a).endswith("slot 13.")


def test_with_smaller_blocks_of_the_kernel_the_column_counts_those_and_the_slot_stays() -> None:
    a = slot_arithmetic(5, [5, 2], block_size=4, kernel_block_size=2)  # R8.4 with k = 2: the row is 10, 11, 4, 5
    lines = {line.name: (line.formula, line.result) for line in slot_lines(a)}
    assert lines["column"] == ("1 · 2 + 1 // 2", "2")
    assert lines["block number"] == ("row[2] = 2 · 2 + 0", "4")
    assert lines["slot"] == ("4 · 2 + 1", "9")
    figure = slot_picture(a, [5, 2], COLOURS["B"], "best")
    assert line_of(figure, "row of the block table") == ["10", "11", "4", "5"]
    assert line_of(figure, "block of the kernel 4") == ["8", "9"]


def test_a_token_of_another_rank_has_slot_minus_one_and_it_is_said_why() -> None:
    here, other = (slot_arithmetic(5, [5, 2], block_size=4, cp_world_size=2, cp_rank=rank) for rank in (1, 0))
    assert [line.result for line in slot_lines(here)] == ["0", "5", "1", "2", "0", "5", "2", "22"]  # local offset 2 of block 5: 5 * 4 + 2
    assert slot_lines(other)[-1].result == "-1"
    assert "rank 1 keeps this token; rank 0 writes nothing" in slot_lines(other)[-1].says
    assert "slot −1: rank 1 keeps this token" in words_of(slot_picture(other, [5, 2], COLOURS["B"], ""))


def test_behind_the_end_of_the_row_there_is_no_slot() -> None:
    a = slot_arithmetic(8, [5, 2], block_size=4)
    assert slot_lines(a)[-1].formula == "the row has no column 2"
    assert "slot −1: the row has no column 2" in words_of(slot_picture(a, [5, 2], COLOURS["B"], ""))


@given(st.data())
def test_every_calculation_ends_with_the_slot_and_its_picture_marks_the_token_in_each_line(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    divisors = [d for d in (1, 2, 4, 8, 16) if size % d == 0]
    ranks = data.draw(st.sampled_from([1, 2, 4]))
    row = data.draw(st.lists(st.integers(1, 99), min_size=1, max_size=20, unique=True))
    a = slot_arithmetic(
        data.draw(st.integers(0, size * ranks * (len(row) + 1) - 1)), row, block_size=size, kernel_block_size=data.draw(st.sampled_from(divisors)),
        cp_world_size=ranks, cp_rank=data.draw(st.integers(0, ranks - 1)), cp_interleave=data.draw(st.sampled_from(divisors)),
    )  # fmt: skip
    assert slot_lines(a)[-1].result == str(a.slot)
    assert slot_rows(a)[-1]["name"] == "slot"
    assert len(amber_boxes(slot_picture(a, row, COLOURS["A"], "word"))) == (3 if a.slot >= 0 else 1)


# ---------------------------------------------------------------------- reference against Triton

COMPARISON = Comparison(
    reference=[[[0.5], [0.25]], [[1.0], [2.0]]],
    triton=[[[0.5], [0.2500001]], [[1.000004], [2.0]]],
    num_shown=1,
    head_dim=1,
    difference=[[0.0, 1e-7], [4e-6, 3e-9]],
    largest=4e-6,
)


def test_the_largest_difference_is_found_named_and_framed() -> None:
    assert largest_difference(COMPARISON) == (1, 0, 4e-6)
    assert comparison_words(COMPARISON, ["A 0", "A 1"]) == "The largest difference of all is 4.00e-06: A 1, query head 0."
    figure = difference_map(COMPARISON, ["A 0", "A 1"], (0, 1))
    frame = next(shape for shape in figure.layout.shapes if shape.line.dash == "dot")
    assert ((frame.x0 + frame.x1) / 2, (frame.y0 + frame.y1) / 2) == (1, 0)
    assert figure.data[0].text[0][1] == "<b>4.00e-06</b>"
    assert amber_boxes(figure) == [(0, 1)]


def test_the_scale_is_logarithmic_and_no_difference_at_all_has_no_colour() -> None:
    heat = difference_map(COMPARISON, ["A 0", "A 1"], (0, 0)).data[0]
    assert heat.z[0][0] is None
    assert heat.z[1][0] == pytest.approx(-7)
    assert heat.z[1][1] == pytest.approx(math.log10(3e-9))
    assert heat.text[0][0] == "0"
    assert heat.text[1][1] == "1e-8"  # the next power of ten above
    assert len(targets(difference_map(COMPARISON, ["A 0", "A 1"], (0, 0)))) == 4


def test_the_sample_s_largest_difference_is_what_the_close_up_says() -> None:
    comparison = closeup_sample().comparison
    top = largest_difference(comparison)
    assert top.difference == comparison.largest
    rows = difference_rows(comparison, [str(i) for i in range(11)])
    assert len(rows) == 11 * 4
    assert max(float(str(row["largest_difference"])) for row in rows) == comparison.largest


def test_equal_outputs_are_said_to_be_equal() -> None:
    same = Comparison(reference=[[[1.0]]], triton=[[[1.0]]], num_shown=1, head_dim=1, difference=[[0.0]], largest=0.0)
    assert comparison_words(same, ["A 0"]) == "Both outputs are the same, bit by bit."
    assert [shape.line.dash for shape in difference_map(same, ["A 0"], (0, 0)).layout.shapes] == ["solid"]


# ---------------------------------------------------------------------- all of them


def test_nothing_is_written_smaller_than_12_pixels() -> None:
    arithmetic = slot_arithmetic(9, [7, 1, 3], block_size=4, kernel_block_size=2)
    figures = [
        launch_grid(GPU, COLOURS, (0, 0)),
        block_table_walk(sample_walk(4, 1), COLOURS["A"]),
        softmax_progress(softmax_steps(GPU.attention[4].rows[0], [0, 1, 2]), 1),
        slot_picture(arithmetic, [7, 1, 3], COLOURS["A"], "word"),
        difference_map(closeup_sample().comparison, [str(i) for i in range(11)], (0, 0)),
    ]
    for figure in figures:
        sizes = re.findall(r'"size":\s*(\d+)', figure.to_json())
        fonts = re.findall(r'"(?:text)?font":\{[^}]*"size":(\d+)', figure.to_json().replace(" ", ""))
        assert sizes
        assert min(map(int, fonts), default=12) >= 12
