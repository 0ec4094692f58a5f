"""What a reader of a run directory concludes: from the ending that was written, else from the heartbeat."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from vpipe.process import Process, resident_bytes
from vpipe.rundir import state, writing
from vpipe.rundir.journal import (
    CODES,
    Beat,
    Ending,
    EndingKind,
    Heart,
    conclude,
    conclude_from_outside,
    read_ending,
)
from vpipe.rundir.layout import STATE
from vpipe.rundir.story import story


def dead() -> Process:
    """A process of this machine that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    me = Process.here()
    stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    found = Process(me.host, me.machine, child.pid, int(stat[19]))
    assert found.alive
    child.communicate()
    return found


def test_a_living_writer_is_a_running_run(tmp_path: Path) -> None:
    assert state.of(tmp_path).kind == "starting"
    Beat("a" * 12).write(tmp_path)
    assert state.of(tmp_path).kind == "starting"
    Beat("a" * 12, "training", 7, 100).write(tmp_path)
    found = state.of(tmp_path)
    assert (found.kind, found.ended, story(tmp_path)["iteration"]) == ("running", False, 7)


def test_a_run_whose_processes_are_gone_was_killed(tmp_path: Path) -> None:
    Beat("a" * 12, "training", 7, 100, saved=5, checkpoint="x", writer=dead()).write(tmp_path)
    found = state.of(tmp_path)
    assert (found.kind, found.ended) == ("killed", True)
    assert found.ending is not None
    assert (found.ending.iteration, found.ending.saved) == (7, 5)
    Beat("a" * 12, "training", 7, 100, writer=dead(), launcher=Process.here()).write(tmp_path)
    assert state.of(tmp_path).kind == "running", "its launcher is about to say why"


def test_another_process_with_the_same_pid_is_not_the_writer(tmp_path: Path) -> None:
    me = Process.here()
    Beat("a" * 12, "training", writer=Process(me.host, me.machine, me.pid, me.started - 1)).write(tmp_path)
    assert state.of(tmp_path).kind == "killed"
    assert not Process(me.host, me.machine, me.pid, me.started - 1).kill(), "nor is it signalled"
    assert not Process(me.host, "elsewhere", me.pid, me.started).kill()


def test_another_machine_is_lost_when_it_is_silent(tmp_path: Path) -> None:
    beat = Beat("a" * 12, "training", writer=Process("far", "elsewhere", 1, 1))
    beat.write(tmp_path)
    assert state.of(tmp_path).kind == "running"
    old = writing.read(tmp_path / STATE)
    assert old is not None
    writing.replace(tmp_path / STATE, old | {"time": beat.time - 60})
    assert state.of(tmp_path).kind == "lost"


@pytest.mark.parametrize("kind", EndingKind)
def test_an_ending_is_read_as_it_was_written(kind: EndingKind, tmp_path: Path) -> None:
    Beat("a" * 12, writer=dead()).write(tmp_path)
    told = Ending.of(kind, "so it was", rank=3, details="Traceback").at(7, 5, "there")
    conclude(tmp_path, "a" * 12, told)
    found = state.of(tmp_path)
    assert found.ending == told
    assert found.kind == kind
    assert story(tmp_path)["code"] == CODES[kind]


def test_the_ending_of_the_run_before_does_not_count(tmp_path: Path) -> None:
    conclude(tmp_path, "b" * 12, Ending.of(EndingKind.FINISHED, ""))
    Beat("a" * 12, "training").write(tmp_path)
    assert state.of(tmp_path).kind == "running"


def test_broken_files_are_no_state(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"run": 3}', '{"writer": 5}', "\xff"):
        (tmp_path / STATE).write_text(text)
        assert state.of(tmp_path).kind == "starting"


def test_patience_is_measured(tmp_path: Path) -> None:
    assert Beat.patience(tmp_path) == 60
    Beat("a" * 12, update_seconds=20.0, save_seconds=4.0).write(tmp_path)
    assert Beat.patience(tmp_path) == 58


def test_a_run_on_its_way_out_is_waited_for_as_long_as_its_heart_beats(tmp_path: Path) -> None:
    """The first checkpoint of a large model may take longer than any patience that was measured without one."""
    assert Beat.more_patience(tmp_path) == 0
    for phase, waits in (("training", False), ("saving", False), ("ending", True)):
        heart = Heart(tmp_path, "a" * 12)
        heart.tell(lambda beat, phase=phase: setattr(beat, "phase", phase), at_once=True)  # type: ignore[misc]
        assert (Beat.more_patience(tmp_path) > 0) is waits, "a save beside training does not end a run that hangs"
    old = writing.read(tmp_path / STATE)
    assert old is not None
    writing.replace(tmp_path / STATE, old | {"time": heart.beat.time - 60})
    assert Beat.more_patience(tmp_path) == 0


def test_the_heart_writes_what_it_is_told(tmp_path: Path) -> None:
    heart = Heart(tmp_path, "a" * 12).start()
    heart.tell(lambda beat: setattr(beat, "iteration", 9))
    heart.stop()
    found = Beat.read(tmp_path)
    assert found is not None
    assert found.iteration == 9
    assert [path.name for path in tmp_path.iterdir()] == [STATE], "nothing is left beside it"


def test_a_process_that_is_itself_is_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    me = Process.here()
    stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    assert Process(me.host, me.machine, child.pid, int(stat[19])).kill()
    assert child.wait() == -signal.SIGKILL
    assert not Process(me.host, me.machine, os.getpid(), 0).kill()


def test_the_memory_of_this_process_is_what_psutil_says() -> None:
    kept = bytearray(b"x" * 2**26)
    theirs, ours = psutil.Process().memory_info().rss, resident_bytes()
    assert abs(ours - theirs) < 2**25
    assert len(kept) < ours


@pytest.mark.parametrize(
    ("own", "stays"),
    [(Ending.finished(5), True), (Ending.asked(signal.SIGINT, 5), True), (Ending.of(EndingKind.LOST, "gone"), False)],
)
def test_what_ends_the_processes_after_the_end_is_not_how_the_run_ended(
    own: Ending, stays: bool, tmp_path: Path
) -> None:
    """A second Ctrl-C while a finished run left was told as "interrupted at once"; a first cause is still told."""
    conclude(tmp_path, "r1", own, {"final_loss": 1.0})
    later = Ending.of(EndingKind.INTERRUPTED, "interrupted at once")
    assert conclude_from_outside(tmp_path, "r1", later) == (own if stays else later)
    assert read_ending(tmp_path, "r1") == (own if stays else later)
    assert conclude_from_outside(tmp_path, "r2", later) == later, "the ending of another run says nothing"
