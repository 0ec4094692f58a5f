"""Negative controls: the mistakes of the originals, each made on purpose, each seen by the checker."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from runtime_support import Case, check

from vpipe.runtime import buffers, region, stage
from vpipe.runtime.flow import Pending
from vpipe.runtime.updates.weights import VersionedWeights

ASYNCHRONOUS = Case("pipedream", "plain", 3, 6, num_steps=3)


def test_the_controls_are_right_without_the_mistakes() -> None:
    check(ASYNCHRONOUS)


def test_no_stashing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward with the newest weights: ``p.data`` is exchanged under the graph, as PyTorch silently allows."""

    def before_update(self: VersionedWeights) -> None:
        for leaves in self._leaves.values():
            for name, leaf in leaves.items():
                leaf.data = self.parameters[name].data

    def after_update(self: VersionedWeights) -> None:
        VersionedWeights_after(self)
        before_update(self)

    VersionedWeights_after = VersionedWeights.after_update
    monkeypatch.setattr(VersionedWeights, "before_update", before_update)
    monkeypatch.setattr(VersionedWeights, "after_update", after_update)
    with pytest.raises(AssertionError, match=r"differ|the loss is"):
        check(ASYNCHRONOUS)


def test_reading_the_newest_weights_in_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recompute that reads other weights than the forward did."""
    recompute = stage.Stage.recompute

    def newest(self: stage.Stage, microbatch: int) -> None:
        unit = self.units[microbatch]
        unit.version, right = self.weights._newest, unit.version  # type: ignore[attr-defined]
        recompute(self, microbatch)
        unit.version = right

    monkeypatch.setattr(stage.Stage, "recompute", newest)
    with pytest.raises((AssertionError, KeyError, RuntimeError)):
        check(Case("pipedream", "plain", 3, 6, num_steps=2, recompute=1.0))


def test_stale_versions_after_a_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """PipeDream's bug: after an epoch the first units still read the versions that were old before it ended."""
    begin = VersionedWeights.begin

    def stale(self: VersionedWeights, uses: Sequence[int]) -> None:
        old = getattr(self, "kept", None)
        begin(self, uses)
        if old is not None:
            for name, leaf in self._leaves[0].items():
                leaf.data = old[name]
        self.kept = {name: p.detach().clone() for name, p in self.parameters.items()}  # type: ignore[attr-defined]

    monkeypatch.setattr(VersionedWeights, "begin", stale)
    with pytest.raises(AssertionError, match=r"differ|the loss is"):
        check(ASYNCHRONOUS)


def test_the_macrobatch_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """VPipe's macrobatch: an update every num_versions units, but gradients were never divided by their number."""
    from vpipe.runtime.engine import Engine, Task

    forward = Engine._forward

    def undivided(self: Engine, task: Task) -> None:
        forward(self, task)
        task.stage.units[task.microbatch].weight = 1.0

    monkeypatch.setattr(Engine, "_forward", undivided)
    with pytest.raises(AssertionError, match=r"differ|the loss is"):
        check(Case("pipedream-2bw", "plain", 3, 4, num_steps=2))


def test_wrong_order_of_accumulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of later readers added after those of a region, not before."""
    backward = region.Region.backward

    def added_after(self: region.Region, graph: region.RegionGraph, pending: Pending, *rest: Any) -> None:
        later = {value: pending.pop(value) for value, *_ in graph.taken if value in pending}
        backward(self, graph, pending, *rest)
        for value, gradients in later.items():
            pending[value] = [a + b for a, b in zip(pending[value], gradients, strict=True)]

    monkeypatch.setattr(region.Region, "backward", added_after)
    with pytest.raises(AssertionError, match=r"differ|the loss is"):
        check(Case("1f1b", "skips", 4, 4, num_layers=14, num_steps=3, optimizer="adam"))


def test_gradients_of_units_in_another_order() -> None:
    """A sum over units in decreasing order is another number."""
    torch.manual_seed(0)
    parts = [torch.randn(64) for _ in range(8)]
    assert not torch.equal(sum(parts[1:], parts[0]), sum(parts[-2::-1], parts[-1]))


def test_missing_dropout_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recompute that draws new random numbers."""
    recompute = stage.Stage.recompute

    def fresh(self: stage.Stage, microbatch: int) -> None:
        unit = self.units[microbatch]
        unit.run = region.Run(unit.run.seed + 1, unit.run.unit, True, unit.run.autocast)
        recompute(self, microbatch)

    monkeypatch.setattr(stage.Stage, "recompute", fresh)
    case = Case("1f1b", "plain", 2, 4, recompute=1.0, dropout=0.3)
    with pytest.raises(AssertionError, match=r"differ|the loss is"):
        check(case)


def test_buffers_that_advance_in_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers.FoundState, "again", lambda self: nullcontext())
    with pytest.raises(AssertionError, match=r"differ|the loss is"):
        check(Case("1f1b", "batch_norm", 2, 4, recompute=1.0))
