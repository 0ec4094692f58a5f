"""The playground without a server: its own simulator and its own words against those of the command line."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from observe_browser import Opened, browser, fits_every_width, pixels, shows, without_the_first

from programs import needs
from vpipe.errors import UserError
from vpipe.observe import whatif
from vpipe.observe.playground import answer

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "learn"))

import offline

__all__ = ["browser"]
pytestmark = [pytest.mark.timeout(180), needs("chromium")]
SMALL = offline.Most(ranks=4, microbatches=8, stages=3)
MAKESPAN = "#figures .tile:first-child .value"
ASK = """async (questions) => { const engine = await Offline.of(JSON.parse(document.getElementById("data").textContent));
  return questions.map((each) => { const { csv, summary, violations, stuck, error } = engine.play(each);
    return { csv, summary, violations, stuck, error }; }); }"""


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "playground.html"
    path.write_text(offline.page(SMALL), encoding="utf-8")
    return path


def questions(number: int) -> list[dict[str, str]]:
    """Every schedule of the page with random counts, costs and latency."""
    draw = random.Random(17)
    names = [each["name"] for each in whatif.choices() if each["name"] != "zb-auto"]
    cost = ["0", "0.3", "1", "1.5", "2"]
    return [
        {
            "schedule": names[turn % len(names)],
            "ranks": str(draw.randint(1, SMALL.ranks)),
            "microbatches": str(draw.randint(1, SMALL.microbatches)),
            "stages_per_rank": str(draw.randint(1, SMALL.stages)),
            "forward": draw.choice(cost[1:]),
            "input_grad": draw.choice(cost),
            "weight_grad": draw.choice(cost),
            "latency": draw.choice(["0", "0", "0.1", "1", "2.5"]),
            "memory": draw.choice(["0", "0", "1", "2.5"]),
        }
        for turn in range(number)
    ]


def truth(question: dict[str, str]) -> dict[str, Any]:
    try:
        return answer(question)
    except UserError as error:
        return {"error": str(error)}


def asked(browser: Any, page_file: Path, several: list[dict[str, str]]) -> list[dict[str, Any]]:
    opened = Opened(browser)
    opened.page.goto(page_file.as_uri())
    found: list[dict[str, Any]] = opened.page.evaluate(ASK, several)
    assert not opened.problems
    return found


@pytest.mark.slow
def test_the_page_times_and_counts_as_the_simulator_does(browser: Any, page_file: Path) -> None:
    several = questions(340)
    refused = 0
    for question, found in zip(several, asked(browser, page_file, several), strict=True):
        expected = truth(question)
        assert found.get("error") == expected.get("error"), question
        refused += "error" in expected
        if "error" in expected:
            continue
        assert found["csv"] == expected["csv"], question
        assert found["violations"] == expected["violations"], question
        for name, value in expected["summary"].items():
            assert found["summary"][name] == pytest.approx(value, abs=2e-9), (name, question)
    assert refused < 80


def edited(draw: random.Random, csv: str) -> str:
    """One action moved, removed, doubled or renamed."""
    rows = [line.split(",") for line in csv.splitlines()]
    row = draw.choice([row for row in rows if len(row) > 1])
    place = draw.randrange(len(row))
    change = draw.choice(["move", "move", "move", "remove", "double", "rename"])
    action = row[place] if change == "double" else row.pop(place)
    if change == "rename":
        action = action.replace("F", "B") if "F" in action else action[:1] + "F0"
    if change != "remove":
        row.insert(draw.randint(0, len(row)), action)
    return "".join(",".join(row) + "\n" for row in rows)


@pytest.mark.slow
def test_an_edited_program_is_right_or_wrong_as_the_verifier_says(browser: Any, page_file: Path) -> None:
    """Of schedules that update once; the others' rules are not in the page, which says so."""
    draw = random.Random(4)
    asynchronous = {"pipedream", "pipedream-2bw"}
    plain = [each for each in questions(240) if each["schedule"] not in asynchronous and "error" not in truth(each)]
    several = [{**each, "rows": edited(draw, truth(each)["csv"])} for each in plain]
    right = 0
    for question, found in zip(several, asked(browser, page_file, several), strict=True):
        expected = truth(question)
        if expected.get("error") or found.get("error"):  # a row became empty, or a stage has no action left
            continue
        assert bool(found["violations"]) == bool(expected["violations"]), (question, found, expected["violations"])
        right += not expected["violations"]
        if not expected["violations"]:
            assert found["summary"]["makespan"] == pytest.approx(expected["summary"]["makespan"], abs=2e-9), question
    assert 10 < right < len(several) - 60, "some edits are harmless, most are not"


def test_the_page_in_a_browser(browser: Any, page_file: Path) -> None:
    opened = Opened(browser)
    page = opened.page
    page.goto(page_file.as_uri() + "#schedule=1f1b&ranks=4&microbatches=8")
    shows(page, MAKESPAN, "33")
    shows(page, "#words", "verifies")
    before = pixels(page)
    page.select_option("select[name=schedule]", "zb-h1")
    shows(page, MAKESPAN, "27")
    while pixels(page) == before:  # it is drawn with the next frame
        page.wait_for_timeout(20)
    link = page.url
    assert "#schedule=zb-h1" in link
    without_the_first(page, "the forward of microbatch 0 at stage 0 (0F0) is missing")
    for name in ("csv", "svg"):
        with page.expect_download() as got:
            page.click(f"#{name}")
        assert got.value.suggested_filename == f"schedule.{name}"
    other = Opened(browser)
    other.page.goto(link)
    shows(other.page, MAKESPAN, "27")
    fits_every_width(page)
    assert not opened.problems
    assert not other.problems
