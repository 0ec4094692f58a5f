"""Runs whose loss or gradients are not finite: how they end, what they keep, what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from train_runs import Run, equal, run, tiny

from vpipe.rundir import writing
from vpipe.rundir.manifest import CheckpointManifest
from vpipe.train.checkpoints.checkpoint import Checkpoint

DIES = {
    "training.optimizer": "sgd",
    "training.learning_rate": 1e6,
    "training.epochs": 8,
    "training.max_iterations": 30,
    "checkpoint.interval": 1,
}
"""Its loss is not finite from the third iteration on."""


def kept(found: Run) -> list[int]:
    return sorted(int(path.name[10:16]) for path in (found.directory / "checkpoints").glob("iteration-*"))


def test_a_run_that_has_died_ends_with_its_own_code(tmp_path: Path) -> None:
    found = run(tiny(DIES), tmp_path)
    ending = found.trainer.ended
    assert (ending.code, ending.iteration, ending.saved) == (65, 5, 2)
    assert (
        "since iteration 3 the loss is nan; layer 2 (block 1) is the first with an output that is not"
        in ending.sentence
    )
    assert kept(found) == [1, 2]
    assert "warning: iteration 3: the loss is nan; 1 updates skipped" in found.said
    text = (tmp_path / "metrics.jsonl").read_text() + (tmp_path / "summary.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert found.lines[-1]["loss"] is None


@pytest.mark.parametrize("keep", [1, 2])
def test_one_that_goes_on_keeps_the_newest_sound_checkpoint(keep: int, tmp_path: Path) -> None:
    found = run(tiny(DIES | {"training.on_nan": "skip", "checkpoint.keep": keep}), tmp_path)
    assert found.trainer.ended.code == 0
    assert kept(found) == [2, 30]
    assert [
        CheckpointManifest.read(tmp_path / "checkpoints" / f"iteration-{n:06d}").standing.sound for n in (2, 30)
    ] == [
        True,
        False,
    ]
    rest = Run(tiny(DIES), tmp_path / "rest", tmp_path)
    assert "iteration-000030 was not finite; trying the checkpoint before it" in rest.said
    assert rest.trainer.iteration == 2
    named = Run(tiny(DIES), tmp_path / "named", tmp_path / "checkpoints" / "iteration-000030")
    assert named.trainer.iteration == 30


def test_one_that_goes_back_has_half_the_rate_and_keeps_it(tmp_path: Path) -> None:
    """The gradient of one iteration is not finite until the rate is lower."""
    job = tiny({"checkpoint.interval": 2, "training.on_nan": "roll-back", "training.nan_limit": 1})
    made = Run(job, tmp_path / "run")
    trainer = made.trainer

    def breaks(gradient: Tensor) -> Tensor:
        return gradient * float("nan") if trainer.iteration == 4 and trainer.lowered == 1 else gradient

    next(trainer.session.pipeline.modules()[1].parameters()).register_hook(breaks)
    made.train()
    assert trainer.ended.code == 0
    assert (
        "since iteration 5 a gradient is not finite; the outputs of all layers are finite; back to iteration 4"
        in made.said
    )
    assert [line["iteration"] for line in made.lines] == [1, 2, 3, 4, 5, 5, 6, 7, 8]
    assert [line["learning_rate"] for line in made.lines] == [0.01] * 5 + [0.005] * 4
    rest = Run(job, tmp_path / "rest", tmp_path / "run" / "checkpoints" / "iteration-000006")
    rest.train()
    assert [line["learning_rate"] for line in rest.lines] == [0.005] * 2
    assert equal(made.weights, rest.weights)


def test_one_that_goes_back_in_vain_goes_further_and_ends(tmp_path: Path) -> None:
    found = run(tiny(DIES | {"training.on_nan": "roll-back"}), tmp_path)
    assert found.trainer.ended.code == 65
    assert [found.said.count(f"back to iteration {number}") for number in (2, 1)] == [2, 1]
    nothing = run(tiny(DIES | {"training.on_nan": "roll-back", "checkpoint.interval": -1}), tmp_path / "nothing")
    assert nothing.trainer.ended.code == 65


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("scheduler", ["1f1b", "pipedream", "pipedream-2bw"])
def test_a_skip_on_any_rank_is_told(scheduler: str, stage: int, tmp_path: Path) -> None:
    made = Run(tiny({"parallel.scheduler": scheduler, "training.epochs": 3}), tmp_path)
    layer = (1, 3)[stage]
    times = iter([False] * 5 + [True] + [False] * 1000)
    parameter = next(made.trainer.session.pipeline.modules()[layer].parameters())
    parameter.register_hook(lambda gradient: gradient * float("nan") if next(times) else gradient)
    made.train()
    assert "a gradient is not finite; 1 updates skipped" in made.said
    assert made.lines[-1]["skipped"] == 1
    assert made.trainer.ended.code == 0


def test_a_skip_of_replicas_is_one(tmp_path: Path) -> None:
    made = Run(tiny({"parallel.scheduler": "pipedream", "parallel.data_parallel_size": 2}), tmp_path)
    times = iter([False] * 3 + [True] + [False] * 1000)
    parameter = next(made.trainer.session.pipeline.modules()[1].parameters())
    parameter.register_hook(lambda gradient: gradient * float("nan") if next(times) else gradient)
    made.train()
    assert made.lines[-1]["skipped"] == 1


def test_one_goes_back_three_times_at_most(tmp_path: Path) -> None:
    job = {"checkpoint.interval": 1, "checkpoint.keep": 9, "training.on_nan": "roll-back", "training.nan_limit": 1}
    made = Run(tiny(job), tmp_path)
    trainer = made.trainer
    parameter = next(trainer.session.pipeline.modules()[1].parameters())
    parameter.register_hook(lambda gradient: gradient * float("nan") if trainer.iteration >= 5 else gradient)
    made.train()
    assert (trainer.ended.code, made.said.count("; back to iteration")) == (65, 3)


def test_a_checkpoint_waits_for_a_finite_loss(tmp_path: Path) -> None:
    made = Run(tiny({"checkpoint.interval": 4}), tmp_path)
    trainer = made.trainer
    parameter = next(trainer.session.pipeline.modules()[1].parameters())
    parameter.register_hook(lambda g: g * float("inf") if trainer.iteration == 3 else g)
    made.train()
    assert kept(made) == [5, 8]


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    made = Run(tiny({"checkpoint.interval": 4}), tmp_path)
    parameter = next(made.trainer.session.pipeline.modules()[0].parameters())

    def breaks(*_: Any) -> None:
        if made.trainer.iteration == 7:
            parameter.data[0, 0] = torch.inf

    made.trainer.updated = lambda: breaks()
    made.train()
    assert kept(made) == [4]
    assert "no checkpoint at iteration 8" in made.said
    assert "of layer 0 is not finite" in made.said
    assert Checkpoint.open(tmp_path / "checkpoints" / "iteration-000004").manifest.standing.sound


def test_json_has_no_number_that_is_not_finite(tmp_path: Path) -> None:
    odd: dict[str, Any] = {"a": float("nan"), "b": [1.5, float("-inf")], "c": {"d": (float("inf"), 2)}}
    writing.replace(tmp_path / "x.json", odd)
    writing.append(tmp_path / "y.jsonl", odd)
    for name in ("x.json", "y.jsonl"):
        found = json.loads((tmp_path / name).read_text(), parse_constant=pytest.fail)
        assert found == {"a": None, "b": [1.5, None], "c": {"d": [None, 2]}}
