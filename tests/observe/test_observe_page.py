"""What a person sees, in a real browser: verdict, failures, narrow screens, many ranks, many runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from observe_browser import Opened, browser, shows
from observe_runs import MakeRun, write_run

from programs import needs
from vpipe.observe import comparison
from vpipe.observe.dashboard import Dashboard
from vpipe.observe.report import write_report
from vpipe.rundir.journal import Beat, Ending, EndingKind, conclude
from vpipe.schedule.simulate import simulate
from vpipe.schedule.svg import svg

__all__ = ["browser"]
pytestmark = [pytest.mark.timeout(180), needs("chromium")]
RUN = "0123456789ab"

CLIPPED = """() => [...document.querySelectorAll("section, table, .tile, .says, pre, svg.chart, canvas")].filter((each) => {
  const box = each.getBoundingClientRect();
  return box.width && (box.left < -0.5 || box.right > innerWidth + 0.5);
}).map((each) => each.tagName + "#" + each.id + "." + each.className)"""


@pytest.mark.parametrize("width", [390, 800, 1400])
def test_no_column_is_clipped(browser: Any, make_run: MakeRun, width: int) -> None:
    opened = Opened(browser)
    opened.page.set_viewport_size({"width": width, "height": 900})
    page = opened.go(write_report(make_run("zb-h1", 4, 8)).report.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CLIPPED) == []
    assert not opened.problems


def test_sixteen_ranks_fit_on_one_screen(browser: Any, make_run: MakeRun) -> None:
    opened = Opened(browser)
    page = opened.go(write_report(make_run("1f1b", 16, 16, steps=3)).report.as_uri())
    assert page.evaluate("page.measured.lanes.length") == 16
    assert page.locator("#timeline").bounding_box()["height"] <= 800, "measured and simulated together"
    assert page.evaluate("page.measured.row") >= 13, "and still with letters"


def test_kinds_are_told_apart_without_colour(browser: Any, make_run: MakeRun) -> None:
    """By letters, and by textures: boxes of forward, I and W differ as grey pictures, not in brightness alone."""
    opened = Opened(browser)
    page = opened.go(write_report(make_run("zb-h1", 2, 2)).report.as_uri())
    for letter in ("F forward", "I input gradient", "W weight gradient"):
        assert letter in page.inner_text("#kinds")
    edges = page.evaluate(
        """() => ["F", "B", "I", "W"].map((kind) => {
          const pen = document.createElement("canvas").getContext("2d");
          pen.fillStyle = page.data.textures[kind] ? weave(pen, "#808080", page.data.textures[kind]) : "#808080";
          pen.fillRect(0, 0, 24, 24);
          return pen.getImageData(0, 0, 24, 24).data.filter((_, index) => index % 4 === 0).join(" ");
        })"""
    )
    assert len(set(edges)) == 4, "the same grey, four pictures"


def test_an_svg_has_letters_and_textures() -> None:
    from vpipe.schedule.catalog import build

    drawn = svg(simulate(build("zb-h1", 2, 2)), "zb-h1")
    for word in (">F0<", ">I0<", ">W1<", 'id="pI"', 'id="pW"'):
        assert word in drawn


def test_the_verdict_and_the_definitions_stand_on_the_page(browser: Any, make_run: MakeRun) -> None:
    opened = Opened(browser)
    page = opened.go(write_report(make_run("1f1b", 4, 8, steps=14)).report.as_uri())
    assert page.locator("#verdict .says").inner_text()
    assert "vpipe plan" in page.inner_text("#verdict code")
    for name in ("#loss", "#throughput", "#norm", "#rate", "#work", "#waits"):
        assert page.locator(f"{name} svg path").first.get_attribute("d")
    assert page.locator("#tiles .defined").count() >= 4
    page.click("#bubbles summary")
    assert "from the end of the step before" in page.inner_text("#bubbles details").lower()
    assert not opened.problems


def test_a_failed_run_shows_its_first_cause_and_its_last_lines(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "early"
    (path / "logs").mkdir(parents=True)
    Beat(RUN).write(path)
    opened = Opened(browser)
    with Dashboard(path) as server:
        opened.page.goto(server.url)
        shows(opened.page, "#state", "starting")
        (path / "logs" / "rank1.log").write_text("reading data\n<b>not bold</b>\n")
        cause = Ending.of(
            EndingKind.FAILED,
            "stage 1, 1F0: shapes do not match",
            rank=1,
            details="frame\n" * 60 + "ValueError: 3 and 4",
        )
        conclude(path, RUN, cause)
        shows(opened.page, "#state", "failed")
        shows(opened.page, "#story", "The run failed on rank 1")
        shows(opened.page, "#story", "shapes do not match")
        shows(opened.page, "#story", "ValueError: 3 and 4")
        shows(opened.page, "#log", "<b>not bold</b>")
        ends = "[...document.querySelectorAll('#story pre')].map((e) => e.scrollHeight - e.scrollTop - e.clientHeight)"
        assert max(opened.page.evaluate(ends)) <= 1, "the end of a traceback is what one sees"
    assert not [each for each in opened.problems if "ERR_" not in each]


def test_a_directory_of_runs_is_a_list_and_any_two_lie_side_by_side(browser: Any, tmp_path: Path) -> None:
    for name, schedule, ranks in (("one", "1f1b", 4), ("two", "gpipe", 2), ("three", "zb-h1", 2)):
        write_run(tmp_path / "runs" / name, schedule, ranks, 4)
    opened = Opened(browser)
    with Dashboard(tmp_path / "runs") as server:
        page = opened.page
        page.goto(server.url)
        shows(page, "#runs", "zb-h1")
        assert page.locator("#runs tbody tr").count() == 3
        assert page.is_disabled("#compare")
        page.check("input[aria-label='choose one']")
        page.check("input[aria-label='choose two']")
        page.click("#compare")
        shows(page, "#columns", "gpipe · 2 ranks")
        assert page.locator("#columns canvas").count() == 2
        assert page.locator("#both svg path").count() == 4
        page.click("text=all runs")
        page.click("text=three")
        shows(page, "header", "zb-h1")
        page.wait_for_selector("#timeline canvas")
        page.goto(server.url + "&run=../two")
        page.wait_for_timeout(300)
        assert page.locator("#timeline").count() == 0, "only names of the list are looked up"
    assert not [each for each in opened.problems if "404" not in each and "ERR_" not in each]


def result(name: str, losses: list[float]) -> dict[str, Any]:
    curve = [[0.1 * number, number, loss] for number, loss in enumerate(losses, 1)]
    return {"name": name, "schedule": name, "mode": "bsp", "num_microbatches": 4, "repeat": 0, "status": "done",
            "throughput_tokens_per_second": 1000.0, "losses": [[n, loss] for _, n, loss in curve], "curve": curve,
            "final_loss": losses[-1], "idle_by_cause": [0.1, 0, 0, 0, 0], "bubble": 0.1}  # fmt: skip


@pytest.mark.parametrize("losses", [[3.5], [5.0, 4.0, 3.0]], ids=["one point", "equal curves"])
def test_a_comparison_draws_single_points_and_equal_curves(browser: Any, tmp_path: Path, losses: list[float]) -> None:
    found = [result(name, losses) for name in ("gpipe", "1f1b", "zb-h1")]
    _, path = comparison.write(tmp_path, json.loads(json.dumps(found)), {"title": "sweep"})
    opened = Opened(browser)
    opened.page.goto(path.as_uri())
    opened.page.wait_for_selector("svg.chart")
    chart = opened.page.locator("svg.chart[aria-label='gpipe, 1f1b, zb-h1']").first
    if len(losses) == 1:
        sizes = chart.evaluate("each => [...each.querySelectorAll('circle')].map(dot => Number(dot.getAttribute('r')))")
    else:
        sizes = chart.evaluate(
            "each => [...each.querySelectorAll('path')].map(line => parseFloat(line.style.strokeWidth))"
        )
    assert len(sizes) == 3
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3, "each is wider than the one above it, so all are seen"
    assert not opened.problems
