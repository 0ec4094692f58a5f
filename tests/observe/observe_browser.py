"""Debian's chromium through playwright, for the tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need the python package playwright")
CHROMIUM = shutil.which("chromium")


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


def without_the_first(page: Any, words: str) -> tuple[float, float]:
    """Choose the first action of rank 0 and take it out: the page says ``words``. Then put it back; where it is."""
    left, top = page.evaluate(
        """() => { const box = document.querySelector("#timeline canvas").getBoundingClientRect();
          return [box.left + 70, box.top + 8]; }"""
    )
    page.mouse.click(left, top)
    shows(page, "#chosen", "0F0 on rank 0")
    page.click("#remove")
    shows(page, "#words", words)
    assert page.locator("#words .bad").count() > 0
    page.click("#undo")
    shows(page, "#words", "verifies")
    return left, top


def fits_every_width(page: Any) -> None:
    """Nothing is beyond the right edge, on a phone or on a desk."""
    for width in (390, 800, 1400):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(150)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
