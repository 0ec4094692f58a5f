"""Runs that share a directory: branches are not mixed, one writes at a time, and nothing is lost by mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from train_runs import Run, run, tiny

from vpipe.cli import train as cli
from vpipe.config import PipelineConfig, load
from vpipe.errors import UserError
from vpipe.launch import kubernetes, slurm
from vpipe.records import parsed
from vpipe.rundir import claim, lineage, manifest
from vpipe.rundir.lineage import Ancestor, Line
from vpipe.rundir.manifest import CheckpointManifest, FileFacts, Standing, checkpoints, find, on_line
from vpipe.rundir.reader import open_run
from vpipe.train.checkpoints.writer import CheckpointPlace, Save, Saver


def upto(iterations: int, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    most = {"training.epochs": 100, "training.max_iterations": iterations}
    return tiny(most | {"checkpoint.interval": 1, "checkpoint.keep": 100} | (changes or {}))


def numbers(directory: Path) -> list[int]:
    return [int(path.name.split("-")[1]) for path in find(directory)]


def test_a_branch_does_not_see_what_was_discarded(tmp_path: Path) -> None:
    run(upto(8), tmp_path)
    branch = Run(upto(5), tmp_path, tmp_path / "checkpoints" / "iteration-000003")
    assert "later checkpoints stay where they are" in branch.said
    branch.train()
    assert numbers(tmp_path) == [5, 4, 3, 2, 1]
    assert len(checkpoints(tmp_path / "checkpoints")) == 10, "4 and 5 are there twice, and 6 to 8 of the other branch"
    again = Run(upto(9), tmp_path, tmp_path)
    assert again.trainer.iteration == 5
    assert [entry.line.run for entry in lineage.read(tmp_path)][-1] == branch.trainer.run_id


def test_a_branch_that_was_killed_before_it_saved_is_still_the_line(tmp_path: Path) -> None:
    run(upto(8), tmp_path)
    branch = Run(upto(9), tmp_path, tmp_path / "checkpoints" / "iteration-000003")
    branch.trainer.checkpoints.enter()
    assert numbers(tmp_path) == [3, 2, 1]


def test_a_damaged_list_of_runs_does_not_bring_back_what_was_discarded(tmp_path: Path) -> None:
    """With it unread, the newest number was taken; with a run's id changed in it, an older one, both in silence."""
    run(upto(4), tmp_path)
    run(upto(3), tmp_path, tmp_path / "checkpoints" / "iteration-000002")
    assert numbers(tmp_path) == [3, 2, 1]
    file = tmp_path / "lineage.json"
    whole = file.read_bytes()
    for place in (0, whole.rindex(b'"run"'), whole.rindex(b'"run"') + 9, len(whole) - 1):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(UserError, match=r"several runs: iteration-000004 of .*name the one to go on from"):
            find(tmp_path)
    file.unlink()
    with pytest.raises(UserError, match="several runs"):
        find(tmp_path / "checkpoints")
    named = find(tmp_path / "checkpoints" / "iteration-000004")
    assert [path.name[-1] for path in named] == list("4321")


def test_a_damaged_list_is_said_where_only_one_line_is_there(tmp_path: Path) -> None:
    run(upto(2), tmp_path)
    (tmp_path / "lineage.json").write_text("{")
    resumed = Run(upto(3), tmp_path, tmp_path)
    assert resumed.trainer.iteration == 2
    assert "lineage.json is damaged" in resumed.said
    resumed.train()
    assert numbers(tmp_path) == [3, 2, 1]


def test_half_a_line_of_metrics_costs_only_itself(tmp_path: Path) -> None:
    """A run was killed while it wrote; the one that went on appended its first word to that half."""
    run(upto(6), tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "iterat')
    run(upto(5), tmp_path, tmp_path / "checkpoints" / "iteration-000003")
    lines = [line["iteration"] for line in open_run(tmp_path).metrics() if line["kind"] == "train"]
    assert lines == [1, 2, 3, 4, 5]


def test_only_the_own_line_is_counted_and_pruned(tmp_path: Path) -> None:
    run(upto(8), tmp_path)
    before = {path.name for path in checkpoints(tmp_path / "checkpoints")}
    run(upto(6, {"checkpoint.keep": 2}), tmp_path, tmp_path / "checkpoints" / "iteration-000003")
    left = {path.name for path in checkpoints(tmp_path / "checkpoints")}
    assert before - left == {"iteration-000001", "iteration-000002", "iteration-000003"}, "of the line, and too old"
    assert numbers(tmp_path) == [6, 5]


def test_the_metrics_of_a_branch_replace_those_beyond_it(tmp_path: Path) -> None:
    run(upto(6), tmp_path)
    run(upto(5), tmp_path, tmp_path / "checkpoints" / "iteration-000003")
    lines = [line["iteration"] for line in open_run(tmp_path).metrics() if line["kind"] == "train"]
    assert lines == [1, 2, 3, 4, 5]


def test_lines() -> None:
    a, b, c = ("a" * 12, "b" * 12, "c" * 12)
    third = Line(a).child(b, 30).child(c, 34)
    assert third.ancestors == (Ancestor(a, 30), Ancestor(b, 34))
    assert [third.place(run, at) for run, at in ((a, 30), (a, 35), (b, 34), (b, 35), (c, 99))] == [0, None, 1, None, 2]
    back = Line(a).child(b, 30).child(c, 20)
    assert back.place(a, 25) is None, "c began at a checkpoint of before b: a's up to there"
    assert parsed(Line, asdict(third)) == third


STANDING = Standing(1, 0, 0, (), 0, 0, 0, 1.0, 0, 0, "adam", "m")


def saved(directory: Path, iteration: int, line: Line, keep: int = 2) -> Path:
    """A checkpoint of one tensor, by the saver alone."""
    standing = Standing(**{**STANDING.__dict__, "iteration": iteration})
    saver = Saver(CheckpointPlace(directory, 0, 1, keep), blocking=True)
    save = Save(standing, line, {})
    saver.begin(save, lambda: {0: {"param/x": torch.ones(3)}})
    saver.end()
    assert save.path is not None, save.problem
    return save.path


def test_a_million_iterations(tmp_path: Path) -> None:
    line = Line("a" * 12)
    for iteration in (999_998, 999_999, 1_000_000, 1_000_001):
        saved(tmp_path, iteration, line)
    assert [path.name for path in checkpoints(tmp_path)] == ["iteration-1000000", "iteration-1000001"]
    assert find(tmp_path)[0].name == "iteration-1000001"


def test_a_trainer_that_cannot_resume_leaves_no_thread(tmp_path: Path) -> None:
    """Its heartbeat went on for the rest of the process, writing into a directory that nobody ran in."""
    run(upto(1), tmp_path / "a")
    before = set(threading.enumerate())
    with pytest.raises(UserError):
        Run(upto(2, {"model.hidden_size": 32}), tmp_path / "b", tmp_path / "a")
    assert not {thread.name for thread in set(threading.enumerate()) - before}


def test_the_same_iteration_twice_never_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every call that changes names, a whole checkpoint is there."""
    line = Line("a" * 12)
    saved(tmp_path, 7, line, keep=1)
    seen = []

    def watched(original: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            seen.append(len([CheckpointManifest.read(path) for path in on_line(tmp_path, line)]))
            return original(*args, **options)

        return call

    for name in ("rename", "replace", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    saved(tmp_path, 7, line, keep=1)
    monkeypatch.undo()
    assert len(seen) > 5
    assert min(seen) >= 1
    assert len(checkpoints(tmp_path)) == 1


def test_the_manifest_notices_a_flipped_bit_anywhere(tmp_path: Path) -> None:
    path = saved(tmp_path, 7, Line("a" * 12, (Ancestor("b" * 12, 3),)))
    file = path / manifest.MANIFEST
    whole = file.read_bytes()
    for place in range(0, len(whole), 2):
        data = bytearray(whole)
        data[place] ^= 1 << place % 7
        file.write_bytes(data)
        with pytest.raises(manifest.DamagedCheckpoint):
            CheckpointManifest.read(path)
    for length in range(0, len(whole), 5):
        file.write_bytes(whole[:length])
        with pytest.raises(manifest.DamagedCheckpoint):
            CheckpointManifest.read(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("iteration", -1), ("iteration", "7"), ("iteration", True), ("loss_scale", float("inf")), ("model", 3)],
)
def test_a_sealed_manifest_of_wrong_types_is_refused(field: str, value: Any, tmp_path: Path) -> None:
    """Whoever wrote it: what is read is checked before it is believed."""
    path = saved(tmp_path, 7, Line("a" * 12))
    standing = Standing(**{**STANDING.__dict__, "iteration": 7, field: value})
    made = CheckpointManifest(standing, Line("a" * 12), {"layer-0000.safetensors": FileFacts(1, "0" * 64)}, {})
    (path / manifest.MANIFEST).write_bytes(made.sealed())
    with pytest.raises(manifest.DamagedCheckpoint):
        CheckpointManifest.read(path)


def test_a_checkpoint_under_another_name_is_noticed(tmp_path: Path) -> None:
    path = saved(tmp_path, 7, Line("a" * 12))
    path.rename(tmp_path / "iteration-000009")
    with pytest.raises(manifest.DamagedCheckpoint, match="is of iteration 7"):
        CheckpointManifest.read(tmp_path / "iteration-000009")


def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tiny({"training.max_iterations": 2, "checkpoint.interval": 1})))
    return file


def vpipe(*words: str | Path) -> Any:
    return cli.command.main([str(word) for word in words], standalone_mode=False)


def test_a_used_directory_is_refused_unless_somebody_says_so(tmp_path: Path) -> None:
    file, where = config(tmp_path), tmp_path / "run"
    assert vpipe(file, "--output-dir", where) == 0
    first = lineage.current(where)
    assert first is not None
    with pytest.raises(UserError, match=rf"holds run {first.line.run} of .*--resume .*--overwrite"):
        vpipe(file, "--output-dir", where)
    assert vpipe(file, "--output-dir", where, "--resume", "latest", "--set", "training.max_iterations=3") == 0
    second = lineage.current(where)
    assert second is not None
    assert second.line.ancestors == (Ancestor(first.line.run, 2),)
    assert vpipe(file, "--output-dir", where, "--overwrite") == 0
    assert [entry.line.ancestors for entry in lineage.read(where)] == [()]
    assert json.loads((where / "summary.json").read_text())["iterations_done"] == 2
    other = tmp_path / "other"
    assert vpipe(file, "--output-dir", other) == 0
    with pytest.raises(UserError, match="does not continue"):
        vpipe(file, "--output-dir", where, "--resume", other)
    with pytest.raises(UserError, match="--overwrite removes the run"):
        vpipe(file, "--output-dir", where, "--resume", where, "--overwrite")


def of_slurm(file: Path) -> list[str]:
    """What the script starts for a job that is queued again before it has written anything."""
    told = "srun() { while [[ $1 == --* ]]; do shift; done; printf '%s\\n' \"$@\"; }; "
    job = slurm.SlurmJob(str(file), 1, 1, requeue=False)
    environ = os.environ | {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    found = subprocess.run(["bash", "-c", told + slurm.script(job)], env=environ, capture_output=True, check=True)
    return found.stdout.decode().partition("train\n")[2].splitlines()


def of_kubernetes(file: Path) -> list[str]:
    """What each pod starts."""
    *_, jobs = yaml.safe_load_all(kubernetes.manifest(load(file).config, "image", "vpipe", {}))
    (pod,) = jobs["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    return [str(file), *pod["command"][pod["command"].index("train") + 2 :]]


def of_a_user(file: Path) -> list[str]:
    return [str(file), "--output-dir", "runs/own", "--resume", "latest"]


@pytest.mark.parametrize("starts", [of_slurm, of_kubernetes, of_a_user])
def test_latest_is_of_the_directory_that_is_named(
    starts: Callable[[Path], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that has saved nothing yet does not go on from another one's checkpoint, whoever starts it."""
    monkeypatch.chdir(tmp_path)
    file = config(tmp_path)
    assert vpipe(file) == 0
    words = starts(file)
    for ancestors, rate in ((0, 0.5), (1, 0.5)):
        assert vpipe(*words, "--set", f"training.learning_rate={rate}") == 0
        found = lineage.current(Path(words[words.index("--output-dir") + 1]))
        assert found is not None
        assert len(found.line.ancestors) == ancestors


@pytest.mark.parametrize("kept", [None, "kept"])
def test_latest_without_a_directory_is_of_this_config(
    kept: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for how long it trains, and where. A user who names no place is told of the others."""
    monkeypatch.chdir(tmp_path)
    file = config(tmp_path)
    place = ("--set", f"checkpoint.directory={kept}") if kept else ()
    latest, changed = ("--resume", "latest", *place), ("--set", "training.learning_rate=0.5")
    assert vpipe(file, *place) == 0
    (first,) = (path for path in Path("runs").iterdir() if not path.is_symlink())
    assert vpipe(file, *latest, "--set", "training.max_iterations=3") == 0
    assert f"{kept or first} is the latest run of this config" in capsys.readouterr().err
    if kept:
        assert vpipe(file, *latest, *changed, "--output-dir", "own") == 0
        assert "training.learning_rate is 0.01 there and 0.5 here; starting anew" in capsys.readouterr().err
        assert [entry.line.ancestors for entry in lineage.read(Path("own"))] == [()]
        return
    with pytest.raises(
        UserError, match=r"no run in runs is of this config \(the latest, runs/.* is of another config: "
    ):
        vpipe(file, *latest, *changed)


HOLD = """
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from vpipe.rundir.claim import Lock
Lock(Path(sys.argv[1]), "c" * 12, "vpipe train x.yaml")
print("held", flush=True)
input()
"""


def test_one_writer_at_a_time_and_the_second_is_told_who(tmp_path: Path) -> None:
    chosen = PipelineConfig.from_dict(tiny())
    words = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=rf"is being written by run c{{12}} \(process {holder.pid} on .*x.yaml"):
            claim.take(chosen, chosen.to_yaml(), tmp_path)
        holder.kill()
    taken = claim.take(chosen, chosen.to_yaml(), tmp_path)
    assert taken.directory == tmp_path.resolve(), "whoever is killed lets go"
    assert taken.lock is not None
    taken.lock.release()


def test_a_separate_checkpoint_directory_has_a_line_too(tmp_path: Path) -> None:
    where = {"checkpoint.directory": str(tmp_path / "kept")}
    run(upto(4, where), tmp_path / "a")
    assert numbers(tmp_path / "kept") == [4, 3, 2, 1] == numbers(tmp_path / "a")
    begun = Run(tiny({"checkpoint.interval": 1} | where), tmp_path / "b")
    begun.trainer.checkpoints.enter()
    with pytest.raises(UserError, match="holds no checkpoint"):
        find(tmp_path / "kept")
    begun.trainer.checkpoints.close()
