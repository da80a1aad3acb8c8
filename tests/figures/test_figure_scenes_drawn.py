"""What the figures draw: the computed numbers are in the figure's data, everything told by colour is told by a word or a pattern as well."""

from __future__ import annotations

import json
from typing import Any

import plotly.graph_objects as go
import pytest

from scenarios import load_figure
from scenarios.figures.reading import compute
from views.figures.batching import batching, batching_rows, doing, idle_places
from views.figures.canvas import Canvas, Fill
from views.figures.kv_bytes import kv_bytes, kv_bytes_rows, kv_formula
from views.figures.memory_layout import memory_layout_rows, memory_of_batch, memory_of_batch_rows, memory_split
from views.figures.memory_waste import memory_waste, memory_waste_rows
from views.figures.overview import overview, overview_rows
from views.figures.page_table import page_table, page_table_rows
from views.figures.reservation_strips import reservation_rows, reservation_strips


def data_of(scene: str, **changes: Any) -> dict[str, Any]:
    return dict(compute(load_figure(scene), changes).data)


def text_of(figure: go.Figure) -> str:
    return json.dumps(json.loads(figure.to_json()), ensure_ascii=False)


def words_of(figure: go.Figure) -> list[str]:
    return [a.text for a in figure.layout.annotations]


def areas_of(figure: go.Figure) -> dict[str, list[tuple[float, float, float]]]:
    """Kind -> (left, top, width) of its rectangles: five corners and a gap each."""
    return {
        trace.name: [(trace.x[i], trace.y[i], trace.x[i + 1] - trace.x[i]) for i in range(0, len(trace.x), 6)]
        for trace in figure.data
        if trace.fill == "toself"
    }


def test_figure_1_draws_the_papers_26_gb_beside_ours() -> None:
    data = data_of("figure-1")
    drawn = text_of(memory_split(data))
    assert "25.7 GB, 64.3 %" in drawn
    assert "26 GB, 65 %" in drawn
    assert "more than 30 %" in drawn
    batch = memory_of_batch(data)
    ends = {trace.name: (trace.x[-1], round(trace.y[-1], 2)) for trace in batch.data}
    # 7 x 1.68 GB; the line of blocks ends just below the card's 12.3 GB
    assert ends["reserving 2,048 tokens"] == (7, 11.74)
    fit, size = ends["in blocks of 16"]
    assert fit > 4 * 7
    assert 11.9 < size <= data["values"]["kv_cache_gb"]
    assert {trace.line.dash for trace in batch.data} == {"dash", "solid"}
    assert [row["source"] for row in memory_layout_rows(data)].count("paper, Figure 1") == 2
    assert memory_of_batch_rows(data)[7]["reserved_GB"] == 11.7441
    assert memory_of_batch_rows(data)[8]["reserved_GB"] == ""


def test_figure_2_draws_the_papers_numbers_and_marks_the_unconfirmed_ones() -> None:
    drawn = text_of(memory_waste(data_of("figure-2")))
    for number in ("20.4", "13.3?", "57.3", "8.9?", "26.8?", "17.9", "13.6?", "41.6", "38.2", "25.2", "36.6", "96.3"):
        assert f'"{number}"' in drawn, number
    rows = memory_waste_rows(data_of("figure-2"))
    assert [row["source"] for row in rows] == ["here", "paper"] * 4
    assert [row["unconfirmed"] for row in rows if row["unconfirmed"]] == ["external reservation", "internal token_states"]


def test_figure_3_is_to_scale_and_gives_eos_no_label() -> None:
    data = data_of("figure-3")
    figure = reservation_strips(data)
    strip = {name: [(x, wide) for x, y, wide in found if y == 3.5] for name, found in areas_of(figure).items()}
    (_, never_a), (_, never_b) = strip["internal (never used)"]
    assert never_a / never_b == pytest.approx(2038 / 507)
    (_, used_a), (_, used_b) = strip["token states"]
    assert [used_a / never_a, used_b / never_b] == pytest.approx([8 / 2038, 4 / 507])
    words = words_of(figure)
    assert words.count("&lt;eos&gt;") == 2
    assert any("<b>7</b> prompt  +  <b>1</b> generated now  +  <b>2</b> used later  +  <b>2,038</b> never used  =  2,048 slots" in w for w in words)
    assert any("<b>3</b> prompt  +  <b>1</b> generated now  +  <b>1</b> used later  +  <b>507</b> never used  =  512 slots" in w for w in words)
    eos = [(a.x, a.y) for a in figure.layout.annotations if a.text == "&lt;eos&gt;"]
    for found in areas_of(figure).values():
        assert not any(x < eos_x < x + wide and abs(y + 2.6 - eos_y) < 1 for x, y, wide in found for eos_x, eos_y in eos)
    assert sum(int(str(row["slots"])) for row in reservation_rows(data) if row["layout"] == "contiguous") == 2048 + 512 + 512


def test_every_kind_of_slot_has_a_pattern_or_is_the_only_plain_one() -> None:
    for figure in (reservation_strips(data_of("figure-3")), batching(data_of("iteration-level-batching"), 3)):
        looks = {trace.name: trace.fillpattern.shape for trace in figure.data if trace.showlegend}
        assert len(looks) == 4
        assert len(set(looks.values())) == 4, "told by colour alone"


def test_figure_4_links_the_names_that_have_a_scene() -> None:
    data = data_of("figure-4")
    figure = overview(data, {"Scheduler": "?scene=figure-7&step=26"})
    words = words_of(figure)
    assert any(w.startswith('<a href="?scene=figure-7&step=26" target="_self"><b>Scheduler</b>') for w in words)
    assert sum("<a href" in w for w in words) == 1
    assert len(overview_rows(data)) == len(data["boxes"]) + 3
    assert all(any(box["name"] in w for w in words) for box in data["boxes"])


@pytest.mark.parametrize("position", [0, 4, 8])
def test_page_table_marks_the_same_place_on_both_sides(position: int) -> None:
    data = data_of("page-table", position=position)
    words = words_of(page_table(data))
    block, offset = divmod(position, 4)
    physical, frame = (7, 1, 3)[block], (2, 5, 0)[block]
    assert f"<b>slot {physical} × 4 + {offset} = {physical * 4 + offset}</b>" in words
    assert f"<b>address {frame} × 4,096 + {offset * 1024:,} = {frame * 4096 + offset * 1024:,}</b>" in words
    assert [row["slot"] for row in page_table_rows(data)] == [28, 29, 30, 31, 4, 5, 6, 7, 12]


def test_a_page_fault_is_drawn_as_one() -> None:
    assert "<b>page fault</b>" in words_of(page_table(data_of("page-table", page_table=[2, None, 0])))


def test_kv_bytes_writes_the_product_out() -> None:
    shapes = data_of("kv-bytes")["shapes"]
    words = words_of(kv_formula(shapes[0], 2048))
    for part in ("<b>2</b>", "<b>5,120</b>", "<b>40</b>", "<b>819,200 bytes</b>", "<b>1.68 GB</b>"):
        assert part in words
    assert "<b>47.2 MB</b>" in words_of(kv_formula(shapes[4], 2048))  # 23,040 bytes x 2,048
    assert list(kv_bytes(shapes).data[0].x)[:2] == [819_200, 2_359_296]
    assert kv_bytes_rows(shapes)[0]["bytes_per_request"] == 1_677_721_600


def test_batching_tells_who_is_at_what() -> None:
    data = data_of("iteration-level-batching")
    assert doing(data, "request", 3) == {"decode": ["R1", "R3"], "padding": ["R2"], "waits": ["R4", "R5"]}
    assert doing(data, "iteration", 3) == {"decode": ["R1", "R3"], "prompt": ["R4"], "waits": ["R5"]}
    # by hand: 14 place-iterations stand idle in whole batches; by iteration 5, all of them after the last request has started
    assert sum(idle_places(data, "request", t) for t in range(14)) == 14
    assert [idle_places(data, "iteration", t) for t in range(11)] == [0] * 8 + [1, 2, 2]
    rows = batching_rows(data)
    assert sum(int(str(row["iterations"])) for row in rows if row["policy"] == "request" and row["what"] == "padding") == 14
    drawn = text_of(batching(data, 3))
    assert "answers (▸) after 9.8 on average" in drawn
    assert "answers (▸) after 6.0 on average" in drawn


def test_a_canvas_puts_its_parts_where_they_were_asked_for() -> None:
    canvas = Canvas(10, 5, 100)
    canvas.box(1, 1, 2, 2, text="a", hover="about a")
    canvas.area(4, 1, 2, 2, Fill("kind", "#0072b2", "/"))
    canvas.area(7, 1, 2, 2, Fill("kind", "#0072b2", "/"))
    canvas.bent_arrow([(0, 0), (0, 4), (5, 4)])
    figure = canvas.figure()
    assert (figure.layout.shapes[0].x0, figure.layout.shapes[0].x1, figure.layout.yaxis.range) == (1, 3, (5, 0))
    assert [(trace.name, len(trace.x)) for trace in figure.data] == [("kind", 12), (None, 1)]
    assert [(a.text, a.x, a.y) for a in figure.layout.annotations] == [("a", 2, 2), ("", 5, 4)]
