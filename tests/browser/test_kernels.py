"""The kernels screen as a person uses it: step to a batch, click a program and a token, read the numbers, and look at every part."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from engine.trace.events import AttentionComputed, SlotsMapped
from engine.trace.frame import Frame
from scenarios import open_session

pytestmark = pytest.mark.browser
TIMEOUT = 90_000
SCENE = "sliding-window-live"
PARTS = ("Attention", "Slots", "Reference and Triton", "Source", "Compiled")
DRAWN = """n => { const all = [...document.querySelectorAll('[class*="st-key-chart-"]')];
  return all.length === n && all.every(e => e.querySelector('.main-svg')); }"""
TOO_SMALL = """() => [...document.querySelectorAll('[data-testid=stMain] *')].filter(e => [...e.childNodes].some(c => c.nodeType === 3 && c.textContent.trim()))
  .filter(e => e.getClientRects().length && parseFloat(getComputedStyle(e).fontSize) < 11.4 && !e.closest('[data-testid^=stIcon], .modebar'))
  .map(e => `${e.tagName} ${e.textContent.trim().slice(0, 40)} ${getComputedStyle(e).fontSize}`)"""
WIDTH = "document.querySelector('[data-testid=stMain]').scrollWidth"


@pytest.fixture(scope="module")
def frames() -> list[Frame]:
    """The run that the screen shows, made by the test itself."""
    return open_session(SCENE).run_to_end().frames


@pytest.fixture(scope="module")
def mixed(frames: list[Frame]) -> Frame:
    """The attention of the first step with a decode of A and a prefill of B in one batch."""
    return next(f for f in frames if isinstance(f.event, AttentionComputed) and len(f.event.query_lens) == 2 and max(f.event.query_lens) > 1)


def open_part(page: Page, address: str, query: str) -> None:
    page.goto(f"{address}/?screen=kernels&{query}")
    expect(page.get_by_role("tab", name="Attention")).to_be_visible(timeout=TIMEOUT)


def click_cell(page: Page, text: str) -> None:
    """Click the cell of the launch grid that has this number."""
    cell = page.locator(".st-key-kernels-grid .annotation").filter(has=page.locator(f"text.annotation-text:text-is('{text}')")).last
    box = cell.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)


def test_a_program_and_a_token_are_clicked_and_show_what_the_run_did(
    app_address: str, new_page: Callable[..., Page], frames: list[Frame], mixed: Frame
) -> None:
    page = new_page()
    open_part(page, app_address, f"scene={SCENE}&step={mixed.seq}&layer=2&keys=0")
    page.wait_for_function(DRAWN, arg=3, timeout=TIMEOUT)
    rows = {row.request_id: row.block_ids[2] for row in mixed.rows}  # the worker's row of group 2, whose layers see all keys
    # Programs 0 and 1 are A's two KV heads, 2 and 3 B's.
    expect(page.get_by_text("Row 0 of the block table (request A)")).to_be_visible(timeout=TIMEOUT)
    click_cell(page, "3")
    expect(page.get_by_text("Row 1 of the block table (request B)")).to_be_visible(timeout=TIMEOUT)
    event = mixed.event
    assert isinstance(event, AttentionComputed)
    keys = event.seq_lens[event.request_ids.index("B")]
    blocks = [str(block) for block in rows["B"][: -(-keys // 4)]]
    expect(page.get_by_text(f"The kernel reads {keys} keys there: columns 0 to {len(blocks) - 1} of row 1, blocks {' and '.join(blocks)}")).to_be_visible()
    expect(page).to_have_url(re.compile("[?&]program=3(&|$)"))

    page.get_by_role("tab", name="Slots").click()
    slots = {(f.event.request_id, p): s for f in frames if f.step == mixed.step and isinstance(f.event, SlotsMapped) and f.event.group_id == 2
             for p, s in zip(f.event.positions, f.event.slots, strict=True)}  # fmt: skip
    position = keys - 1
    page.get_by_role("radio", name=f"B {position}").or_(page.get_by_role("button", name=f"B {position} ")).first.click()
    expect(page.get_by_text(f"The slot-mapping kernel wrote slot {slots['B', position]} for this token: the same.")).to_be_visible(timeout=TIMEOUT)
    block = rows["B"][position // 4]
    assert slots["B", position] == block * 4 + position % 4  # R8.4
    sums = page.locator("table.sum tr", has_text="slot").last
    expect(sums).to_contain_text(f"{block} · 4 + {position % 4}")
    expect(sums).to_contain_text(f"= {slots['B', position]}")


def test_the_loop_is_played_tile_by_tile(app_address: str, new_page: Callable[..., Page], mixed: Frame) -> None:
    page = new_page()
    open_part(page, app_address, f"scene={SCENE}&step={mixed.seq}&layer=2")
    expect(page.get_by_text("Tile 0 is the first with keys for this query")).to_be_visible(timeout=TIMEOUT)
    page.get_by_role("button", name="▶").click()
    expect(page.get_by_text("Tile 1 has places 4 to 7.")).to_be_visible(timeout=TIMEOUT)
    page.get_by_role("button", name="Play").click()
    event = mixed.event
    assert isinstance(event, AttentionComputed)
    last = (event.seq_lens[0] - 1) // 4
    expect(page.get_by_text(f"Tile {last} has places")).to_be_visible(timeout=TIMEOUT)
    expect(page.get_by_text("The loop ends")).to_be_visible()
    expect(page.get_by_role("button", name="Play")).to_be_visible(timeout=TIMEOUT)


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (1024, 768)])
def test_every_part_fits_and_is_written_large_enough(app_address: str, new_page: Callable[..., Page], mixed: Frame, width: int, height: int) -> None:
    page = new_page(width, height)
    open_part(page, app_address, f"scene={SCENE}&step={mixed.seq}")
    for part in PARTS:
        page.get_by_role("tab", name=part).click()
        num_charts = {"Attention": 3, "Slots": 1, "Reference and Triton": 1}.get(part, 0)
        page.wait_for_function(DRAWN, arg=num_charts, timeout=TIMEOUT)
        if part == "Compiled":
            expect(page.get_by_text("Registers are what a thread computes with")).to_be_visible(timeout=TIMEOUT)
        assert page.evaluate(WIDTH) <= width
        assert page.evaluate(TOO_SMALL) == []
        if part == "Attention":  # grid and row are seen without scrolling
            for chart in (".st-key-chart-kernels-grid", ".st-key-chart-kernels-walk"):
                box = page.locator(chart).bounding_box()
                assert box is not None
                assert box["y"] + box["height"] <= height


def test_from_the_scene_to_its_kernels_and_back_to_the_same_frame(app_address: str, new_page: Callable[..., Page], mixed: Frame) -> None:
    page = new_page()
    page.goto(f"{app_address}/?scene={SCENE}&step={mixed.seq}")
    expect(page.locator(".counter")).to_contain_text(f"step {mixed.step} · {mixed.seq} /", timeout=TIMEOUT)
    page.get_by_role("link", name="Kernels", exact=True).click()
    expect(page.get_by_role("heading", name=f"Kernels of engine step {mixed.step} ")).to_be_visible(timeout=TIMEOUT)
    expect(page.get_by_text("Launch grid")).to_be_visible(timeout=TIMEOUT)
    page.get_by_role("link", name="Back to the scene").click()
    expect(page.locator(".counter")).to_contain_text(f"step {mixed.step} · {mixed.seq} /", timeout=TIMEOUT)
