"""Takes the README's picture from the running app: python -m tests.bench.screenshot"""

from __future__ import annotations

from tests.browser.server import chromium, running_app
from tests.conftest import ROOT

SCENE, FRAME = "figure-8", 15
TARGET = ROOT / "views" / "stage" / "figure-8.png"


def main() -> None:
    with running_app() as address, chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        page.goto(f"{address}/?scene={SCENE}&step={FRAME}&model=tiny")
        page.get_by_text("it is copied to block 3").first.wait_for(timeout=60_000)
        page.locator(".counter", has_text=f"{FRAME} / ").wait_for(timeout=60_000)
        page.wait_for_timeout(1000)  # moves are animated
        page.screenshot(path=TARGET)


if __name__ == "__main__":
    main()
