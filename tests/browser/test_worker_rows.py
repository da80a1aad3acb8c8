"""The worker's rows beside the manager's tables (rules R8.2, R8.3): what stands in the panel is what is in the trace, column by column."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Page, expect

from engine.session import GroupConfig, SessionConfig
from engine.trace.frame import Frame, Trace
from tests.browser.saved_page import save
from tests.browser.stage_page import open_scene
from tests.unit.views.paper_runs import figure_5
from tests.unit.views.sample_traces import copy_run, state_run, window_run
from tests.unit.views.test_worker_rows import case_a20, case_a21, frames_of, ran, request

pytestmark = pytest.mark.browser
NewPage = Callable[..., Page]

LINES = """stage => [...stage.querySelectorAll('.rows-request')].map((card) => [card.dataset.request, [...card.querySelectorAll('.rows-group')].map((group) => {
  const read = (name) => [...group.querySelectorAll(`.rows-line.${name} > .row-cell`)].map((cell) => {
    if (cell.classList.contains('cut')) return '…';
    const id = cell.querySelector('b');
    return id === null ? null : id.textContent === '∅' ? 0 : Number(id.textContent);
  });
  return [read('manager'), read('worker')];
})])"""


def opened(new_page: NewPage, trace: Trace, folder: Path, width: int = 1280, height: int = 720) -> Page:
    page = new_page(width, height)
    page.goto(save(trace, folder))
    return page


def at(page: Page, seq: int) -> None:
    page.goto(f"{page.url.partition('?')[0]}?step={seq}")
    page.keyboard.press("w")


def shown(page: Page) -> list[tuple[str, list[tuple[list[int], list[int]]]]]:
    """Per request and group the manager's line and the worker's, without the empty places that fill the shorter one up."""
    lines = page.locator(".stage").evaluate(LINES)
    return [(name, [([i for i in manager if i is not None], [i for i in worker if i is not None]) for manager, worker in groups]) for name, groups in lines]


def due(frame: Frame) -> list[tuple[str, list[tuple[list[int], list[int]]]]]:
    """The same by the trace: rows in their order, then tables without a row; behind a row's end what was left there."""
    seated = []
    for row in frame.rows:
        request_state = frame.request(row.request_id)
        assert request_state is not None
        tails = row.stale_block_ids or ((),) * len(row.block_ids)
        seated.append((row.request_id, [([*t], [*r, *s]) for t, r, s in zip(request_state.block_ids, row.block_ids, tails, strict=True)]))
    names = {name for name, _ in seated}
    waiting = [(r.request_id, [([*t], list[int]()) for t in r.block_ids]) for r in frame.requests if r.request_id not in names and any(r.block_ids)]
    return seated + waiting


@pytest.mark.parametrize("run", [case_a20, case_a21, window_run, state_run, copy_run])
def test_every_frame_shows_the_tables_and_rows_of_the_trace(new_page: NewPage, tmp_path: Path, run: Callable[[], Trace]) -> None:
    trace = run()
    page = opened(new_page, trace, tmp_path)
    page.keyboard.press("w")
    for frame in trace.frames:
        assert shown(page) == due(frame), f"frame {frame.seq}"
        page.keyboard.press("ArrowRight")


def test_a20_what_differs_has_a_sign_and_a_sentence(new_page: NewPage, tmp_path: Path) -> None:
    trace = case_a20()
    frame = next(f for f in trace.frames if f.op == "execute_model" and (b := f.request("B")) is not None and 2 in b.block_ids[0])
    page = opened(new_page, trace, tmp_path)
    at(page, frame.seq)
    card = page.locator('.rows-request[data-request="A"]')
    differing = card.locator(".rows-line.worker .row-cell.given_up")
    assert differing.locator("b").all_inner_texts() == ["1", "2"]
    assert differing.locator(".sign").all_inner_texts() == ["≠", "≠"]
    assert differing.locator(".whose").all_inner_texts() == ["B"]  # block 2 is B's by now
    assert differing.evaluate_all("cells => cells.map(c => getComputedStyle(c).borderTopStyle)") == ["dashed", "dashed"]
    expect(card.locator(".row-note.given_up")).to_contain_text("The manager gave places 0 and 1 up (null)")
    expect(card.locator(".row-note.given_up")).to_contain_text("block 2 belongs to B now")
    columns = [card.locator(f'.rows-line.{line} .row-cell[data-column="1"]').bounding_box() for line in ("manager", "worker")]
    assert columns[0] is not None
    assert columns[1] is not None
    assert columns[0]["x"] == columns[1]["x"]
    expect(page.locator(".rows-button")).to_have_text("back")
    page.locator(".rows-button").click()
    expect(page.locator(".rows-button")).to_have_text("worker's rows ≠ 2")
    expect(page.locator(".rows-body")).to_be_hidden()


def test_a21_the_end_of_a_row_is_a_bar_and_the_tail_dotted(new_page: NewPage, tmp_path: Path) -> None:
    trace = case_a21()
    frame = next(f for f in frames_of(trace, "row_updated") if f.event.cause.facts.get("from_row") == 1)
    page = opened(new_page, trace, tmp_path)
    at(page, frame.seq)
    tail = page.locator('.rows-request[data-request="B"] .row-cell.tail')
    assert tail.locator("b").all_inner_texts() == ["4", "5", "6"]
    assert tail.evaluate_all("cells => cells.map(c => getComputedStyle(c).borderTopStyle)") == ["dotted"] * 3
    assert tail.evaluate_all("cells => cells.map(c => c.classList.contains('end'))") == [True, False, False]
    expect(page.locator(".row-note.tail")).to_contain_text("left by A when it sat in row 0")


def test_a_new_block_and_a_row_without_a_request_are_told(new_page: NewPage, tmp_path: Path) -> None:
    trace = case_a21()
    page = opened(new_page, trace, tmp_path)
    planned = next(f for f in frames_of(trace, "step_scheduled") if f.step == 4)
    at(page, planned.seq)
    expect(page.locator('.rows-request[data-request="B"] .row-note.not_told')).to_contain_text("New in the manager's table: block 10.")
    expect(page.locator('.rows-request[data-request="C"] header')).to_contain_text("no row yet")
    at(page, frames_of(trace, "blocks_freed")[0].seq)
    expect(page.locator('.rows-request[data-request="A"] .row-note.left')).to_contain_text("A is finished and has no blocks any more.")


def test_a_block_lights_up_in_the_panel_and_in_the_pool(new_page: NewPage, tmp_path: Path) -> None:
    trace = window_run()
    page = opened(new_page, trace, tmp_path)
    at(page, frames_of(trace, "token_sampled")[1].seq)
    page.locator(".row-cell.given_up", has_text="5").hover()
    expect(page.locator('.cell[data-block="5"].lit')).to_have_count(1)


def test_long_rows_are_cut_in_the_middle_and_stay_aligned(new_page: NewPage, tmp_path: Path) -> None:
    """A window of 8 over 160 tokens: 38 places are null, of which five are shown."""
    trace = ran(SessionConfig(64, 4, kv_cache_groups=(GroupConfig("sliding_window", sliding_window=8),), max_num_batched_tokens=256), request("A", 160, 2))
    page = opened(new_page, trace, tmp_path)
    at(page, frames_of(trace, "kv_written")[1].seq)
    ((_, [(manager, worker)]),) = page.locator(".stage").evaluate(LINES)
    assert manager == [0, 0, 0, "…", 0, 0, 39, 40, 41]
    assert worker == [1, 2, 3, "…", 37, 38, 39, 40, 41]
    assert page.locator(".rows-number").all_inner_texts() == ["0", "1", "2", "", "36", "37", "38", "39", "40"]


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (1024, 768)])
def test_opening_it_moves_nothing_and_hides_nothing_else(new_page: NewPage, tmp_path: Path, width: int, height: int) -> None:
    trace = window_run()
    page = opened(new_page, trace, tmp_path, width, height)
    page.keyboard.press("End")
    parts = ["bar", "card.requests", "pool", "happened", "chains", "queue"]
    boxes = f"stage => JSON.stringify({parts}.map((p) => stage.querySelector('.' + p).getBoundingClientRect()))"
    before = page.locator(".stage").evaluate(boxes)
    page.keyboard.press("w")
    assert page.locator(".stage").evaluate(boxes) == before
    expect(page.locator(".rows-body")).to_be_visible()
    expect(page.locator(".request").first).to_be_hidden()
    outside = """stage => {
      const edge = stage.querySelector('.card.requests').getBoundingClientRect().right - 4;
      return [...stage.querySelectorAll('.row-cell, .row-note, .rows-request header > *')].filter((e) => e.getBoundingClientRect().right > edge).length;
    }"""
    assert page.locator(".stage").evaluate(outside) == 0
    page.keyboard.press("w")
    expect(page.locator(".request").first).to_be_visible()


def test_a_scene_may_begin_with_the_rows_open_and_the_papers_engine_has_no_button(new_page: NewPage, tmp_path: Path) -> None:
    trace = case_a21()
    opens = Trace(msgspec.structs.replace(trace.header, scenario={**trace.header.scenario, "opens": "worker_rows"}), trace.frames, True)
    page = opened(new_page, opens, tmp_path)
    expect(page.locator(".rows-body")).to_be_visible()
    paper = opened(new_page, figure_5(), tmp_path)
    expect(paper.locator(".rows-button")).to_be_hidden()
    paper.keyboard.press("w")
    expect(paper.locator(".rows-body")).to_be_hidden()


def test_a_live_scene_tells_what_the_kernel_read_and_links_to_its_kernels(app_address: str, new_page: NewPage) -> None:
    """Case A20 with real windows: in layer 0 the programs of A read 3, 4 and 13 of the row 1, 2, 3, 4, 13, as in the witness of the step."""
    page = new_page()
    open_scene(page, app_address, "scene=stale-row&step=65&layers=0")
    card = page.locator('.rows-request[data-request="A"] .rows-group').first
    expect(card.locator(".row-note.read")).to_contain_text("seen to read blocks 3, 4 and 13 for A (layer 0): nothing of what differs")
    marks = card.locator(".row-read")
    assert [mark.strip() for mark in marks.all_inner_texts()] == ["", "", "▲", "▲", "▲"]
    expect(page.locator("a.kernels")).to_have_attribute("href", "?screen=kernels&scene=stale-row&step=65&layers=0")
    expect(page.locator("a.rows-link")).to_have_attribute("href", "?screen=kernels&scene=stale-row&step=65&layers=0")
    page.keyboard.press("ArrowRight")
    expect(page.locator("a.kernels")).to_have_attribute("href", "?screen=kernels&scene=stale-row&step=66&layers=0")


def test_a_run_without_a_model_has_no_kernels_to_show(app_address: str, new_page: NewPage) -> None:
    page = new_page()
    open_scene(page, app_address, "scene=sliding-window")
    expect(page.locator("a.kernels")).to_be_hidden()
    expect(page.locator("a.rows-link")).to_be_hidden()
