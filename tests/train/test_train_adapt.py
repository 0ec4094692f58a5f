"""``parallel.adapt``: a bad partition is left by itself, every decision says why, and no bit changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_runs import Run, tiny

from vpipe.config import PipelineConfig
from vpipe.errors import UserError
from vpipe.models.model import Skeleton
from vpipe.observe.payload import payload, recorded
from vpipe.plan.observed import Observed
from vpipe.plan.profile import Measuring, measure_layers
from vpipe.rundir.reader import open_run
from vpipe.train.measure.profile import footprint
from vpipe.train.session import feed_of, load_data, load_model

SLEEPING: dict[str, Any] = {
    "model.name": "emulated",
    "model.num_layers": 6,
    "model.extra": {"forward": 0.002, "input_grad": 0.002, "weight_grad": 0.002},
    "parallel.partition": [5, 1],
    "training.epochs": 3,
}
"""Twelve iterations of layers that cost the same, badly cut. ``GUESSED_START`` would be more than they can save."""


def sleeping(**more: Any) -> dict[str, Any]:
    found = tiny({**SLEEPING, **more})
    for name in ("num_heads", "hidden_size", "sequence_length"):
        found["model"].pop(name, None)
    return found


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleeping layers need no turns; and moving them is said to be cheap."""
    monkeypatch.setattr("vpipe.runtime.assembly.thread_safe", lambda layers: True)
    monkeypatch.setattr("vpipe.train.adapt.GUESSED_START", 0.0)


def test_a_bad_partition_is_left(tmp_path: Path, threads: None) -> None:
    still = Run(sleeping(), tmp_path / "still").train()
    run = Run(sleeping(**{"parallel.adapt": "on", "observe.trace": True, "parallel.recompute": 0.5}), tmp_path / "on")
    run.train()
    pipeline = run.trainer.session.pipeline
    assert pipeline.partition[0] < 5
    told = [line for line in run.metrics if line["kind"] == "adapt"]
    assert told[0]["action"] == "move"
    assert "[5, 1] → " in told[0]["reason"]
    assert told[0]["reason"] in run.said
    assert sum(told[0]["layout"]["partition"]) == 6
    facts = json.loads((tmp_path / "on" / "run.json").read_text())
    assert facts["partition"] == pipeline.partition
    assert facts["layout"] == pipeline.layout.as_document()
    assert [len(stage["layers"]) for stage in facts["stages"]] == pipeline.partition
    assert [line["loss"] for line in run.lines] == [line["loss"] for line in still.lines]
    expected = still.trainer.session.pipeline.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in pipeline.state_dict().items())
    directory = open_run(tmp_path / "on")
    page = payload(directory, recorded(directory))
    assert page["layouts"][0]["action"] == "move"
    assert page["layouts"][0]["ranks"] == [[0], [1]]
    assert list(page["facts"]["partition"]) == pipeline.partition


def test_suggest_only_says_it(tmp_path: Path, threads: None) -> None:
    run = Run(sleeping(**{"parallel.adapt": "suggest"}), tmp_path).train()
    assert run.trainer.session.pipeline.partition == [5, 1]
    assert "parallel.adapt: on would move" in run.said
    assert "suggest" in [line.get("action") for line in run.metrics]


def test_what_would_not_pay_is_not_done(tmp_path: Path, threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.train.adapt.GUESSED_START", 1000.0)
    run = Run(sleeping(**{"parallel.adapt": "on", "training.epochs": 1}), tmp_path).train()
    assert run.trainer.session.pipeline.partition == [5, 1]
    assert "not worth it" in run.said


def test_a_layout_that_needs_more_than_the_cap_is_left(tmp_path: Path, threads: None) -> None:
    still = Run(sleeping(), tmp_path / "still").train()
    capped = {"parallel.adapt": "on", "parallel.memory": 7000}
    run = Run(sleeping(**capped), tmp_path / "capped").train()
    pipeline = run.trainer.session.pipeline
    told = [line for line in run.metrics if line["kind"] == "adapt"]
    assert "rank 0 needs" in told[0]["reason"]
    assert "of 6.84 KiB" in told[0]["reason"]
    assert told[0]["action"] == "move"
    memory = pipeline.builder.options.memory
    assert pipeline.partition[0] < 5 or memory.recompute or memory.swap
    assert [line["loss"] for line in run.lines] == [line["loss"] for line in still.lines]


def test_bytes_by_shapes_are_about_those_that_a_profile_measures() -> None:
    """On the meta device attention takes another kernel, which saves a little more."""
    config = PipelineConfig.from_dict(tiny({}))
    data = load_data(config)
    model = load_model(config, data.vocab_size)
    unit = feed_of(config, data, model).read([(0, 0)]).batches[0]
    sizes = footprint(model, Skeleton.of(config.model.name, model), unit.inputs)
    measuring = Measuring(model.loss, torch.optim.Adam, repeat=1)
    layers, input_bytes = measure_layers(model.layers, unit.inputs, unit.targets, measuring)
    assert sizes is not None
    assert sizes.input_bytes == input_bytes
    for mine, theirs in zip(sizes.layers[:-1], layers[:-1], strict=True):  # the last one measures its loss too
        assert mine.saved_bytes == pytest.approx(theirs.saved_bytes, rel=0.1), mine.name
        assert mine.boundary_bytes == theirs.boundary_bytes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "threads of one process take turns"),
        ({"parallel.scheduler": "chimera", "parallel.partition": [3, 3]}, "cannot plan chimera"),
    ],
)
def test_what_it_cannot_do_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if changes:
        monkeypatch.setattr("vpipe.runtime.assembly.thread_safe", lambda layers: True)
    with pytest.raises(UserError, match=words):
        Run(sleeping(**{**changes, "parallel.adapt": "on"}), tmp_path)


def test_costs_follow_from_stage_times_of_several_layouts() -> None:
    true = np.array([1.0, 1, 1, 1, 4, 4, 1, 1])

    def times(counts: list[int], slow: tuple[float, float] = (1, 1)) -> Any:
        ends = np.cumsum([0, *counts])
        sums = [slow[s] * true[ends[s] : ends[s + 1]].sum() for s in range(2)]
        return np.array([[x, 2 * x, 0.5 * x] for x in sums])

    observed = Observed([1.0] * 8, [(0,), (1,)])
    for counts in ([4, 4], [5, 3], [6, 2], [7, 1]):
        observed.learn(counts, times(counts))
    assert observed.costs is not None
    assert np.allclose(observed.costs[:, 0], true)
    observed.learn([7, 1], times([7, 1], (2.0, 1.0)))
    assert np.allclose(observed.slowness, [2, 1])
    assert np.allclose(observed.costs[:, 0], true)
    observed.learn([4, 4], times([4, 4], (2.0, 1.0)))
    assert np.allclose(observed.costs[:, 0], true)
    observed.learn([4, 4], times([4, 4]))
    assert np.allclose(observed.slowness, [1, 1])
