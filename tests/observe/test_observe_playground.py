"""The playground in a real browser: sliders, single actions, the verifier's words, export, links."""

from __future__ import annotations

from typing import Any

import pytest
from observe_browser import Opened, browser, fits_every_width, pixels, shows, without_the_first

from programs import needs
from vpipe.errors import UserError
from vpipe.observe.dashboard import Dashboard
from vpipe.observe.playground import answer, app

__all__ = ["browser"]
pytestmark = [pytest.mark.timeout(180), needs("chromium")]
MAKESPAN = "#figures .tile:first-child .value"
ONE = {"schedule": "1f1b", "ranks": "2", "microbatches": "2"}


def test_an_answer_has_program_words_and_figures() -> None:
    found = answer(ONE)
    assert found["summary"]["makespan"] == 9
    assert found["violations"] == []
    assert found["csv"].splitlines()[0].startswith("0F0,0F1,0B0")
    assert found["svg"].startswith("<svg")
    assert answer(ONE | {"latency": "1"})["summary"]["makespan"] > 9
    assert "activations" in " ".join(answer(ONE | {"memory": "1"})["violations"])


def test_an_edited_program_is_judged_by_the_verifier() -> None:
    rows = answer(ONE)["csv"]
    lost = answer(ONE | {"rows": rows.replace("1B1", "").replace(",,", ",")})
    assert lost["violations"], "a backward is missing"
    swapped = answer(ONE | {"rows": rows.replace("0F0,0F1,0B0", "0B0,0F1,0F0")})
    assert "stuck" in swapped or swapped["violations"]
    later = answer(ONE | {"rows": rows.replace("0F0,0F1,0B0", "0F0,0B0,0F1")})
    assert later["violations"] == []
    assert later["summary"]["makespan"] > 9, "it runs, and is slower"


@pytest.mark.parametrize(
    ("question", "says"),
    [
        ({"schedule": "nope"}, "nope"),
        ({"ranks": "99999"}, "at most"),
        ({"rows": "0F0,zz\n1F0\n"}, "zz"),
        ({"rows": "0F0,0B0\n"}, "1 ranks"),
        ({"rows": "x" * 20_000}, "characters"),
        ({"forward": "-1"}, "between 0"),
    ],
)
def test_what_does_not_fit_is_one_sentence(question: dict[str, str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        answer(ONE | question)


def test_the_page(browser: Any) -> None:
    opened = Opened(browser)
    page = opened.page
    with Dashboard(".", make=app) as server:
        page.goto(server.url)
        shows(page, MAKESPAN, "33")
        shows(page, "#words", "verifies")
        before = pixels(page)
        page.select_option("select[name=schedule]", "zb-h1")
        shows(page, MAKESPAN, "27")
        assert pixels(page) != before
        page.locator("input[name=microbatches]").focus()
        page.keyboard.press("ArrowRight")
        shows(page, MAKESPAN, "30")
        page.select_option("select[name=schedule]", "1f1b")
        shows(page, MAKESPAN, "36")
        spot = without_the_first(page, "0F0")
        page.mouse.click(*spot)
        page.click("#later")
        with page.expect_download() as got:
            page.click("#csv")
        assert got.value.suggested_filename == "schedule.csv"
        with page.expect_download() as got:
            page.click("#svg")
        assert got.value.suggested_filename == "schedule.svg"
        link = page.url
        assert "schedule=1f1b" in link
        other = Opened(browser)
        other.page.goto(link)
        shows(other.page, MAKESPAN, page.inner_text(MAKESPAN))
        fits_every_width(page)
        assert not opened.problems
