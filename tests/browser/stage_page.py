"""What a person sees and does on the stage, as functions over a page."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect


def open_scene(page: Page, address: str, query: str) -> None:
    """Open a scene and wait until its whole run is recorded."""
    page.goto(f"{address}/?{query}")
    wait_for_all_frames(page)


def wait_for_all_frames(page: Page) -> None:
    expect(page.locator(".counter")).to_have_text(re.compile(r"^step \d+ · \d+ / \d+$"), timeout=90_000)


def position(page: Page) -> int:
    return int(page.locator(".counter").inner_text().split("·")[1].split("/")[0])


def last(page: Page) -> int:
    return int(page.locator(".counter").inner_text().split("/")[1].split()[0])


def go_to(page: Page, text: str) -> None:
    """Step forward from the start until the narration says `text`."""
    page.keyboard.press("Home")
    for _ in range(last(page) + 1):
        if page.locator(".say b").inner_text() == text:
            return
        page.keyboard.press("ArrowRight")
    raise AssertionError(f"the narration never said “{text}”")


def block_words(page: Page, block_id: int) -> list[str]:
    """The words in the slots of a physical block, as they stand in the picture (a long word may be broken over lines)."""
    slots = page.locator(f'.cell[data-block="{block_id}"] .slot.filled')
    return ["".join(slots.nth(i).locator("text").all_text_contents()).replace("-", "") for i in range(slots.count())]


def free_queue(page: Page) -> list[int]:
    """Block ids from head to tail, as the picture's alternative text says."""
    label = page.locator(".queue svg").get_attribute("aria-label") or ""
    return [int(number) for number in re.findall(r"\d+", label)]


def table(page: Page) -> list[tuple[str, str, str]]:
    """The block table of the only request: logical, physical, #filled."""
    rows = page.locator(".table .row:not(.titles)")
    parts = (".logical", ".physical", ".number")
    return [tuple(rows.nth(i).locator(part).inner_text() for part in parts) for i in range(rows.count())]  # type: ignore[misc]
