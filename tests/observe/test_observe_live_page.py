"""The live page while a run goes on and when it ends, as a person sees it; each of these was wrong once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from observe_browser import Opened, browser, playwright, shows
from observe_runs import MakeRun, write_run
from test_observe_state import dead_process

from programs import needs
from vpipe.observe.report import write_report
from vpipe.rundir.journal import Beat, Ending, EndingKind, conclude

__all__ = ["browser"]
pytest.importorskip("uvicorn", reason="the live page needs vpipe[dashboard]")
from vpipe.observe.dashboard import Dashboard

pytestmark = [pytest.mark.timeout(180), needs("chromium")]
RUN = "0123456789ab"


def tiles(page: Any) -> list[str]:
    return [str(text) for text in page.locator("#tiles .value").all_inner_texts()]


def test_ranks_that_write_different_steps_still_have_a_timeline(browser: Any, make_run: MakeRun) -> None:
    """Each rank's file was cut before looking for what they share: most of the time there was no step at all."""
    path = make_run("1f1b", 4, 4, steps=20, finished=False)
    for rank in range(4):
        file = path / "events" / f"rank{rank}.jsonl"
        shared, *own = map(json.loads, file.read_text().splitlines())
        lines = [shared, *(line | {"step": 100 + 4 * line["step"] + rank} for line in own)]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    opened = Opened(browser)
    with Dashboard(path) as server:
        page = opened.go(server.url)
        assert re.fullmatch(r"iteration \d+, [\d.]+ ms, [\d,]+ s ago", page.inner_text("#which"))
        assert "–" not in tiles(page)[:4], "loss, tokens, step and bubble are known"
        assert "observe.trace is off" not in page.inner_text("main")
        assert page.evaluate("page.measured.lanes.length") == 4


def test_a_run_that_is_killed_while_it_is_looked_at_is_called_so(browser: Any, make_run: MakeRun) -> None:
    path, gone = make_run("1f1b", 2, 4, finished=False), dead_process()
    opened = Opened(browser)
    with Dashboard(path) as server:
        page = opened.go(server.url)
        assert page.inner_text("#state") == "running"
        Beat(RUN, "training", 7, 100, saved=5, checkpoint="c", writer=gone, launcher=gone).write(path)
        shows(page, "#state", "killed")
        shows(page, "#story", "the checkpoint of iteration 5 is whole")
        assert page.locator("#timeline canvas").count() == 2, "what was measured stays"


@pytest.mark.parametrize("kind", [EndingKind.STOPPED, EndingKind.INTERRUPTED])
def test_a_run_that_was_stopped_is_not_called_finished(browser: Any, make_run: MakeRun, kind: EndingKind) -> None:
    path = make_run("1f1b", 2, 4, finished=False)
    conclude(path, RUN, Ending.of(kind, "asked to", iteration=9).at(9, 9, str(path)))
    page = Opened(browser).go(write_report(path).report.as_uri())
    assert page.inner_text("#state") == kind
    assert "--resume" in page.inner_text("#story")


def test_an_asynchronous_run_is_told_by_the_unit(browser: Any, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", "pipedream", 3, 12)
    facts = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(facts | {"synchronous": False}))
    page = Opened(browser).go(write_report(path).report.as_uri())
    assert "one unit, measured" in page.inner_text("#tiles")
    assert "12 units in" in page.inner_text("#tiles")


def test_a_straggler_is_marked_and_memory_is_drawn_over_time(browser: Any, make_run: MakeRun) -> None:
    path = make_run("1f1b", 4, 4)
    for rank in range(4):
        lines = []
        for step in range(60):
            busy = 2_000_000 if rank == 2 and step >= 45 else 1_000_000
            held = {"weights": 1000, "versions": 1, "optimizer": 2000, "in_step": 10 * step}
            lines.append(json.dumps({"step": step, "iteration": step, "busy": busy, "waited": 9, "memory": held}))
        (path / "events" / f"rank{rank}.steps.jsonl").write_text("\n".join(lines) + "\n")
    page = Opened(browser).go(write_report(path).report.as_uri())
    assert "▲ Rank 2 is a straggler" in page.inner_text("#verdict")
    assert page.evaluate("Object.keys(page.measured.marks)") == ["2"], "beside its lane, too"
    assert "rank 2 ▲" in page.inner_text("#work")
    assert "Memory of tensors" in page.inner_text("#held")
    assert page.locator("#held svg path").count() == 4


def test_what_if_follows_what_the_run_measures(browser: Any, tmp_path: Path) -> None:
    """It was asked once, when the page was opened: for ever by the costs of the first steps."""
    path = write_run(tmp_path / "run", "1f1b", 2, 4, finished=False)
    later = write_run(tmp_path / "later", "1f1b", 2, 4, steps=12, seed=5)
    opened = Opened(browser)
    with Dashboard(path) as server:
        page = opened.go(server.url)
        shows(page, "#whatif-result", "1.00× as fast as this run, simulated")
        before = page.inner_text("#whatif-result")
        page.evaluate("page.askAgain = 0")
        for rank in range(2):
            lines = (later / "events" / f"rank{rank}.jsonl").read_text().splitlines()
            moved = [json.loads(line) for line in lines]
            with (path / "events" / f"rank{rank}.jsonl").open("a") as file:
                file.writelines(json.dumps(line | {"step": line["step"] + 100}) + "\n" for line in moved)
        playwright.expect(page.locator("#whatif-result")).not_to_have_text(before, timeout=40_000)


def test_causes_of_idle_time_are_told_apart_without_colour(browser: Any, make_run: MakeRun) -> None:
    """Busy, and warm-up and drain, were the same grey."""
    page = Opened(browser).go(write_report(make_run("1f1b", 2, 4)).report.as_uri())
    looks = page.evaluate(
        """() => [...document.querySelectorAll("#bubbles .legend i")].map((each) =>
          getComputedStyle(each).backgroundImage)"""
    )
    assert len(looks) == 7
    assert len({re.sub(r"rgba?\([^)]*\)", "", each) for each in looks}) == 7, "seven textures, whatever the colours"
