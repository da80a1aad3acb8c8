"""The drawing code alone, without Streamlit: a page with a trace inside it, as an exported file will be one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.saved_page import save
from tests.browser.stage_page import block_words, free_queue
from tests.unit.views.handmade import figure_6

pytestmark = pytest.mark.browser


def test_a_trace_in_a_file_can_be_walked(new_page: Callable[..., Page], tmp_path: Path) -> None:
    page = new_page()
    page.goto(save(figure_6(), tmp_path))
    page.keyboard.press("End")
    expect(page.locator(".say b")).to_have_text("A gives back blocks 3, 1 and 7.")
    assert free_queue(page) == [3, 2, 4, 5, 6, 8, 1, 7]
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert block_words(page, 3) == ["brought"]


def test_tokens_and_notes_with_markup_are_shown_as_text(new_page: Callable[..., Page], tmp_path: Path) -> None:
    trace = figure_6()
    nasty = "<img src=x onerror=alert(1)>"
    trace.header.vocabulary[100] = nasty
    trace.header.scenario["resolved_notes"] = {"1": f"note {nasty}"}
    trace.header.scenario["title"] = f"title {nasty}"
    page = new_page()
    page.goto(save(trace, tmp_path))
    page.keyboard.press("ArrowRight")
    expect(page.locator(".say .note")).to_contain_text(nasty)
    expect(page.locator("h1")).to_have_text(f"title {nasty}")
    expect(page.locator(".token").first).to_have_text(nasty)
    page.keyboard.press("End")
    assert page.locator("img").count() == 0
