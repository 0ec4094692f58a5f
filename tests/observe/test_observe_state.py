"""The state of a run on its page: from heartbeat, ending and processes; a failed one says why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from observe_runs import MakeRun, Vpipe

from vpipe.observe.payload import payload, recorded
from vpipe.observe.report import write_report
from vpipe.observe.watcher import Watcher
from vpipe.process import Process
from vpipe.rundir.journal import Beat, Ending, EndingKind, conclude
from vpipe.rundir.reader import open_run
from vpipe.rundir.story import story

RUN = "0123456789ab"


def dead_process() -> Process:
    """A process that was, and is no more."""
    ask = "from vpipe.process import Process; import json; print(json.dumps(Process.here().fields()))"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    found = Process.parse(__import__("json").loads(done.stdout))
    assert found is not None
    return found


def test_a_killed_run_is_not_running_for_ever(make_run: MakeRun) -> None:
    path = make_run("1f1b", 2, 4, finished=False)
    watcher = Watcher(path)
    assert watcher.whole()["state"]["kind"] == "running"
    gone = dead_process()
    Beat(RUN, "training", 7, 100, writer=gone, launcher=gone).write(path)
    (path / "logs").mkdir()
    (path / "logs" / "rank0.log").write_text("iteration 6\n\x1b[31miteration 7\x1b[0m\x07\n")
    found = watcher.change()["state"]
    assert found["kind"] == "killed"
    assert found["log"] == ["iteration 6", "iteration 7"], "without what would move a terminal"
    assert open_run(path).ended


@pytest.mark.parametrize("kind", list(EndingKind))
def test_every_ending_is_called_by_its_name(make_run: MakeRun, kind: EndingKind) -> None:
    path = make_run("1f1b", 2, 4, finished=False)
    conclude(path, RUN, Ending.of(kind, "why it ended", rank=1, details="Traceback\nValueError: first"))
    found = payload(open_run(path), [])["state"]
    assert (found["kind"], found["sentence"], found["ended"]) == (kind, "why it ended", True)
    assert found["bad"] == (kind in (EndingKind.FAILED, EndingKind.KILLED, EndingKind.LOST))
    assert "ValueError: first" in found["details"]


def test_a_resumed_run_is_not_ended_by_the_summary_of_the_one_before(make_run: MakeRun) -> None:
    path = make_run("1f1b", 2, 4)
    assert open_run(path).ended
    Beat("ba9876543210", "training", 3, 100).write(path)
    assert payload(open_run(path), [])["state"]["kind"] == "running"


def failed_early(path: Path) -> Path:
    path.mkdir()
    (path / "config.yaml").write_text("model:\n  name: gpt\n")
    Beat(RUN).write(path)
    cause = Ending.of(EndingKind.FAILED, "model.vocab_size is 64, but the data set has 1024 token ids", 2, rank=1)
    conclude(path, RUN, cause)
    (path / "logs").mkdir()
    (path / "logs" / "rank1.log").write_text("loading\nvpipe: model.vocab_size is 64\n")
    return path


def test_a_run_that_failed_before_it_started_says_so_on_page_and_report(tmp_path: Path, vpipe: Vpipe) -> None:
    path = failed_early(tmp_path / "early")
    found = Watcher(path).whole()
    assert found["state"]["kind"] == "failed"
    assert found["state"]["log"] == ["loading", "vpipe: model.vocab_size is 64"]
    done = vpipe("report", str(path))
    assert done.returncode == 0, done.stderr
    text = (path / "report.html").read_text()
    assert "model.vocab_size is 64, but the data set has 1024 token ids" in text
    assert write_report(path).trace is None


def test_a_run_without_a_heartbeat_is_judged_by_its_files(make_run: MakeRun) -> None:
    path = make_run("1f1b", 2, 4)
    (path / "state.json").unlink()
    (path / "summary.json").write_text("{}")
    assert story(path)["kind"] == "finished"
    (path / "summary.json").unlink()
    assert story(path)["kind"] == "unknown"
    assert not open_run(path).ended
    assert recorded(open_run(path))
