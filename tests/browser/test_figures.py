"""Figure scenes in a real browser: words that nobody clips or overprints, charts that can be saved, and ways into the stage."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from scenarios.loader import figure_files

pytestmark = pytest.mark.browser
NewPage = Callable[..., Page]

CLASHES = """() => {
  const clashes = [];
  for (const plot of document.querySelectorAll('.js-plotly-plot')) {
    const frame = plot.getBoundingClientRect();
    const words = [...plot.querySelectorAll('.annotation-text')].filter(t => t.textContent.trim());
    const boxes = words.map(t => [t.textContent, t.getBoundingClientRect()]);
    const buttons = [plot.querySelector('.modebar-btn').getBoundingClientRect()];
    boxes.forEach(([text, box], i) => {
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
        clashes.push('clipped: ' + text);
      for (const [other, its] of boxes.slice(i + 1))
        if (box.left < its.right - 2 && its.left < box.right - 2 && box.top < its.bottom - 4 && its.top < box.bottom - 4) clashes.push(text + ' / ' + other);
      for (const button of buttons)
        if (box.left < button.right && button.left < box.right && box.top < button.bottom && button.top < box.bottom) clashes.push('under a button: ' + text);
    });
  }
  return clashes;
}"""


def opened(new_page: NewPage, address: str, scene: str, width: int = 1280, height: int = 720) -> Page:
    page = new_page(width, height, accept_downloads=True)
    page.goto(f"{address}/?scene={scene}")
    page.wait_for_selector(".js-plotly-plot .main-svg")
    page.wait_for_selector("[data-testid='stDownloadButton']")
    return page


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (1024, 768)])
@pytest.mark.parametrize("scene", sorted(figure_files()))
def test_no_word_is_clipped_or_overprinted_and_the_figure_fits_the_screen(new_page: NewPage, app_address: str, scene: str, width: int, height: int) -> None:
    page = opened(new_page, app_address, scene, width, height)
    page.wait_for_timeout(500)
    assert page.evaluate(CLASHES) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    bottoms = page.locator(".js-plotly-plot").evaluate_all("plots => plots.map(p => p.getBoundingClientRect().bottom)")
    assert max(bottoms) <= height


def test_a_chart_is_saved_as_svg_and_its_numbers_as_csv(new_page: NewPage, app_address: str) -> None:
    page = opened(new_page, app_address, "figure-3")
    button = page.locator(".modebar-btn")
    assert button.evaluate("b => getComputedStyle(b, '::before').content") == '"SVG"'
    with page.expect_download() as download:
        button.click()
    assert download.value.suggested_filename == "figure-3.svg"
    drawing = Path(download.value.path()).read_text(encoding="utf-8")
    assert drawing.startswith("<svg")
    assert "2,038" in drawing
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV").click()
    assert download.value.suggested_filename == "figure-3.csv"
    rows = list(csv.DictReader(Path(download.value.path()).read_text(encoding="utf-8").splitlines()))
    assert {"request": "A", "layout": "contiguous", "slots": "2038", "what": "never"} in rows


def test_a_box_of_figure_4_leads_to_the_step_where_it_is_seen_at_work(new_page: NewPage, app_address: str) -> None:
    page = opened(new_page, app_address, "figure-4")
    page.locator(".js-plotly-plot svg a", has_text="Block tables").click()
    page.wait_for_selector(".stage")
    expect(page.locator(".say b")).to_contain_text("A takes block 3", timeout=60_000)
    assert re.search(r"scene=figure-6&step=20$", page.url)


def test_the_slider_moves_by_keys(new_page: NewPage, app_address: str) -> None:
    page = opened(new_page, app_address, "page-table")
    page.locator("[data-testid='stSlider'] input[type=range]").focus()
    page.keyboard.press("ArrowRight")
    moved = page.locator(".st-key-plot-page-table").filter(has_text="slot 1 × 4 + 2 = 6")  # for a moment the page holds the drawing before, too
    expect(moved).to_be_visible(timeout=20_000)
