"""Several KV-cache groups on the stage: lanes, null places, states, copies, lookups, ranks (rules R3.2, R3.20, R3.43, R6.3 to R6.7, R8.3, R8.4)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from engine.core.output import SamplingParams
from engine.session import ActionSpec, GroupConfig, RequestSpec, Session, SessionConfig
from engine.trace.frame import Trace
from tests.browser.saved_page import go_to, save
from tests.unit.views.handmade import figure_6
from tests.unit.views.sample_traces import copy_run, state_run, window_run

pytestmark = pytest.mark.browser
NewPage = Callable[..., Page]


def opened(new_page: NewPage, trace: Trace, folder: Path, width: int = 1280, height: int = 720) -> Page:
    page = new_page(width, height)
    page.goto(save(trace, folder))
    return page


def lane(page: Page, group: int) -> list[str]:
    """The words in a lane's places, from the first logical block on."""
    return [" ".join(text.split()) for text in page.locator(f'.place[data-group="{group}"]').all_inner_texts()]


def ran(config: SessionConfig, *requests: RequestSpec, actions: tuple[ActionSpec, ...] = ()) -> Trace:
    return Session(config, requests, actions, model_name="none", vocabulary=lambda token_id: f"w{token_id}").run_to_end()


def request(name: str, num_tokens: int, step: int = 1, num_outputs: int = 3) -> RequestSpec:
    return RequestSpec(name, tuple(range(num_tokens)), SamplingParams(max_tokens=num_outputs, forced_token_ids=tuple(range(90, 90 + num_outputs))), step)


def test_each_group_has_a_lane_and_null_places_stand_where_blocks_were(new_page: NewPage, tmp_path: Path) -> None:
    trace = window_run()
    page = opened(new_page, trace, tmp_path)
    go_to(page, "blocks_skipped", trace)
    assert page.locator(".lane-title.lane").all_inner_texts() == ["full", "window 8"]
    assert lane(page, 0) == ["1 #", "2 #", "3 #", "4 #", ""]
    assert lane(page, 1) == ["∅ null", "∅ null", "7 #", "8 #", ""]
    assert page.locator(".place.null").evaluate_all("places => places.map(p => getComputedStyle(p).borderTopStyle)") == ["dashed", "dashed"]
    assert page.locator(".queue svg").get_attribute("aria-label") == "Free queue from head to tail: " + ", ".join(str(b) for b in [*range(9, 24), 6, 5]) + "."
    expect(page.locator(".story")).to_contain_text("hashed: put at the tail")


def test_a_place_stands_beside_the_tokens_of_its_block(new_page: NewPage, tmp_path: Path) -> None:
    """A block of 8 tokens is as high as the two lines of 4 fields beside it, in every group."""
    trace = copy_run()
    page = opened(new_page, trace, tmp_path)
    go_to(page, "token_sampled", trace)
    heights = page.locator(".place.held").evaluate_all("places => places.map(p => Math.round(p.getBoundingClientRect().height))")
    words = page.locator(".lane-words").evaluate_all("rows => rows.map(r => Math.round(r.getBoundingClientRect().height))")
    assert len(set(heights)) == 1
    assert all(abs(heights[0] - height) <= 2 for height in words)


def test_the_workers_row_keeps_what_the_manager_has_given_up(new_page: NewPage, tmp_path: Path) -> None:
    """R8.3: the row still says 5 and 6, of which the window group's table knows nothing any more."""
    trace = window_run()
    page = opened(new_page, trace, tmp_path)
    go_to(page, "token_sampled", trace, 1)
    row = page.locator('.worker-ids[data-group="1"] .worker-id')
    assert row.all_inner_texts() == ["5", "6", "7", "8", "10"]
    assert page.locator(".worker-id.stale").all_inner_texts() == ["5", "6"]


def test_a_lookup_shows_what_it_would_adopt_and_where_it_stopped(new_page: NewPage, tmp_path: Path) -> None:
    trace = window_run()
    page = opened(new_page, trace, tmp_path)
    go_to(page, "prefix_lookup", trace)
    assert lane(page, 0) == ["1", "2", "3", ""]
    assert lane(page, 1) == ["∅ null", "6", "7", "8"]
    assert page.locator(".place.ghost").count() == 6
    expect(page.locator(".place.stopped")).to_have_attribute("title", re.compile("no hit can end behind it"))
    expect(page.locator(".lookup")).to_contain_text("full: 12 – one token must be computed")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".lookup")).to_have_count(0)
    assert lane(page, 0) == ["1 #", "2 #", "3 #", ""]


def test_a_copy_is_an_arrow_until_it_is_done(new_page: NewPage, tmp_path: Path) -> None:
    trace = copy_run()
    page = opened(new_page, trace, tmp_path)
    arrows = page.locator(".copy[data-from]")
    first = go_to(page, "copy_queued", trace)
    expect(arrows).to_have_count(1)
    assert (arrows.get_attribute("data-from"), arrows.get_attribute("data-to")) == ("4", "5")
    expect(page.locator('.cell[data-block="4"]')).to_have_class(re.compile("pinned"))
    expect(page.locator('.cell[data-block="5"] > title')).to_contain_text("held for a copy")
    done = go_to(page, "blocks_copied", trace)
    assert done > first + 1
    expect(page.locator(".copy.done[data-from]")).to_have_count(1)
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".copy.queued[data-from]")).to_have_count(1)  # let go already, but not copied yet (R6.6)
    expect(page.locator(".pinned")).to_have_count(0)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(arrows).to_have_count(0)
    go_to(page, "copy_queued", trace, 2)
    pairs = arrows.evaluate_all("all => all.map(a => [a.dataset.from, a.dataset.to])")
    assert pairs == [["3", "6"], ["5", "7"]]


def test_the_arrow_of_a_copy_crosses_no_words(new_page: NewPage, tmp_path: Path) -> None:
    """Between source and destination it runs in the gaps between the cells."""
    trace = copy_run()
    page = opened(new_page, trace, tmp_path)
    go_to(page, "copy_queued", trace, 2)
    script = """stage => {
      const cells = [...stage.querySelectorAll('.cell')].map((c) => [c.dataset.block, c.querySelector('.box').getBoundingClientRect()]);
      const crossed = [];
      for (const copy of stage.querySelectorAll('.copy[data-from]')) {
        const path = copy.querySelector('path');
        const at = path.getScreenCTM();
        for (let l = 0; l < path.getTotalLength(); l += 1) {
          const p = path.getPointAtLength(l).matrixTransform(at);
          for (const [id, box] of cells) {
            const inside = p.x > box.left + 2 && p.x < box.right - 2 && p.y > box.top + 2 && p.y < box.bottom - 2;
            if (inside && id !== copy.dataset.from && id !== copy.dataset.to) crossed.push(id);
          }
        }
      }
      return [...new Set(crossed)];
    }"""
    assert page.locator(".stage").evaluate(script) == []


def test_states_are_one_box_with_the_number_of_tokens(new_page: NewPage, tmp_path: Path) -> None:
    trace = state_run()
    page = opened(new_page, trace, tmp_path)
    page.keyboard.press("End")
    expect(page.locator('.cell[data-block="2"] .state-text').first).to_have_text("state")
    assert " ".join(page.locator('.cell[data-block="2"] .state-text').all_text_contents()) == "state after 11"
    assert page.locator('.cell[data-block="2"] .slot').count() == 0
    rows = page.locator(".table .row:not(.titles)")
    assert [" ".join(text.split()) for text in rows.all_inner_texts()] == [
        "0 ⟶ ∅ null nothing is kept here", "1 ⟶ ∅ null nothing is kept here", "2 ⟶ 2 state after 11 tokens",
    ]  # fmt: skip
    expect(page.locator(".formula")).to_contain_text("no slots")


def test_a_state_that_moves_on_is_an_arrow_from_the_block_that_was_read(new_page: NewPage, tmp_path: Path) -> None:
    """R3.43: nothing is read for the first state; two tokens later the state is in the next block; then it is written over in place."""
    trace = state_run()
    page = opened(new_page, trace, tmp_path)
    arrows, flags = page.locator(".copy.state[data-from]"), page.locator(".copy.state.read")
    go_to(page, "state_written", trace)
    expect(page.locator('.cell[data-block="1"]')).to_have_class(re.compile("now"))
    assert (arrows.count(), flags.count()) == (0, 0)
    go_to(page, "state_written", trace, 1)
    assert (arrows.get_attribute("data-from"), arrows.get_attribute("data-to")) == ("1", "2")
    expect(page.locator(".copy.state.label:not(.read) text")).to_have_text("+2 tokens")
    expect(flags.locator("text")).to_have_text("read")
    go_to(page, "state_written", trace, 2)
    expect(arrows).to_have_count(0)
    expect(flags.locator("text")).to_have_text("read, then +1")


def test_the_flag_of_a_state_stands_in_no_label(new_page: NewPage, tmp_path: Path) -> None:
    trace = state_run()
    page = opened(new_page, trace, tmp_path)
    go_to(page, "state_written", trace, 1)
    flag, label = page.locator(".copy.state.read rect").bounding_box(), page.locator(".copy.state.label:not(.read) rect").bounding_box()
    assert flag is not None
    assert label is not None
    apart = flag["x"] + flag["width"] <= label["x"] or label["x"] + label["width"] <= flag["x"]
    assert apart or flag["y"] + flag["height"] <= label["y"] or label["y"] + label["height"] <= flag["y"]


def test_a_hash_that_ends_inside_a_block_is_drawn_under_what_it_covers(new_page: NewPage, tmp_path: Path) -> None:
    """R6.3, with the blocks of the recorded run T20: A@12 covers 4 of the 8 slots of block 3."""
    trace = copy_run()
    page = opened(new_page, trace, tmp_path)
    go_to(page, "token_sampled", trace)
    block = page.locator('.cell[data-block="3"]')
    expect(block.locator(".hash")).to_have_text("#4/8")
    assert (block.locator(".cover").get_attribute("d") or "").count("M") == 4
    assert "4 of its 8" in (block.locator("> title").text_content() or "")
    expect(page.locator('.place[data-block="3"] .hash')).to_have_text("#4/8")


def test_one_hash_of_a_chain_names_its_blocks_in_every_group(new_page: NewPage, tmp_path: Path) -> None:
    page = opened(new_page, window_run(), tmp_path)
    page.keyboard.press("End")
    nodes = page.locator(".chain-node")
    assert nodes.locator(".where").all_text_contents() == [f"full: {n} · window 8: {n + 4}" for n in range(1, 5)]
    page.locator('.cell[data-block="7"]').hover()
    expect(nodes.nth(2)).to_have_class(re.compile("lit"))
    expect(page.locator(".chain-node.lit")).to_have_count(1)


def test_a_chain_with_a_hole_is_dashed_and_a_state_needs_nothing_before_it(new_page: NewPage, tmp_path: Path) -> None:
    drop = ActionSpec(at_step=2, kind="evict_blocks", block_ids=(2,))
    page = opened(new_page, ran(SessionConfig(8, 4), request("A", 13), actions=(drop,)), tmp_path)
    page.keyboard.press("End")
    assert [w.split()[-1] for w in page.locator(".chain-node .where").all_text_contents()] == ["1", "3"]
    assert page.locator(".chain-link").evaluate_all("all => all.map(l => l.classList.contains('lost'))") == [False, True]
    expect(page.locator(".chain-node > title").last).to_have_text(re.compile("what is between is not cached"))
    states = opened(new_page, state_run(), tmp_path)
    states.keyboard.press("End")
    assert states.locator(".chain-link").evaluate_all("all => all.map(l => l.classList.contains('lost'))") == [False]


def test_small_cells_tell_what_they_hold_to_mouse_and_keyboard(new_page: NewPage, tmp_path: Path) -> None:
    page = opened(new_page, ran(SessionConfig(97, 4), request("A", 6)), tmp_path)
    go_to(page, "token_sampled", ran(SessionConfig(97, 4), request("A", 6)))
    assert page.locator(".cell.squares").count() == 97
    assert page.locator(".cell.squares .slot text").count() == 0
    page.locator('.cell[data-block="1"]').hover()
    expect(page.locator(".told")).to_contain_text("block 1: ref 1 (A)")
    expect(page.locator(".told")).to_contain_text("w0 w1 w2 w3 · hash")
    page.locator('.cell[data-block="2"]').focus()
    expect(page.locator(".told")).to_contain_text("block 2: ref 1 (A) · w4 w5")


def test_a_pool_shows_all_its_blocks_at_once_where_it_can(new_page: NewPage, tmp_path: Path) -> None:
    for num_blocks in (9, 16, 24, 40, 60):
        page = opened(new_page, ran(SessionConfig(num_blocks, 4), request("A", 6)), tmp_path)
        body = page.locator(".card.pool > .body")
        assert body.evaluate("b => b.scrollHeight <= b.clientHeight + 8"), num_blocks


def test_on_a_narrow_screen_words_in_slots_stay_whole(new_page: NewPage, tmp_path: Path) -> None:
    page = opened(new_page, figure_6(), tmp_path, 1024, 768)
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    words = page.locator(".slot.filled text").all_text_contents()
    assert sorted(words) == sorted(["Four", "score", "and", "seven", "years", "ago", "our", "fathers", "brought"])


def test_all_slots_of_a_long_batch_can_be_reached(new_page: NewPage, tmp_path: Path) -> None:
    trace = ran(SessionConfig(40, 4, max_num_batched_tokens=128), request("A", 100))
    page = opened(new_page, trace, tmp_path)
    go_to(page, "slots_mapped", trace)
    expect(page.locator(".slot-chip")).to_have_count(100)
    page.locator(".slot-chip").last.scroll_into_view_if_needed()
    panel, chip = page.locator(".card.happened").bounding_box(), page.locator(".slot-chip").last.bounding_box()
    assert panel is not None
    assert chip is not None
    assert chip["y"] + chip["height"] <= panel["y"] + panel["height"]


def test_tokens_of_another_rank_have_no_slot_here(new_page: NewPage, tmp_path: Path) -> None:
    """R8.4 with two ranks: positions 0, 2, 4, … belong to rank 0."""
    trace = ran(SessionConfig(9, 4, decode_context_parallel_size=2), request("A", 8))
    page = opened(new_page, trace, tmp_path)
    go_to(page, "kv_written", trace)
    assert page.locator(".token.elsewhere").all_inner_texts() == ["w1", "w3", "w5", "w7"]
    page.locator(".slots").evaluate("s => s.scrollTop = 0")
    assert [int(t.replace("−", "-")) for t in page.locator(".slot-chip b").all_inner_texts()[:8]] == [4, -1, 5, -1, 6, -1, 7, -1]


def test_groups_leave_every_panel_where_it_is(new_page: NewPage, tmp_path: Path) -> None:
    groups = (GroupConfig("full"), GroupConfig("sliding_window", sliding_window=8), GroupConfig("sliding_window", sliding_window=16))
    trace = ran(SessionConfig(60, 4, kv_cache_groups=groups), request("A", 33), request("B", 30, 3))
    page = opened(new_page, trace, tmp_path)
    script = """async (stage, frames) => {
      const boxes = new Set();
      for (let i = 0; i < frames; i += 1) {
        boxes.add(JSON.stringify(['.bar', '.requests', '.pool', '.happened', '.chains', '.queue'].map((p) => stage.querySelector(p).getBoundingClientRect())));
        document.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight', bubbles: true }));
        await new Promise(requestAnimationFrame);
      }
      return boxes.size;
    }"""
    assert page.locator(".stage").evaluate(script, len(trace.frames)) == 1


def test_a_window_that_is_not_the_models_own_is_a_chip(new_page: NewPage, tmp_path: Path) -> None:
    trace = window_run()
    trace.header.config["sliding_window"] = 8
    trace.header.model.update(name="tiny-swa", sliding_window=16)
    page = opened(new_page, trace, tmp_path)
    chip = page.locator(".chip", has_text="window 8, not 16: the text may suffer")
    expect(chip).to_be_visible()
    assert chip.get_attribute("title") == (
        "window 8, not 16: the text may suffer\n"
        "tiny-swa was trained with a window of 16 tokens. This run gives it one of 8, so that other blocks fall out, and its text may suffer"
    )
