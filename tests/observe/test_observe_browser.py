"""The pages in a real browser: Debian's chromium through playwright."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from observe_browser import Opened, browser, pixels, shows
from observe_runs import MakeRun, write_run

from programs import needs
from vpipe.errors import UserError
from vpipe.observe.report import write_report
from vpipe.rundir.journal import Ending, EndingKind, conclude

pytestmark = [pytest.mark.timeout(180), needs("chromium")]

__all__ = ["browser"]
HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=2>\"'&{{7*7}}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_opens_from_disk_zooms_and_tells(browser: Any, make_run: MakeRun, scheme: str) -> None:
    report = write_report(make_run("zb-h1", 4, 8)).report
    opened = Opened(browser, color_scheme=scheme)
    page = opened.go(report.as_uri())
    assert page.get_attribute("html", "data-theme") == scheme
    assert page.title() == report.parent.name
    whole = pixels(page)
    box = page.locator("#timeline canvas").first.bounding_box()
    x, y = box["x"] + 110, box["y"] + 10
    page.mouse.move(x, y)
    page.wait_for_selector("#tip:not([hidden])")
    assert "forward" in page.inner_text("#tip")
    assert "stage 0 on rank 0" in page.inner_text("#tip")
    page.mouse.wheel(0, -300)
    page.mouse.move(box["x"] + 600, box["y"] + 200)
    page.wait_for_timeout(200)
    near = pixels(page)
    assert near != whole
    page.mouse.down()
    page.mouse.move(box["x"] + 400, y)
    page.mouse.up()
    page.mouse.move(5, 5)
    page.wait_for_timeout(200)
    assert pixels(page) not in (whole, near)
    page.click("#reset")
    page.wait_for_timeout(200)
    assert pixels(page) == whole
    page.click("#rows")
    page.click("#theme")
    page.wait_for_timeout(200)
    assert pixels(page) != whole
    assert "100.0 %" not in page.inner_text("#bubbles")
    assert page.locator("#bubbles > div tbody tr").count() == 6
    assert "verifies" in page.inner_text("#verified")
    assert not opened.problems
    assert all(url.startswith("file:") for url in opened.requests)


def test_the_step_slider_and_the_replay(browser: Any, make_run: MakeRun) -> None:
    opened = Opened(browser)
    page = opened.go(write_report(make_run("1f1b", 4, 8, steps=5)).report.as_uri())
    assert "iteration 40," in page.inner_text("#which")
    page.focus("#step")
    page.keyboard.press("ArrowLeft")
    assert "iteration 30," in page.inner_text("#which")
    page.click("#play")
    shows(page, "#which", "iteration 40,")
    assert not opened.problems


def test_what_a_rank_swaps_has_a_lane_of_its_own(browser: Any, make_run: MakeRun) -> None:
    opened = Opened(browser)
    page = opened.go(write_report(make_run("gpipe", 2, 4, swapped=[1])).report.as_uri())
    names = "() => page.%s.lanes.map(lane => [lane.name.trim(), lane.items.map(item => item.kind).join(' ')])"
    for which in ("measured", "simulated"):
        lanes = page.evaluate(names % which)
        assert [name for name, _ in lanes] == ["rank 0", "rank 1", "swaps"]
        assert lanes[2][1].split().count("OUT") == lanes[2][1].split().count("IN") > 1
        assert "OUT" not in lanes[1][1]
    assert "swap out" in page.inner_text("#kinds")
    spot = page.evaluate(
        """() => { const t = page.measured, box = t.canvas.getBoundingClientRect(), item = t.lanes[2].items[0];
          return [box.left + t.x((item.begin + item.end) / 2), box.top + 2 * (t.row + t.gap) + t.row / 2]; }"""
    )
    page.mouse.move(*spot)
    page.wait_for_selector("#tip:not([hidden])")
    assert "swap out, microbatch 0" in page.inner_text("#tip")
    page.click("#rows")
    page.wait_for_timeout(200)
    assert [name for name, _ in page.evaluate(names % "measured")] == ["stage 0", "stage 1", "swaps"]
    assert not opened.problems


def test_the_report_prints(browser: Any, make_run: MakeRun, tmp_path: Path) -> None:
    opened = Opened(browser, color_scheme="dark")
    page = opened.go(write_report(make_run("1f1b", 4, 8)).report.as_uri())
    paper = page.pdf(format="A4", print_background=True)
    assert paper.startswith(b"%PDF")
    assert not opened.problems


def test_hostile_names_stay_text(browser: Any, make_run: MakeRun) -> None:
    path = make_run("1f1b", 2, 4, name=HOSTILE, layer=HOSTILE, finished=False)
    (path / "config.yaml").write_text(f"model: {HOSTILE}\n")
    (path / "plan.json").write_text(json.dumps({"schedule": HOSTILE, HOSTILE: HOSTILE, "stage_memory": [{HOSTILE: 1}]}))
    (path / "summary.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    facts = json.loads((path / "run.json").read_text())
    facts |= {"schedule": HOSTILE, "command": [HOSTILE], "vpipe": HOSTILE}
    (path / "run.json").write_text(json.dumps(facts))
    hostile = path.rename(path.with_name("x<img src=x onerror=alert(1)>"))
    opened = Opened(browser)
    page = opened.go(write_report(hostile).report.as_uri())
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2
    assert HOSTILE in page.inner_text("header")
    page.click("#config summary")
    assert HOSTILE in page.inner_text("#config pre")
    assert not opened.problems


dashboard = pytest.importorskip("vpipe.observe.dashboard", reason="the live page")
pytest.importorskip("uvicorn", reason="the live page needs vpipe[dashboard]")


def test_the_live_page_follows_a_run_and_survives_its_server(browser: Any, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", "1f1b", 4, 8, finished=False)
    opened = Opened(browser)
    with dashboard.Dashboard(path) as server:
        page = opened.go(server.url)
        assert page.inner_text("#state") == "running"
        with (path / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "train", "iteration": 77777, "loss": 1.2345}\n')
        shows(page, "#tiles", "77,777")
        conclude(path, "0123456789ab", Ending.of(EndingKind.FINISHED, "done"))
        shows(page, "#state", "finished")
        assert not opened.problems
        port, token = server.port, server.token
    shows(page, "#state", "lost")
    with dashboard.Dashboard(path, port, token):
        shows(page, "#state", "finished")


def test_what_if(browser: Any, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", "1f1b", 4, 8)
    opened = Opened(browser)
    with dashboard.Dashboard(path) as server:
        page = opened.go(server.url)
        shows(page, "#whatif-result", "1.00× as fast as this run, simulated")
        page.select_option("select[name=costs]", "own")
        shows(page, "#whatif-result", "makespan 33")
        before = pixels(page, "#whatif canvas")
        page.select_option("select[name=schedule]", "zb-h1")
        shows(page, "#whatif-result", "makespan 27")
        assert pixels(page, "#whatif canvas") != before
        page.fill("input[name=microbatches]", "99999")
        shows(page, "#whatif-error", "at most")
        page.fill("input[name=microbatches]", "16")
        page.fill("input[name=latency]", "1")
        shows(page, "#whatif-result", "16 microbatches")
        assert not opened.problems


def test_eight_stages_and_sixty_four_microbatches_are_smooth(browser: Any, tmp_path: Path) -> None:
    """A redraw of both timelines while zooming: the median stays within a frame of 30 a second, on a shared core."""
    path = write_run(tmp_path / "run", "1f1b", 8, 64, steps=3)
    opened = Opened(browser)
    page = opened.go(write_report(path).report.as_uri())
    took = page.evaluate(
        """() => {
          const times = [];
          for (let i = 0; i < 30; i += 1) {
            const began = performance.now();
            page.view.zoom(i % 2 ? 0.8 : 1.25, 1e5);
            for (const each of page.view.drawings) each.draw();
            times.push(performance.now() - began);
          }
          return times.sort((a, b) => a - b)[15];
        }"""
    )
    assert took < 33, f"{took} ms"


def status(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_strangers_are_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", "1f1b", 2, 4)
    with dashboard.Dashboard(path) as server:
        base = f"http://127.0.0.1:{server.port}"
        for where in ("/", "/events", "/whatif?schedule=1f1b", "/schedules", "/?token=", "/?token=guess"):
            assert status(base + where) == 403
        assert status(server.url) == 200
        assert status(server.url, Host="evil.example") == 403
        assert status(base + "/../../etc/passwd?token=" + server.token) == 404
        assert server._socket.getsockname()[0] == "127.0.0.1"


def test_a_port_in_use_is_one_sentence(make_run: MakeRun, vpipe: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} cannot be used"):
            dashboard.Dashboard("x", port)
        done = vpipe("dashboard", str(make_run("1f1b", 2, 4)), "--port", str(port))
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1


def test_many_browsers_share_one_reading(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", "1f1b", 2, 4)
    with dashboard.Dashboard(path) as server:
        found: list[bytes] = []

        def read() -> None:
            with urllib.request.urlopen(server.url.replace("/?", "/events?"), timeout=20) as reply:
                while not (line := reply.readline()).startswith(b"event:"):
                    pass
                found.append(line)

        threads = [threading.Thread(target=read) for _ in range(5)]
        for thread in threads:
            thread.start()
        began = time.monotonic()
        for thread in threads:
            thread.join(30)
        assert len(found) == 5, time.monotonic() - began
