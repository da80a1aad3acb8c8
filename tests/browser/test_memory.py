"""The memory screen as a person uses it: choose requests, bring a file, bring a bad one."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser
GOOD = b"prompt_len,output_len\n" + b"".join(b"%d,%d\n" % (20 + i % 50, 30 + i % 90) for i in range(300))
TIMEOUT = 60_000
EDGES = "[...document.querySelectorAll('.js-plotly-plot')].map(e => e.getBoundingClientRect()).map(r => [r.left, r.right, r.bottom])"
SETTLED = "n => { const all = [...document.querySelectorAll('.js-plotly-plot')]; return all.length === n && all.every(e => e.querySelector('.main-svg')); }"


def drawn_numbers(page: Page) -> list[str]:
    """The values that stand in the bars."""
    return page.locator(".js-plotly-plot .bartext").all_text_contents()


def test_choosing_requests_and_bringing_a_good_and_a_bad_file(app_address: str, new_page: Callable[..., Page]) -> None:
    page = new_page()
    page.goto(f"{app_address}/?screen=memory&requests=200")
    expect(page.locator(".js-plotly-plot .bartext").first).to_be_visible(timeout=TIMEOUT)
    expect(page.locator(".js-plotly-plot .bartext", has_text="20.4").first).to_be_visible()  # the paper's bar of Orca (Max)
    sharegpt = drawn_numbers(page)

    page.get_by_role("combobox", name="Requests", exact=True).click()
    page.get_by_role("option", name="Lengths like Alpaca").click()
    expect(page.get_by_text(re.compile("Figure 11b"))).to_be_visible(timeout=TIMEOUT)
    page.wait_for_function("before => JSON.stringify([...document.querySelectorAll('.bartext')].map(t => t.textContent)) !== before", arg=_json(sharegpt))

    page.get_by_role("button", name="Your own file").click()
    page.locator("input[type=file]").set_input_files({"name": "mine.csv", "mimeType": "text/csv", "buffer": GOOD})
    expect(page.get_by_text(re.compile(r"Source: mine\.csv"))).to_be_visible(timeout=TIMEOUT)
    page.wait_for_timeout(1_500)  # the chart is drawn after the sentence
    mine = drawn_numbers(page)
    assert mine not in ([], sharegpt)

    page.locator("input[type=file]").set_input_files({"name": "bad.csv", "mimeType": "text/csv", "buffer": b"prompt_len,output_len\n10,20\n30,-4\n"})
    expect(page.get_by_text("“bad.csv”, line 3: output_len is -4, but a length cannot be negative.").first).to_be_visible(timeout=TIMEOUT)
    page.wait_for_timeout(1_500)
    assert drawn_numbers(page) == mine


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (1024, 768)])
def test_every_part_fits_the_width_and_its_chart_the_height(app_address: str, new_page: Callable[..., Page], width: int, height: int) -> None:
    page = new_page(width, height)
    page.goto(f"{app_address}/?screen=memory&requests=200")
    for part, words in (
        ("Waste", "What the bars say"), ("Slots", "Read it as"), ("Requests at once", "Requests running"), ("Block size", "What the charts say"),
        ("Sharing", "What the chart says"),
    ):  # fmt: skip
        page.get_by_role("tab", name=part).click(timeout=TIMEOUT)
        expect(page.get_by_text(words).first).to_be_visible(timeout=TIMEOUT)
        page.wait_for_function(SETTLED, arg=2 if part == "Slots" else 1)
        for left, right, bottom in page.evaluate(EDGES):
            assert left >= 0
            assert right <= width
            assert bottom <= height
        assert page.evaluate("document.querySelector('[data-testid=stMain]').scrollWidth") <= width


def test_charts_leave_as_svg_and_csv(app_address: str, new_page: Callable[..., Page]) -> None:
    page = new_page()
    page.goto(f"{app_address}/?screen=memory&requests=200")
    expect(page.locator(".js-plotly-plot .bartext").first).to_be_visible(timeout=TIMEOUT)
    with page.expect_download() as csv:
        page.get_by_role("button", name="CSV").click()
    assert csv.value.suggested_filename == "memory-waste.csv"
    lines = csv.value.path().read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("system,source,token_states_percent")
    assert len(lines) == 9  # four systems, ours and the paper's
    with page.expect_download() as svg:
        page.locator(".modebar-btn").first.click()
    assert svg.value.suggested_filename == "memory-waste.svg"
    drawing = svg.value.path().read_text(encoding="utf-8")
    assert drawing.startswith("<svg")
    assert "Orca (Max)" in drawing


def _json(values: list[str]) -> str:
    return "[" + ",".join(f'"{value}"' for value in values) + "]"
