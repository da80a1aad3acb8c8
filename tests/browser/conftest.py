"""One server and one browser for all tests of this folder; a fresh page for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.server import chromium, running_app


@pytest.fixture(scope="session")
def app_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log: Path = tmp_path_factory.mktemp("app") / "streamlit.log"
    with running_app(log) as address:
        yield address


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def new_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Makes pages. A test fails when a page raised an error, said so on its console, or asked anybody but this machine for anything.

    `alone`: the page is about to lose its server, and may say so.
    """
    complaints: list[str] = []
    contexts = []

    def make(width: int = 1280, height: int = 720, alone: bool = False, **options: object) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" and not alone else None)
        page.on("request", lambda request: complaints.append(request.url) if not _is_local(request.url) else None)
        return page

    yield make
    for context in contexts:
        context.close()
    assert complaints == []


def _is_local(url: str) -> bool:
    return url.startswith(("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:", "about:", "file:"))
