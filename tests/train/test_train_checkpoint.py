"""A run that stops and goes on is the run that never stopped, to the bit; a disk that fails costs nothing but time."""

from __future__ import annotations

import errno
import json
import pickle
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from train_runs import Run, close, equal, run, tiny

from vpipe.errors import UserError
from vpipe.rundir import manifest
from vpipe.rundir.journal import Beat
from vpipe.runtime.moves import layer_state
from vpipe.train.checkpoints import writer
from vpipe.train.feed import Reader, TrainingProgress

ADAM = {"training.optimizer": "adamw", "training.weight_decay": 0.1, "model.extra": {"dropout": 0.2}}
CASES: dict[str, dict[str, Any]] = {
    "bsp": {},
    "zero bubble": {"parallel.scheduler": "zb-h1"},
    "asp": {"parallel.scheduler": "pipedream"},
    "2bw": {"parallel.scheduler": "pipedream-2bw"},
    "fp16": {"training.precision": "fp16"},
    "bf16": {"training.precision": "bf16"},
    "lamb": {"training.optimizer": "lamb"},
    "momentum": {"training.optimizer": "sgd", "training.optimizer_options": {"momentum": 0.9}},
    "rate": {"training.learning_rate_policy": "cosine", "training.warmup": 2.0},
    "accumulation": {"training.gradient_accumulation": 3},
    "workers": {"dataset.num_workers": 2},
}


def stopped(config: dict[str, Any], directory: Path, at: int) -> None:
    """Train, and end without ceremony after iteration ``at``: as if killed behind a checkpoint."""
    broken = Run(config, directory)
    save = broken.trainer.checkpoints.save

    def save_and_die(progress: TrainingProgress) -> None:
        save(progress)
        if progress.iteration >= at:
            broken.trainer.checkpoints.settle()
            raise KeyboardInterrupt

    broken.trainer.checkpoints.save = save_and_die  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        broken.train()


FAST = ("bsp", "asp", "fp16", "accumulation")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES])
def test_resume_is_exact(name: str, tmp_path: Path) -> None:
    config = tiny(ADAM | CASES[name] | {"checkpoint.interval": 3})
    whole = run(config, tmp_path / "whole")
    stopped(config, tmp_path / "part", 3)
    resumed = Run(config, tmp_path / "rest", tmp_path / "part")
    assert resumed.trainer.position == (0, 3), "in the middle of an epoch"
    resumed.train()
    assert equal(resumed.weights, whole.weights)
    assert resumed.losses == [line["loss"] for line in whole.lines if line["iteration"] > 3]
    assert [line["learning_rate"] for line in resumed.lines] == [
        line["learning_rate"] for line in whole.lines if line["iteration"] > 3
    ]


def test_a_checkpoint_due_within_an_accumulated_update_follows_at_its_end(tmp_path: Path) -> None:
    """Updates end after iterations 3, 6 and 8; the checkpoint that was due after 4 once was forgotten."""
    config = tiny(ADAM | {"training.gradient_accumulation": 3, "checkpoint.interval": 4})
    whole = run(config, tmp_path / "whole")
    names = [path.name for path in manifest.checkpoints(tmp_path / "whole" / "checkpoints")]
    assert names == ["iteration-000006", "iteration-000008"]
    resumed = Run(config, tmp_path / "rest", tmp_path / "whole" / "checkpoints" / "iteration-000006")
    assert resumed.trainer.iteration == 6
    assert equal(resumed.train().weights, whole.weights)


def test_a_run_that_was_asked_to_stop_says_that_it_is_about_to_end(tmp_path: Path) -> None:
    """Whoever has lost patience with it reads that, and waits for the checkpoint."""
    asked, seen = Run(tiny(), tmp_path), []
    save = asked.trainer.checkpoints.save

    def watched(progress: TrainingProgress) -> None:
        save(progress)
        beat = Beat.read(tmp_path)
        seen.append(beat and beat.phase)

    asked.trainer.checkpoints.save = watched  # type: ignore[method-assign]
    asked.trainer.updated = lambda: signal.raise_signal(signal.SIGTERM)
    asked.train()
    assert seen == ["ending"]
    assert (asked.trainer.iteration, asked.trainer.ended.code) == (1, 75)


def test_a_run_without_its_optimizer_state_is_another(tmp_path: Path) -> None:
    """The negative control: the test above would notice."""
    config = tiny(ADAM | {"checkpoint.interval": 3})
    whole = run(config, tmp_path / "whole")
    stopped(config, tmp_path / "part", 3)
    resumed = Run(config, tmp_path / "rest", tmp_path / "part")
    for engine in resumed.trainer.session.pipeline.engines:
        for optimizer in engine.updater.optimizers.values():
            optimizer.state.clear()
    assert not equal(resumed.train().weights, whole.weights)


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel.model_parallel_size": 1},
        {"parallel.model_parallel_size": 3, "parallel.scheduler": "gpipe"},
        pytest.param({"parallel.model_parallel_size": 4}, marks=pytest.mark.slow),
        pytest.param({"parallel.scheduler": "zb-h1"}, marks=pytest.mark.slow),
        pytest.param({"parallel.scheduler": "zb-v"}, marks=pytest.mark.slow),
        pytest.param({"parallel.partition": [1, 3]}, marks=pytest.mark.slow),
        pytest.param({"parallel.recompute": 1.0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_resume_with_another_pipeline(changes: dict[str, Any], tmp_path: Path) -> None:
    """Saved by two stages of 1f1b, read by others: the same weights in the end, to the bit."""
    config = tiny(ADAM | {"checkpoint.interval": 3})
    whole = run(config, tmp_path / "whole")
    stopped(config, tmp_path / "part", 3)
    resumed = run(tiny(ADAM | {"checkpoint.interval": 3} | changes), tmp_path / "rest", tmp_path / "part")
    assert equal(resumed.weights, whole.weights)


BY_TOKENS = {"dataset.extra.kind": "translation", "model.name": "translation", "training.num_microbatches": 2}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"dataset.batch_size": 8}, {"dataset.batch_size": 12}),
        ({"dataset.batch_size": 8}, BY_TOKENS | {"dataset.max_tokens": 16}),
        (BY_TOKENS | {"dataset.max_tokens": 24}, {"dataset.max_tokens": 16}),
        (BY_TOKENS | {"dataset.max_tokens": 24}, {"dataset.max_tokens": None, "parallel.data_parallel_size": 2}),
    ],
    ids=str,
)
def test_a_resume_with_other_batches_reads_what_is_left(
    before: dict[str, Any], after: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each example of the epoch once: progress was counted in batches, so that one with other sizes left examples out,
    read them twice, or was over at once."""
    if "model.name" in after:
        before = before | {key: value for key, value in after.items() if "max_tokens" not in key}
    seen: list[int] = []
    unit = Reader._unit
    monkeypatch.setattr(Reader, "_unit", lambda reader, *place: [seen.extend(place[-1]), unit(reader, *place)][1])
    config = ADAM | {"training.epochs": 1, "checkpoint.interval": 1, "dataset.extra.num_examples": 96} | before
    stopped(tiny(config), tmp_path / "part", 3)
    done = len(seen)
    resumed = Run(tiny(config | after), tmp_path / "rest", tmp_path / "part")
    assert (resumed.trainer.iteration, resumed.trainer.examples) == (3, done)
    planned = resumed.trainer.num_iterations
    resumed.train()
    assert resumed.trainer.iteration == planned
    assert len(seen) == len(set(seen)) == resumed.trainer.examples > 96 - 24, "only what fills no batch is left out"


@pytest.mark.parametrize("scheduler", ["1f1b", "pipedream"])
def test_resume_with_other_replicas(scheduler: str, tmp_path: Path) -> None:
    """The same examples come next; sums are made in another order, so the weights are close and not equal."""
    base = {"checkpoint.interval": 3, "parallel.scheduler": scheduler, "training.optimizer": "sgd"}
    config = tiny(base)
    whole = run(config, tmp_path / "whole")
    stopped(config, tmp_path / "part", 3)
    changed = tiny(base | {"parallel.data_parallel_size": 2, "dataset.batch_size": 4, "training.num_microbatches": 2})
    resumed = Run(changed, tmp_path / "rest", tmp_path / "part")
    assert resumed.trainer.position == (0, 3)
    resumed.train()
    if scheduler == "1f1b":
        assert close(resumed.weights, whole.weights)
    back = run(config, tmp_path / "back", tmp_path / "rest")
    assert back.trainer.iteration == 8


def test_old_ones_are_pruned_and_leftovers_ignored(tmp_path: Path) -> None:
    leftover = tmp_path / "checkpoints" / ".iteration-000099.partial"
    leftover.mkdir(parents=True)
    (leftover / "layer-0000.safetensors").write_bytes(b"half")
    (tmp_path / "checkpoints" / "iteration-000098").mkdir()
    run(tiny({"checkpoint.interval": 1, "checkpoint.keep": 3}), tmp_path)
    names = [path.name for path in manifest.checkpoints(tmp_path / "checkpoints")]
    assert names == ["iteration-000006", "iteration-000007", "iteration-000008"]
    assert Run(tiny(), tmp_path / "again", tmp_path).trainer.iteration == 8


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints at 4 and 8."""
    directory = tmp_path_factory.mktemp("trained")
    run(tiny({"checkpoint.interval": 4}), directory)
    return directory


def damaged_copy(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained / "checkpoints", tmp_path / "copy")
    return tmp_path / "copy"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a bit of a weight": ("layer-0002.safetensors", flip),
    "a cut file": ("layer-0001.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-9])),
    "a missing file": ("layer-0003.safetensors", lambda path: path.unlink()),
    "no JSON": ("manifest.json", lambda path: path.write_text("{")),
    "another JSON": ("manifest.json", lambda path: path.write_text("[1]")),
    "a file that is not listed": (
        "manifest.json",
        lambda path: path.write_text(path.read_text().replace("layer-0000", "layer-9999")),
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(name: str, trained: Path, tmp_path: Path) -> None:
    where = damaged_copy(trained, tmp_path)
    file, damage = DAMAGES[name]
    damage(where / "iteration-000008" / file)  # type: ignore[no-untyped-call]
    resumed = Run(tiny(), tmp_path / "rest", where)
    assert resumed.trainer.iteration == 4
    warning, *_, resumption = resumed.said.splitlines()
    assert warning.startswith("warning: ")
    assert f"iteration-000008/{file}" in warning.replace("layer-0000.", file + ".")
    assert "iteration-000004" in resumption
    assert len(warning.splitlines()) == 1


def test_all_damaged_or_none(trained: Path, tmp_path: Path) -> None:
    where = damaged_copy(trained, tmp_path)
    for path in where.glob("*/manifest.json"):
        path.write_text("")
    with pytest.raises(UserError, match=r"no checkpoint of .* is whole"):
        Run(tiny(), tmp_path / "rest", where)
    with pytest.raises(UserError, match="holds no checkpoint"):
        Run(tiny(), tmp_path / "rest", tmp_path)


def test_another_model_is_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is a checkpoint of another model .*gpt of 4 layers.* resume with its own"):
        Run(tiny({"model.hidden_size": 32}), tmp_path, trained)
    Run(tiny({"model.extra": {"dropout": 0.5}}), tmp_path, trained)  # the same weights: not another model


def test_another_optimizer_or_seed_is_said(trained: Path, tmp_path: Path) -> None:
    resumed = Run(tiny({"training.optimizer": "sgd", "training.seed": 7}), tmp_path, trained)
    assert "training.optimizer 'adam' → 'sgd': the optimizer's state is left out" in resumed.said
    assert "training.seed 0 → 7: the order of the data and dropout" in resumed.said


def test_a_loss_scale_that_is_new_begins_anew(trained: Path, tmp_path: Path) -> None:
    resumed = Run(tiny({"training.precision": "fp16"}), tmp_path, trained)
    assert "it goes on with learning rate 0.01, loss scale 65536" in resumed.said
    assert resumed.trainer.session.pipeline.loss_scale.value == 65536


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        ("layer_file.write", OSError(errno.ENOSPC, "No space left on device", "x"), "No space left on device (x)"),
        ("layer_file.write", KeyError("odd"), "KeyError: 'odd'"),
        ("CheckpointManifest.sealed", OSError(errno.EROFS, "Read-only", "x"), "Read-only (x)"),
        ("CheckpointManifest.sealed", RuntimeError("odd\nlines"), "RuntimeError: odd lines"),
        ("layer_state.tensors_of", UserError("Mine keeps a set"), "Mine keeps a set"),
    ],
)
def test_a_save_that_fails_costs_a_checkpoint_and_nothing_else(
    function: str, error: Exception, said: str, blocking: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tiny(), tmp_path / "whole")
    broken = Run(tiny({"checkpoint.interval": 4, "checkpoint.blocking": blocking}), tmp_path / "run")
    holder, name = function.split(".")
    place = layer_state if holder == "layer_state" else getattr(writer, holder)
    original = getattr(place, name)

    def fails(*args: Any, **options: Any) -> Any:
        # A thread writes the save of iteration 4 while the trainer goes on: ask the save, not the trainer.
        iteration = args[0].standing.iteration if name == "sealed" else broken.trainer.iteration
        if "-000008" in str(args[0]) if name == "write" else iteration == 8:
            raise error
        return original(*args, **options)

    monkeypatch.setattr(place, name, fails)
    broken.train()
    assert broken.trainer.iteration == 8
    assert equal(broken.weights, whole.weights)
    warnings = [line for line in broken.said.splitlines() if line.startswith("warning")]
    assert warnings == [f"warning: no checkpoint at iteration 8: {said}; earlier ones are intact and the run goes on"]
    assert broken.trainer.ended.code == 74, "who asks only for the exit code must not take it for a run that was saved"
    assert f"but its checkpoint could not be written: {said}" in broken.trainer.ended.sentence
    kept = tmp_path / "run" / "checkpoints"
    assert [path.name for path in kept.iterdir()] == ["iteration-000004"]
    monkeypatch.undo()
    assert equal(run(tiny(), tmp_path / "rest", kept).weights, whole.weights)


def test_a_full_disk_does_not_end_the_journal_with_a_traceback(tmp_path: Path) -> None:
    journal = Run(tiny(), tmp_path)
    (tmp_path / "metrics.jsonl").mkdir()  # cannot be written, ever
    journal.train()
    assert journal.said.count("the run goes on without it") == 1
    assert journal.trainer.iteration == 8


def test_nothing_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("pickle was used")

    for module, names in (
        (pickle, ("dump", "dumps", "load", "loads", "Pickler", "Unpickler")),
        (torch, ("save", "load")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, never)
    run(tiny({"checkpoint.interval": 4}), tmp_path / "run")
    Run(tiny(), tmp_path / "again", tmp_path / "run")
    kinds = {path.suffix for path in (tmp_path / "run" / "checkpoints").rglob("*") if path.is_file()}
    assert kinds == {".json", ".safetensors"}


def test_the_manifest_says_what_it_holds(trained: Path) -> None:
    manifest = json.loads((trained / "checkpoints" / "iteration-000008" / "manifest.json").read_text())
    assert sorted(manifest["files"]) == [f"layer-{layer:04d}.safetensors" for layer in range(4)]
    assert manifest["position"]["num_updates"] == 8
    assert manifest["config"]["model"]["vocab_size"] == 32, "from the data set, so that the checkpoint stands alone"
    assert all(len(file["sha256"]) == 64 for file in manifest["files"].values())
