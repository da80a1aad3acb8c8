"""The charts of the memory screen as pure functions: what is drawn is what they were given, to scale, and told apart without colour."""

from __future__ import annotations

import csv
import io
import statistics
from itertools import pairwise

import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from views.figures.batch_over_time import MAX_POINTS, BatchLine, batch_over_time, batch_rows, thinned
from views.figures.block_size_sweep import CostAtBlockSize, WasteAtBlockSize, block_size_rows, block_size_sweep
from views.figures.memory_bars import MemoryShares, memory_bar_rows, memory_bars
from views.figures.sharing_saved import Saving, sharing_rows, sharing_saved
from views.figures.slot_strip import Segment, cut, joined, slot_strip, slot_strip_rows

# Figure 2 of the paper: token states, reservation, internal and external fragmentation in percent of the memory of the KV cache.
FIGURE_2 = (
    MemoryShares("Orca (Max)", "paper", 20.4, 13.3, 57.3, 8.9, unconfirmed=frozenset({"reservation", "external"})),
    MemoryShares("Orca (Pow2)", "paper", 26.8, 17.9, 13.6, 41.6, unconfirmed=frozenset({"token_states", "internal"})),
    MemoryShares("Orca (Oracle)", "paper", 38.2, 25.2, None, 36.6),
    MemoryShares("vLLM", "paper", 96.3, None, None, None, 3.7),
)
# Figure 3 of the paper: request A may have 2048 tokens, B 512; 7 + 1 and 3 + 1 slots hold tokens, 2 and 1 are used later.
FIGURE_3 = (
    Segment(0, 8, "used", "A"), Segment(8, 2, "reserved", "A"), Segment(10, 2038, "never used", "A"),
    Segment(2048, 100, "free"),
    Segment(2148, 4, "used", "B"), Segment(2152, 1, "reserved", "B"), Segment(2153, 507, "never used", "B"),
)  # fmt: skip


def bars(figure: go.Figure) -> list[go.Bar]:
    return [trace for trace in figure.data if isinstance(trace, go.Bar)]


def test_each_bar_of_figure_2_is_as_long_as_its_value_and_carries_it() -> None:
    figure = memory_bars(FIGURE_2)
    drawn = {trace.name: dict(zip(trace.y[0], zip(trace.x, trace.text, strict=True), strict=True)) for trace in bars(figure)}
    assert drawn["token states"] == {"Orca (Max)": (20.4, "20.4"), "Orca (Pow2)": (26.8, "26.8?"), "Orca (Oracle)": (38.2, "38.2"), "vLLM": (96.3, "96.3")}
    assert drawn["never used"]["Orca (Max)"] == (57.3, "57.3")
    assert drawn["external"]["Orca (Max)"] == (8.9, "8.9?")
    for system in ("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "vLLM"):
        assert sum(values[system][0] for values in drawn.values()) == pytest.approx(100, abs=0.11)


def test_a_part_too_narrow_for_its_number_has_it_behind_the_bar() -> None:
    figure = memory_bars([MemoryShares("vLLM", "here", 97.0, 0.0, 2.0, 1.0)])
    assert [trace.text for trace in bars(figure)] == [("97.0",), ("",), ("",)]
    assert figure.layout.annotations[0].text == "2.0 never used<br>1.0 external"
    assert tuple(figure.layout.annotations[0].y) == ("vLLM", "here")


def test_kinds_of_slots_differ_in_pattern_and_not_in_colour_alone() -> None:
    patterns = [trace.marker.pattern.shape for trace in bars(memory_bars(FIGURE_2))]
    assert len(set(patterns)) == len(patterns)
    strip = [trace.marker.pattern.shape for trace in bars(slot_strip(FIGURE_3, 2660, 512))]
    assert len(set(strip)) == len(strip)


def test_the_slots_of_figure_3_are_drawn_to_scale() -> None:
    figure = slot_strip(FIGURE_3, 2660, 2660)
    slots = {trace.name: sum(trace.x) for trace in bars(figure)}
    assert slots == {"token states": 12, "reserved": 3, "never used": 2545, "free": 100}
    hovers = [tuple(data) for trace in bars(figure) for data in trace.customdata]
    assert (10, 2047, 2038, ", request A") in hovers
    assert (2048, 2147, 100, "") in hovers


def test_a_segment_outside_the_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="slots 8 to 12 are not in a memory of 12 slots"):
        slot_strip([Segment(8, 5, "free")], 12, 4)


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 700))
def test_pieces_of_rows_cover_exactly_their_slots(start: int, length: int, row_length: int) -> None:
    slots = [row * row_length + column + i for row, column, part in cut(start, length, row_length) for i in range(part)]
    assert slots == list(range(start, start + length))
    assert all(part > 0 and column + part <= row_length for _, column, part in cut(start, length, row_length))


def test_joining_keeps_the_slots_and_the_kinds() -> None:
    single = [Segment(i, 1, "used" if i % 7 < 5 else "free", "A" if i % 7 < 5 else None) for i in range(100)]
    assert [kind for s in joined(reversed(single)) for kind in [s.kind] * s.length] == [s.kind for s in single]
    assert len(joined(single)) == 29  # 14 times 5 used and 2 free, then 2 used


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 99)), min_size=1, max_size=400), st.integers(1, 9))
def test_a_thinned_line_keeps_every_iteration_and_stays_short(stretches: list[tuple[int, int]], first: int) -> None:
    sizes = [size for length, size in stretches for _ in range(length)]
    starts = [first + sum(length for length, _ in stretches[:i]) for i in range(len(stretches) + 1)]
    points = thinned([*zip(starts, (float(size) for _, size in stretches), strict=False), (starts[-1], 0.0)])
    assert len(points) <= MAX_POINTS + 1
    assert points[-1] == (starts[-1], 0.0)
    for (start, mean), (stop, _) in pairwise(points):
        assert mean == pytest.approx(statistics.fmean(sizes[start - first : stop - first]))


def test_systems_over_time_differ_in_dash_and_marker_and_tell_their_mean() -> None:
    figure = batch_over_time([BatchLine(name, [(1, size), (9, 0)], size) for name, size in (("Max", 2), ("Pow2", 3), ("Oracle", 4), ("vLLM", 8.5))])
    lines = [trace for trace in figure.data if trace.mode == "lines"]
    marks = [trace for trace in figure.data if trace.mode == "markers"]
    assert [trace.name for trace in lines] == [
        "Max, mean 2.0", "Pow2, mean 3.0", "Oracle, mean 4.0", "vLLM, mean 8.5",
    ]  # fmt: skip
    assert len({trace.line.dash for trace in lines}) == len({trace.marker.symbol for trace in marks}) == 4


def test_without_a_measurement_the_lower_chart_says_so() -> None:
    waste = [WasteAtBlockSize(1, 0.0), WasteAtBlockSize(2, 0.5)]
    empty = block_size_sweep(waste, [])
    assert [a.text for a in empty.layout.annotations] == ["not measured yet"]
    assert empty.layout.yaxis2.showticklabels is False  # no number that nobody measured
    measured = block_size_sweep(waste, [CostAtBlockSize(1, 10, 2), CostAtBlockSize(2, 11, 3)], chosen=2)
    assert len(measured.layout.annotations) == 0
    assert measured.data[0].text == ("0.0", "<b>0.5</b>")
    assert [tuple(trace.y) for trace in measured.data[1:]] == [(10, 11), (2, 3)]


def test_savings_stand_beside_the_papers_and_unconfirmed_ones_are_marked() -> None:
    figure = sharing_saved(
        [Saving("parallel sampling", "4 outputs", 7.5, 5.0, 9.0, 8.0, 8.53, unconfirmed=True), Saving("beam search", "width 4", None, paper=53.13)]
    )
    by_name = {trace.name.split()[0]: trace for trace in figure.data}
    assert by_name["counted"].text == ("7.5", "")
    assert by_name["paper"].text == ("8.5?", "53.1")
    assert by_name["counted"].customdata[0] == "5.0 to 9.0 % from request to request"
    assert sharing_rows([Saving("beam search", "width 2", 5.0, 1.0, 7.0)])[0]["highest_percent"] == 7.0


def test_every_chart_has_its_data_as_rows_for_a_table() -> None:
    tables = (
        memory_bar_rows(FIGURE_2),
        slot_strip_rows(FIGURE_3),
        batch_rows([BatchLine("vLLM", [(1, 2), (3, 1), (5, 0)], 1.5)]),
        block_size_rows([WasteAtBlockSize(1, 0.0)], [CostAtBlockSize(1, 10, 2)]),
        sharing_rows([Saving("beam search", "width 4", 50.0, 40.0, 60.0, None, 53.13)]),
    )
    for rows in tables:
        out = io.StringIO()
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)  # raises if a row has other fields than the first
    assert memory_bar_rows(FIGURE_2)[1]["unconfirmed"] == "internal token_states"
    assert slot_strip_rows(FIGURE_3)[2] == {"first_slot": 10, "slots": 2038, "kind": "never used", "request": "A"}
