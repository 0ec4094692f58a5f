"""Run directories: whole, truncated, still being written, and none at all."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from observe_runs import MakeRun

from vpipe.errors import UserError
from vpipe.observe.payload import payload, recorded
from vpipe.rundir.facts import RunFacts
from vpipe.rundir.reader import RunDirectory, open_run
from vpipe.rundir.recorder import Recorder
from vpipe.runtime.job import Record
from vpipe.schedule.action import parse
from vpipe.schedule.catalog import build
from vpipe.schedule.lower import lower


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text("x"), "is a file"),
        (lambda path: ((_ := path.parent / "runs").mkdir(), (_ / "run.json").write_text("{}")), "did you mean '"),
        (lambda path: path.mkdir(), "no run.json"),
        (lambda path: (path.mkdir(), (path / "config.yaml").write_text("")), "has not started yet"),
        (
            lambda path: (path.mkdir(), (path / "run.json").write_text('{"schedule": "1f')),
            "broken or still being written",
        ),
        (lambda path: (path.mkdir(), (path / "run.json").write_text("[1]")), "holds no object"),
        (
            lambda path: ((path / "one").mkdir(parents=True), (path / "one" / "run.json").write_text("{}")),
            "did you mean",
        ),
    ],
)
def test_what_is_no_run_is_refused_in_one_sentence(tmp_path: Path, vpipe: object, prepare: object, says: str) -> None:
    path = tmp_path / "run"
    prepare(path)  # type: ignore[operator]
    with pytest.raises(UserError, match=says):
        open_run(path)
    done = vpipe("report", str(path))  # type: ignore[operator]
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "facts",
    [{}, {"program": 3}, {"program": "0F0,0B0\n", "placement": [[0], [1]]}, {"program": "0F0,0B0\n", "placement": "x"},
     {"program": "0F0,0B0\n", "versions": "newer"}, {"program": "0F0,zz\n"},
     {"program": "0F0,0B0\n", "placement": [[7]]}],
)  # fmt: skip
def test_facts_that_contradict_are_refused(tmp_path: Path, facts: object) -> None:
    (tmp_path / "run.json").write_text(json.dumps(facts))
    with pytest.raises(UserError):
        _ = open_run(tmp_path).program


def test_a_run_that_is_being_written_is_read_so_far(make_run: MakeRun) -> None:
    path = make_run("1f1b", 2, 4, finished=False)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "iterat')
    run = open_run(path)
    assert len(run.metrics()) == 63
    assert not run.ended
    assert not run.notes
    assert payload(run, recorded(run))["state"]["kind"] == "running"


def test_damage_is_noted_and_the_rest_is_shown(make_run: MakeRun) -> None:
    path = make_run("1f1b", 2, 4)
    lines = (path / "events" / "rank0.jsonl").read_text().splitlines()
    lines[1] = lines[1][: len(lines[1]) // 2]
    lines[2] = lines[2].replace("0F0", "0Q0")
    (path / "events" / "rank0.jsonl").write_text("\n".join(lines)[:-7])
    (path / "plan.json").write_text("{")
    run = open_run(path)
    assert [step[0].step for step in recorded_steps(run)] == [0, 3, 4]
    data = payload(run, recorded(run))
    assert len(data["steps"]) == 3
    text = " ".join(data["notes"])
    assert "broken lines" in text
    assert "0Q0" in text
    assert "plan.json" in text
    assert "middle of a line" in text


def recorded_steps(run: object) -> list[list[object]]:
    return run.common_steps()  # type: ignore[attr-defined, no-any-return]


def test_a_run_without_events_says_so(make_run: MakeRun) -> None:
    path = make_run("1f1b", 2, 4)
    for file in (path / "events").iterdir():
        file.unlink()
    run = open_run(path)
    assert "no step has been recorded" in payload(run, recorded(run))["notes"][0]


def test_a_loss_that_is_not_finite_is_a_gap(make_run: MakeRun) -> None:
    path = make_run("1f1b", 2, 4)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "iteration": 999, "loss": NaN, "seconds": Infinity}\n')
    run = open_run(path)
    curves = payload(run, recorded(run))["metrics"]["train"]
    assert curves["loss"][-1] is None
    json.dumps(curves, allow_nan=False)


def steps_of(recorder: Recorder, path: Path, count: int) -> list[int]:
    program = lower(build("1f1b", 1, 2))
    for number in range(count):
        records = [
            SimpleNamespace(action=a, begin=10 * i, ready=10 * i + 1, end=10 * i + 9)
            for i, a in enumerate(program.rows[0])
        ]
        recorder.record(number, number, records, {"weights": 4})
    recorder.close()
    return [json.loads(line)["step"] for line in (path / "events" / "rank0.jsonl").read_text().splitlines()]


def test_the_recorder_keeps_the_last_steps_in_full_and_a_line_for_each(tmp_path: Path) -> None:
    assert steps_of(Recorder(tmp_path, 0, keep=3, offset_ns=5), tmp_path, 10) == [7, 8, 9]
    summaries = (tmp_path / "events" / "rank0.steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in summaries] == list(range(10))
    line = json.loads((tmp_path / "events" / "rank0.jsonl").read_text().splitlines()[0])
    assert line["origin_ns"] == 5
    assert line["actions"][0] == ["0F0", 0, 1, 9, 0, 0]
    assert line["memory"] == {"weights": 4}
    for text, *_ in line["actions"]:
        parse(text)


def test_summaries_rotate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.rundir.recorder.MAX_LINES", 4)
    for _ in range(3):
        steps_of(Recorder(tmp_path, 0), tmp_path, 3)
    files = sorted(file.name for file in (tmp_path / "events").iterdir())
    assert files == ["rank0.jsonl", "rank0.steps.jsonl"] or "rank0.steps.old.jsonl" in files


def test_a_disk_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("in the way")
    recorder = Recorder(tmp_path, 0)
    recorder.record(0, 0, [], None)
    recorder.close()
    assert recorder.problem is not None
    assert "no longer recorded" in recorder.problem


def test_waits_for_a_core_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Beside lines of before, which have none; more than an action's own time is none of it."""
    row = [Record(parse("0F0"), 0, 10, 30, late=4, stalled=7), Record(parse("0B0"), 30, 40, 50)]
    with closing(Recorder(tmp_path, 0)) as recorder:
        recorder.record(0, 1, row)
    line = json.loads((tmp_path / "events" / "rank0.jsonl").read_text())
    assert [len(cell) for cell in line["actions"]] == [8, 6]
    read = RunDirectory(tmp_path, RunFacts(program="0F0,0B0\n"))
    first, second = read.common_steps()[0][0].events
    assert (first.late, first.stalled, first.work) == (4, 7, 13)
    assert (second.late, second.stalled, second.work) == (0, 0, 10)
    line["actions"][0][6:] = [999, 999]
    (tmp_path / "events" / "rank0.jsonl").write_text(json.dumps(line) + "\n")
    assert read.common_steps()[0][0].events[0].work == 0
