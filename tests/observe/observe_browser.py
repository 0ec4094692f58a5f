"""Debian's chromium through playwright, for the tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need the python package playwright")
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("the browser tests need chromium (apt-get install chromium)", allow_module_level=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Opened:
    """A page and what went wrong on it."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page = browser.new_page(viewport={"width": 1200, "height": 800}, **options)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda m: self.problems.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("request", lambda request: self.requests.append(request.url))

    def go(self, url: str) -> Any:
        self.page.goto(url)
        self.page.wait_for_selector("#timeline canvas", timeout=60_000)
        self.page.wait_for_timeout(300)
        return self.page


def shows(page: Any, selector: str, text: str) -> None:
    """Wait until the element says so. (The page's policy forbids ``eval``, which wait_for_function would need.)"""
    playwright.expect(page.locator(selector)).to_contain_text(text, timeout=40_000)


def pixels(page: Any, selector: str = "#timeline canvas") -> str:
    """What a canvas shows."""
    return str(page.evaluate("s => document.querySelector(s).toDataURL()", selector))
