"""What a live page may show: at every moment a fresh step of all ranks, however differently they write."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from observe_runs import MakeRun

from vpipe.observe.payload import payload
from vpipe.observe.watcher import LIVE_STEPS, Watcher
from vpipe.rundir import recorder as recording
from vpipe.rundir.facts import RunFacts
from vpipe.rundir.reader import RunDirectory, open_run
from vpipe.rundir.recorder import Recorder
from vpipe.schedule.catalog import build
from vpipe.schedule.lower import lower
from vpipe.schedule.program import to_csv

PROGRAM = lower(build("1f1b", 4, 4))


class Idle:
    """A thread that does nothing: the test decides when a recorder writes."""

    def __init__(self, **_: Any) -> None: ...
    def start(self) -> None: ...
    def join(self) -> None: ...


def records(rank: int, at: float, seconds: float) -> list[Any]:
    row = PROGRAM.rows[rank]
    part = seconds / len(row)
    times = [round((at + part * index) * 1e9) for index in range(len(row) + 1)]
    return [
        SimpleNamespace(action=action, begin=times[i], ready=times[i], end=times[i + 1]) for i, action in enumerate(row)
    ]


@pytest.mark.parametrize("seconds", [0.008, 0.04, 0.3, 0.7, 3.0])
def test_at_every_moment_there_is_a_step_of_all_ranks_within_two_seconds_or_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Ranks write at moments of their own and judge what a step costs differently; one look a second found nothing in
    28 of 31 samples."""
    monkeypatch.setattr(recording.threading, "Thread", Idle)
    dice = random.Random(0)
    recorders = [Recorder(tmp_path, rank) for rank in range(4)]
    prices = (1e-5, 3e-4, 8e-4, 5e-3)
    run = RunDirectory(tmp_path, RunFacts(program=to_csv(PROGRAM)))
    at, step, look = 0.0, 0, 1.0
    ends: dict[int, float] = {}
    samples = 0
    while samples < 12:
        took = seconds * dice.uniform(0.9, 1.3)
        for rank, recorder in enumerate(recorders):
            recorder._price = prices[rank]
            recorder.record(step, step, records(rank, at, took))
            if recorder._wake.is_set() and dice.random() < 0.9:  # now and then a thread is late by a step
                recorder._wake.clear()
                recorder._write(paused=False)
        at += took
        ends[step] = at
        step += 1
        if at > look:
            look = max(look + 1.0, at)
            samples += 1
            newest = run.common_steps()[-1][0].step
            assert at - ends[newest] <= 2.0 or step - 1 - newest <= 2, f"step {newest} of {step - 1} after {at:.1f} s"


def test_in_a_pause_the_newest_steps_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording.threading, "Thread", Idle)
    recorders = [Recorder(tmp_path, rank) for rank in range(4)]
    for rank, recorder in enumerate(recorders):
        for step in range(100 + (rank == 3)):
            recorder.record(step, step, records(rank, step * 0.01, 0.01))
        recorder._write(paused=False)
        recorder._write(paused=True)
    run = RunDirectory(tmp_path, RunFacts(program=to_csv(PROGRAM)))
    assert run.common_steps()[-1][0].step == 99


def test_what_ranks_share_is_found_before_it_is_cut(make_run: MakeRun) -> None:
    path = make_run("1f1b", 4, 4, steps=20, finished=False)
    for rank in range(4):
        file = path / "events" / f"rank{rank}.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        kept = [line for number, line in enumerate(lines) if number == 2 or number % 4 == rank]
        file.write_text("".join(kept))
    run = open_run(path)
    assert [step[0].step for step in run.common_steps(4)] == [2]
    watcher = Watcher(path)
    for _ in range(2):
        assert [step["step"] for step in watcher.change()["steps"]] == [2]
        with (path / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "train", "iteration": 1000}\n')


def test_a_live_page_reads_a_step_once(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run("1f1b", 2, 4, steps=12, finished=False)
    watcher = Watcher(path)
    assert [step["step"] for step in watcher.whole()["steps"]] == list(range(12 - LIVE_STEPS, 12))
    read: list[str] = []
    known = RunDirectory._parsed
    monkeypatch.setattr(RunDirectory, "_parsed", lambda *args: (read.append(args[2]), known(*args))[1])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "iteration": 1000}\n')
    assert len(watcher.change()["steps"]) == LIVE_STEPS
    assert not read


@pytest.mark.parametrize(("traced", "says"), [(True, "no step has been recorded"), (False, "observe.trace is off")])
def test_tracing_is_called_off_only_where_it_is(make_run: MakeRun, traced: bool, says: str) -> None:
    path = make_run("1f1b", 2, 4, trace=traced)
    for file in (path / "events").iterdir():
        file.unlink()
    assert says in payload(open_run(path), [])["notes"][0]
