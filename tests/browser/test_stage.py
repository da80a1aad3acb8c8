"""Figure 6 and its neighbours in a real browser: what is drawn, and that stepping needs nobody (paper, section 4.3; rules R1.5, R1.7, R8.4)."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.browser.server import running_app
from tests.browser.stage_page import block_words, free_queue, go_to, last, open_scene, position, table, wait_for_all_frames

pytestmark = pytest.mark.browser
NewPage = Callable[..., Page]


def test_figure_6_fills_blocks_7_1_and_3_and_gives_them_back(new_page: NewPage, app_address: str) -> None:
    page = new_page()
    open_scene(page, app_address, "scene=figure-6-prepared")
    go_to(page, "A takes blocks 7 and 1.")
    assert table(page) == [("0", "7", "0 of 4"), ("1", "1", "0 of 4")]
    assert free_queue(page) == [3, 2, 4, 5, 6, 8]
    go_to(page, "A takes block 3.")
    assert table(page) == [("0", "7", "4 of 4"), ("1", "1", "4 of 4"), ("2", "3", "0 of 4")]
    assert block_words(page, 7) == ["Four", "score", "and", "seven"]
    assert block_words(page, 1) == ["years", "ago", "our", "fathers"]
    expect(page.locator(".say")).to_contain_text("Block 3 was at the head of the free queue.")
    expect(page.locator(".story")).to_contain_text("popped from the head, given to A")
    page.keyboard.press("End")
    expect(page.locator(".request .text")).to_contain_text("fathers brought forth")
    assert free_queue(page) == [3, 2, 4, 5, 6, 8, 1, 7]
    expect(page.locator(".chain-node")).to_have_count(2)


def test_back_is_the_way_forward_reversed(new_page: NewPage, app_address: str) -> None:
    page = new_page()
    open_scene(page, app_address, "scene=figure-6-prepared")
    page.keyboard.press("Home")

    script = "e => e.innerText + [...e.querySelectorAll('svg[aria-label]')].map(s => s.getAttribute('aria-label') + s.textContent)"

    def picture() -> str:
        return str(page.locator(".panels").evaluate(script))

    forward = [picture()]
    for _ in range(last(page)):
        page.keyboard.press("ArrowRight")
        forward.append(picture())
    backward = [forward[-1]]
    for _ in range(last(page)):
        page.keyboard.press("ArrowLeft")
        backward.append(picture())
    assert backward[::-1] == forward


def test_recorded_frames_step_and_play_without_the_server(new_page: NewPage) -> None:
    page = new_page(alone=True)
    with running_app() as address:
        open_scene(page, address, "scene=figure-6-prepared")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert position(page) == 2
    page.keyboard.press("End")
    assert position(page) == last(page)
    page.keyboard.press("Home")
    page.get_by_label("Speed of playing").select_option("4×")
    page.keyboard.press(" ")
    expect(page.locator(".counter")).to_have_text(re.compile(r"· [3-9] /"), timeout=10_000)
    page.keyboard.press(" ")
    stopped = position(page)
    page.wait_for_timeout(600)
    assert position(page) == stopped


def test_three_step_sizes_lead_to_the_ends_of_operations_and_engine_steps(new_page: NewPage, app_address: str) -> None:
    page = new_page()
    open_scene(page, app_address, "scene=figure-6-prepared")
    page.keyboard.press("Home")
    page.keyboard.press("3")
    steps = []
    for _ in range(4):
        page.keyboard.press("ArrowRight")
        steps.append(page.locator(".counter").inner_text().split("·")[0].strip())
    assert steps == ["step 0", "step 1", "step 2", "step 3"]
    page.keyboard.press("Home")
    page.keyboard.press("2")
    operations = []
    for _ in range(4):
        page.keyboard.press("ArrowRight")
        operations.append(page.locator(".happened h2 span").first.inner_text())
    assert operations == ["prepare", "add_request A", "schedule", "execute_model"]


def test_the_address_carries_scene_step_and_model(new_page: NewPage, app_address: str) -> None:
    page = new_page()
    open_scene(page, app_address, "scene=figure-6-prepared&model=tiny&step=12")
    assert position(page) == 12
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.wait_for_url(re.compile("step=15"))
    assert "scene=figure-6-prepared" in page.url
    assert "model=tiny" in page.url
    said = page.locator(".say b").inner_text()
    other = new_page()
    other.goto(page.url)
    wait_for_all_frames(other)
    assert position(other) == 15
    assert other.locator(".say b").inner_text() == said


def test_a_click_on_the_scrubber_and_on_an_event_seeks(new_page: NewPage, app_address: str) -> None:
    page = new_page()
    open_scene(page, app_address, "scene=figure-6-prepared")
    box = page.locator(".track").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 16)
    middle = position(page)
    assert abs(middle - last(page) / 2) <= 1
    page.locator(".events .later button").first.click()
    assert position(page) == middle + 1


def test_a_block_under_the_mouse_lights_up_everywhere(new_page: NewPage, app_address: str) -> None:
    page = new_page()
    open_scene(page, app_address, "scene=figure-6-prepared")
    go_to(page, "A takes block 3.")
    page.locator('.cell[data-block="7"]').hover()
    for place in (".cell", ".table .row", ".chain-node"):
        expect(page.locator(f'{place}[data-block="7"]')).to_have_class(re.compile("lit"))
        expect(page.locator(f"{place}.lit")).to_have_count(1)
    page.locator(".say").hover()
    expect(page.locator(".lit")).to_have_count(0)


def test_keys_typed_into_a_field_do_not_step(new_page: NewPage, app_address: str) -> None:
    page = new_page()
    open_scene(page, app_address, "scene=figure-6-prepared")
    page.keyboard.press("End")
    page.get_by_text("Model: tiny").click()
    field = page.get_by_role("combobox").first
    field.focus()
    before = position(page)
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Home")
    assert position(page) == before


WALK = """async (stage, steps) => {
  const places = ['.bar', '.card.requests', '.card.pool', '.card.happened', '.card.chains', '.queue'];
  const seen = new Set();
  for (let i = 0; i <= steps; i += 1) {
    seen.add(JSON.stringify(places.map((p) => stage.querySelector(p).getBoundingClientRect())));
    const pages = [document.documentElement, document.querySelector('.stMain')];
    if (pages.some((e) => e.scrollHeight > e.clientHeight + 1 || e.scrollWidth > e.clientWidth + 1)) return `frame ${i} scrolls`;
    document.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight', bubbles: true }));
    await new Promise(requestAnimationFrame);
  }
  return seen.size;
}"""


@pytest.mark.parametrize(
    ("scene", "width", "height"),
    [("figure-6-prepared", 1280, 720), ("same-prompt-twice", 1280, 720), ("same-prompt-twice", 1024, 768), ("figure-7-v1", 1920, 1080)],
)
def test_nothing_scrolls_and_no_panel_moves_between_frames(new_page: NewPage, app_address: str, scene: str, width: int, height: int) -> None:
    page = new_page(width, height)
    open_scene(page, app_address, f"scene={scene}")
    page.keyboard.press("Home")
    assert page.locator(".stage").evaluate(WALK, last(page)) == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_stage_follows_the_theme(new_page: NewPage, app_address: str, scheme: str) -> None:
    page = new_page(color_scheme=scheme)
    open_scene(page, app_address, "scene=figure-6-prepared")
    expect(page.locator(".stage")).to_have_attribute("data-theme", scheme)


def test_without_motion_nothing_glides(new_page: NewPage, app_address: str) -> None:
    still, moving = new_page(reduced_motion="reduce"), new_page()
    for page in (still, moving):
        open_scene(page, app_address, "scene=figure-6-prepared")
    duration = "e => getComputedStyle(e).transitionDuration"
    assert still.locator(".node").first.evaluate(duration) == "0s"
    assert moving.locator(".node").first.evaluate(duration) != "0s"


@pytest.mark.parametrize("query", ["model=gpt-17", "model=/etc", "backend=abacus", "layers=99"])
def test_what_a_scene_cannot_run_on_is_said_and_the_scene_goes_on_with_its_own_model(new_page: NewPage, app_address: str, query: str) -> None:
    page = new_page()
    page.goto(f"{app_address}/?scene=figure-6&{query}")
    wait_for_all_frames(page)
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("The scene is shown on tiny, its own model.")
    assert query.split("=")[0] not in page.url
    box, choosers = alert.bounding_box(), page.locator(".st-key-choosers").bounding_box()
    assert box is not None
    assert choosers is not None
    assert box["x"] + box["width"] <= choosers["x"], "the sentence runs under the choosers"


def test_an_address_that_leads_nowhere_says_so_and_the_gallery_leads_on(new_page: NewPage, app_address: str) -> None:
    page = new_page()
    page.goto(f"{app_address}/?scene=figure-66")
    expect(page.get_by_role("alert")).to_contain_text("There is no")
    page.get_by_text("Figure 6: one request finds its blocks").click()
    wait_for_all_frames(page)
    assert "scene=figure-6" in page.url
    assert "figure-66" not in page.url
    page.get_by_text("All scenes").click()
    expect(page.get_by_role("heading", name="Pagewalk")).to_be_visible()
    page.get_by_text("Figure 7: two requests share one pool").click()
    wait_for_all_frames(page)
    assert position(page) == 0
