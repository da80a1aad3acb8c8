"""The paper's engine on the stage: shared blocks and their copies (Figure 8), beams (Figure 9), a kept prefix (Figure 10), attention per block (Figure 5),
swapping (section 4.5), and what the author says beside it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from engine.trace.frame import Trace
from tests.browser.saved_page import go_to, save
from tests.browser.stage_page import free_queue, open_scene, wait_for_all_frames
from tests.unit.views.handmade import figure_6
from tests.unit.views.paper_runs import beams, figure_5, figure_8, shared_prefix, swapped

pytestmark = pytest.mark.browser
NewPage = Callable[..., Page]


def opened(new_page: NewPage, trace: Trace, folder: Path, width: int = 1280, height: int = 720, **options: object) -> Page:
    page = new_page(width, height, **options)
    page.goto(save(trace, folder))
    return page


def table(page: Page, sequence: str) -> list[str]:
    """Physical blocks of a sequence whose words stand in rows."""
    card = page.locator(".request", has=page.locator(f'.chip-letter[title="{sequence}"]'))
    return card.locator(".line .physical").all_inner_texts()


def test_block_0_is_a_block_and_nothing_is_hashed(new_page: NewPage, tmp_path: Path) -> None:
    page = opened(new_page, shared_prefix(), tmp_path)
    page.keyboard.press("End")
    expect(page.locator(".cell.null")).to_have_count(0)
    expect(page.locator('.cell[data-block="0"] .letter')).to_have_text("P")
    assert "hash" not in page.locator(".stage").inner_text().lower()
    expect(page.locator(".card.chains")).to_be_hidden()
    expect(page.locator(".chip.engine")).to_have_text("paper, 2023")
    assert free_queue(page)[0] != 0


def test_figure_8_shows_two_references_until_the_first_writer_copies(new_page: NewPage, tmp_path: Path) -> None:
    trace = figure_8()
    page = opened(new_page, trace, tmp_path)
    assert 0 in free_queue(page)
    go_to(page, "sequence_forked", trace)
    assert (table(page, "A1"), table(page, "A2")) == (["7", "1"], ["7", "1"])
    expect(page.locator('.cell[data-block="1"] .state')).to_have_text("ref 1 → 2")
    assert page.locator(".line .refs").all_inner_texts() == ["×2", "×2", "×2", "×2"]
    expect(page.locator(".group-box > header")).to_contain_text("2 blocks instead of 4")
    go_to(page, "copy_queued", trace)
    assert (table(page, "A1"), table(page, "A2")) == (["7", "3"], ["7", "1"])
    expect(page.locator('.cell[data-block="1"] .state')).to_have_text("ref 2 → 1")
    arrow = page.locator(".copy[data-from]")
    assert (arrow.get_attribute("data-from"), arrow.get_attribute("data-to")) == ("1", "3")
    go_to(page, "token_sampled", trace, 2)
    expect(page.locator('.cell[data-block="1"] .state')).to_have_text("ref 1")
    expect(page.locator('.cell[data-block="7"] .state')).to_have_text("ref 2")


def test_a_shared_block_lights_up_in_every_sequence(new_page: NewPage, tmp_path: Path) -> None:
    trace = figure_8()
    page = opened(new_page, trace, tmp_path)
    go_to(page, "sequence_forked", trace)
    page.locator('.cell[data-block="7"]').hover()
    expect(page.locator('.line.lit[data-block="7"]')).to_have_count(2)


def test_beams_fit_their_panel_and_dropped_ones_shrink_to_a_line(new_page: NewPage, tmp_path: Path) -> None:
    trace = beams()
    page = opened(new_page, trace, tmp_path)
    go_to(page, "beams_chosen", trace, 4)
    assert page.locator(".strip").count() == 4
    body = page.locator(".card.requests > .body")
    assert body.evaluate("b => b.scrollHeight <= b.clientHeight + 4")
    go_to(page, "beams_chosen", trace, 6)
    assert page.locator(".strip").count() == 4
    assert page.locator(".ended b").all_inner_texts() == ["dropped", "dropped"]
    assert body.evaluate("b => b.scrollHeight <= b.clientHeight + 4")
    expect(page.locator(".piece.shared").first).to_contain_text("×4")


def test_candidates_are_listed_and_the_family_has_a_lane_for_each_rank(new_page: NewPage, tmp_path: Path) -> None:
    trace = beams()
    page = opened(new_page, trace, tmp_path)
    go_to(page, "beams_chosen", trace, 5)
    lines = page.locator(".candidate")
    assert [(line.locator(".parent").inner_text(), line.locator(".fate").inner_text()) for line in lines.all()] == [
        ("A1", "→ A1"), ("A2", "→ A2"), ("A1", "→ A5"), ("A2", "→ A6"),
    ]  # fmt: skip
    expect(page.locator(".candidate b.forced")).to_have_count(4)
    expect(page.locator(".family-node")).to_have_count(24)
    expect(page.locator(".family-node.lost")).to_have_count(10)  # two of four have no children any more, in all five columns before
    go_to(page, "slots_mapped", trace, -1)
    expect(page.locator(".candidate").first).to_be_hidden()
    expect(page.locator(".slot-chip").first).to_be_visible()


COUNT_FLIERS = """() => {
  window.flown = [];
  const note = (changes) => changes.forEach((c) => c.addedNodes.forEach((n) => n.className === 'flier' && flown.push(n.textContent)));
  new MutationObserver(note).observe(document.querySelector('.stage'), { childList: true });
}"""


def test_swapped_blocks_lie_in_the_swap_space_and_their_cells_fly(new_page: NewPage, tmp_path: Path) -> None:
    trace = swapped()
    page = opened(new_page, trace, tmp_path)
    at = go_to(page, "blocks_swapped_out", trace)
    expect(page.locator('.swap .cell[data-block="c0"]')).to_have_class(re.compile("now"))
    expect(page.locator('.swap .cell[data-block="c0"] > title')).to_contain_text("Four score and seven")
    expect(page.locator('.swap .cell[data-block="c0"] .state')).to_have_text("ref 2")
    expect(page.locator(".piece.cpu")).to_have_count(4)
    expect(page.locator(".swap h2")).to_contain_text("2 of 6 used")
    page.locator('.swap .cell[data-block="c0"]').hover()
    expect(page.locator(".piece.cpu.lit")).to_have_count(2)
    page.goto(f"{page.url.partition('?')[0]}?step={at - 1}")
    page.evaluate(COUNT_FLIERS)
    page.keyboard.press("ArrowRight")
    assert page.evaluate("flown") == ["2 → CPU 0", "3 → CPU 1"]
    expect(page.locator(".flier")).to_have_count(0)
    go_to(page, "blocks_swapped_in", trace)
    expect(page.locator(".piece.cpu")).to_have_count(0)


def test_without_motion_nothing_flies(new_page: NewPage, tmp_path: Path) -> None:
    trace = swapped()
    page = opened(new_page, trace, tmp_path, reduced_motion="reduce")
    at = go_to(page, "blocks_swapped_out", trace)
    page.goto(f"{page.url.partition('?')[0]}?step={at - 1}")
    page.evaluate(COUNT_FLIERS)
    page.keyboard.press("ArrowRight")
    assert page.evaluate("flown") == []
    expect(page.locator('.swap .cell[data-block="c0"]')).to_have_class(re.compile("now"))


def test_a_kept_prefix_is_shared_by_those_who_begin_with_it(new_page: NewPage, tmp_path: Path) -> None:
    page = opened(new_page, shared_prefix(), tmp_path)
    go_to(page, "token_sampled", shared_prefix())
    expect(page.locator(".request").first).to_contain_text("prefix, kept")
    expect(page.locator('.piece[data-block="0"] small')).to_have_text(["×3", "×3", "×3"])
    assert page.locator(".family-root text").all_text_contents() == ["P + A", "P + B"]
    expect(page.locator(".strip-head").nth(1)).to_contain_text("on forth")


def test_figure_5_an_arrow_leads_to_each_block_in_physical_order(new_page: NewPage, tmp_path: Path) -> None:
    trace = figure_5()
    page = opened(new_page, trace, tmp_path)
    go_to(page, "attention_computed", trace, 2)
    expect(page.locator(".share-query text")).to_have_text("brought")
    assert page.locator(".share-block .name").all_text_contents() == ["block 1 · logical 1", "block 3 · logical 2", "block 7 · logical 0"]
    assert page.locator(".share-block .percent").all_text_contents() == ["60.0 %", "15.0 %", "25.0 %"]
    expect(page.locator(".share-links path")).to_have_count(3)


def test_the_author_corrects_what_people_read_and_marks_what_nobody_confirms(new_page: NewPage, tmp_path: Path) -> None:
    trace = figure_6()
    correction = {"read": "A text says <b>one</b> thing.", "really": "Another one is right.", "rule": "S1"}
    trace.header.scenario.update({"resolved_corrections": {"3": [correction]}, "resolved_notes": {"4": "A value of the drawing.", "5": "Another."}})
    trace.header.scenario["unconfirmed_notes"] = [4]
    page = opened(new_page, trace, tmp_path)
    box = page.locator(".correction")
    expect(box).to_be_hidden()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(box).to_contain_text("A text says <b>one</b> thing.")
    expect(box).to_contain_text("Another one is right. (rule S1)")
    page.keyboard.press("ArrowRight")
    expect(box).to_be_hidden()
    expect(page.locator(".unconfirmed")).to_have_attribute("title", "no source confirms this value of the drawing")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".unconfirmed")).to_have_count(0)
    page.locator(".mark-correction").click()
    expect(box).to_be_visible()


WALK = """async (stage, steps) => {
  const boxes = new Set();
  for (let i = 0; i <= steps; i += 1) {
    boxes.add(JSON.stringify(['.bar', '.requests', '.pool', '.happened', '.foot', '.queue'].map((p) => stage.querySelector(p).getBoundingClientRect())));
    if (document.documentElement.scrollHeight > innerHeight + 1 || document.documentElement.scrollWidth > innerWidth + 1) return `frame ${i} scrolls`;
    document.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight', bubbles: true }));
    await new Promise(requestAnimationFrame);
  }
  return boxes.size;
}"""


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (1024, 768)])
@pytest.mark.parametrize("make", [lambda: beams(8, 20), swapped, shared_prefix, figure_5])
def test_nothing_scrolls_and_no_panel_moves(new_page: NewPage, tmp_path: Path, make: Callable[[], Trace], width: int, height: int) -> None:
    trace = make()
    page = opened(new_page, trace, tmp_path, width, height)
    assert page.locator(".stage").evaluate(WALK, len(trace.frames)) == 1


def test_a_link_leads_to_the_same_with_the_other_engine_and_back(new_page: NewPage, app_address: str) -> None:
    page = new_page()
    open_scene(page, app_address, "scene=figure-8")
    page.get_by_role("link", name="How vLLM V1 does it").click()
    page.wait_for_url(re.compile("scene=parallel-sampling-v1"))
    wait_for_all_frames(page)
    expect(page.locator(".chip.engine")).to_have_text("vLLM V1")
    page.get_by_role("link", name="How the paper does it").click()
    page.wait_for_url(re.compile("scene=figure-8"))
    wait_for_all_frames(page)
    expect(page.locator(".chip.engine")).to_have_text("paper, 2023")


def test_attention_is_shown_for_each_head_and_each_head_gives_all_of_it(app_address: str, new_page: NewPage) -> None:
    """Figure 5 with a real model: eight heads of layer 0; a click on a head writes its shares into the blocks."""
    page = new_page()
    open_scene(page, app_address, "scene=figure-5&step=33")
    bars = page.locator(".share-block .head-bar").evaluate_all("bars => bars.map(b => [Number(b.dataset.head), Number(b.dataset.share)])")
    heads = {head for head, _ in bars}
    assert heads == set(range(8))
    for head in heads:
        assert abs(sum(share for h, share in bars if h == head) - 1) < 1e-3
    chooser = page.locator(".share-head")
    assert chooser.locator("text").all_text_contents() == ["all", *map(str, range(8))]
    percents = page.locator(".share-block .percent")
    mean = percents.all_text_contents()
    page.locator('.share-head[data-head="3"]').click()
    expect(page.locator('.share-head[data-head="3"]')).to_have_attribute("aria-pressed", "true")
    assert percents.all_text_contents() != mean
    assert abs(sum(float(text.split()[0]) for text in percents.all_text_contents()) - 100) < 0.2
    page.locator('.share-head[data-head="mean"]').focus()
    page.keyboard.press("Enter")
    assert percents.all_text_contents() == mean
