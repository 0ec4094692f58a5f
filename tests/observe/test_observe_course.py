"""The course as HTML: every page has the playground inside, set as its words say, and a browser shows it from disk."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from observe_browser import Opened, browser, playwright

from programs import needs

__all__ = ["browser"]
LEARN = Path(__file__).parents[2] / "docs" / "learn"
pytestmark = [pytest.mark.timeout(180), needs("chromium")]


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.spec_from_file_location("pages", LEARN / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    most = sys.modules["offline"].Most(ranks=4, microbatches=9, stages=1)
    folder = tmp_path_factory.mktemp("course")
    assert len(pages.write(folder, most)) == len(list(LEARN.rglob("*.md")))
    return folder


def test_every_page_has_its_playground_and_no_link_leads_nowhere(course: Path) -> None:
    for source in LEARN.rglob("[1-9]*.md"):
        (said,) = re.findall(r"`playground\.html#(.+?)`", source.read_text())
        text = (course / source.relative_to(LEARN)).with_suffix(".html").read_text()
        (shown,) = re.findall(r'<iframe src="(?:\.\./)?playground\.html#(.+?)"', text)
        assert shown.replace("&amp;", "&") == said
    for page in course.rglob("*.html"):
        for target in re.findall(r'(?:href|src)="([^"#]+)', page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize(
    ("page", "makespan", "dragged"), [("3-1f1b.html", "33", "36"), ("zh/2-warm-up.html", "33", "36")]
)
def test_a_browser_shows_it_at_three_widths(browser: Any, course: Path, page: str, makespan: str, dragged: str) -> None:
    opened = Opened(browser)
    opened.page.goto((course / page).as_uri())
    box = opened.page.locator("iframe")
    box.scroll_into_view_if_needed()
    inside = opened.page.frame_locator("iframe")
    figure = inside.locator("#figures .tile:first-child .value")
    playwright.expect(figure).to_have_text(makespan, timeout=40_000)
    inside.locator("input[name=microbatches]").focus()
    opened.page.keyboard.press("ArrowRight")
    playwright.expect(figure).to_have_text(dragged, timeout=40_000)
    for width in (390, 800, 1280):
        opened.page.set_viewport_size({"width": width, "height": 900})
        frame = opened.page.frames[1]
        high = "() => Math.abs(document.body.offsetHeight - innerHeight) <= 2"  # nothing to scroll inside
        for _ in range(400):
            if frame.evaluate(high):
                break
            opened.page.wait_for_timeout(50)
        assert frame.evaluate(high)
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    assert not opened.problems
