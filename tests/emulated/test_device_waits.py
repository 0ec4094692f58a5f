"""The host never waits for the device inside a step but to read its numbers once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from device_cases import OPTIMIZERS, SCHEDULES, batches, plain
from torch import nn

from vpipe import Pipeline
from vpipe.runtime.engine import Engine
from vpipe.runtime.updates.update import LossScale
from vpipe.schedule import catalog

READ = "copy_ device to host, blocking"
MORE: list[dict[str, Any]] = [
    {},
    {"recompute": 0.5},
    {"swap": 1.0},
    {"clip_norm": 0.1},
    {"loss_scale": 8.0},
    {"clip_norm": 0.1, "recompute": 0.5, "swap": 0.5},
]
WITHOUT_FUSED = {"bsp": "adamw", "asp": "sgd"}
"""Updates of an asynchronous schedule that the host counts (Adam's) make it wait, unless the optimizer is fused."""


class Loops:
    """Every rank's loop ends together, so that what the host waited for in the loops is told from what came after."""

    def __init__(self, emulated: Any, monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
        self.inside: list[dict[str, int]] = []
        meeting = threading.Barrier(num_ranks, action=lambda: self.inside.append(emulated.syncs()), timeout=60)
        execute = Engine._enqueue

        def until_all(engine: Engine, *args: Any) -> None:
            try:
                execute(engine, *args)
            except BaseException:
                meeting.abort()
                raise
            meeting.wait()

        monkeypatch.setattr(Engine, "_enqueue", until_all)


def assert_never_waits(
    schedule: str, optimizer: str, emulated: Any, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    monkeypatch.setattr("vpipe.runtime.memory.swap.MIN_BYTES", 64)
    scale = options.pop("loss_scale", None)
    options["loss_scale"] = LossScale(scale, dynamic=catalog.get(schedule).mode == "bsp") if scale else None
    pipe = Pipeline(
        plain(), nn.functional.mse_loss, schedule=schedule, num_microbatches=4, device="emu",
        optimizer=OPTIMIZERS[optimizer], **options,
    )  # fmt: skip
    warm, check = batches(2, 32)
    pipe.train_step(*warm)
    loops = Loops(emulated, monkeypatch, len(pipe.engines))
    emulated.native.reset_counts()
    pipe.train_step(*check)
    assert loops.inside == [{}]
    assert emulated.syncs() == {READ: len(pipe.engines)}, "each rank reads its numbers once, after the loop"
    assert not emulated.native.sync_fallbacks()
    pipe.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_loop_never_waits(schedule: str, emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not per unit, not per update, not at the agreement: whatever the schedule and what goes with it."""
    index = SCHEDULES.index(schedule)
    replicated = {"replicas": 2, "num_ranks": 4} if schedule in ("1f1b", "zb-h1", "pipedream") else {"num_ranks": 2}
    optimizer = WITHOUT_FUSED[catalog.get(schedule).mode] if index % 2 else "fused"
    assert_never_waits(schedule, optimizer, emulated, monkeypatch, **replicated, **MORE[index % len(MORE)])


@pytest.mark.slow
@pytest.mark.parametrize("more", MORE, ids=lambda more: " ".join(more) or "plain")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "pipedream"])
def test_nothing_that_goes_with_a_schedule_waits(
    schedule: str, more: dict[str, Any], emulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = WITHOUT_FUSED[catalog.get(schedule).mode]
    assert_never_waits(schedule, optimizer, emulated, monkeypatch, num_ranks=2, **more)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
@pytest.mark.parametrize("bad", [0, 1])
def test_an_update_that_may_not_be_made_is_not(schedule: str, optimizer: str, bad: int) -> None:
    """Whoever decides, device or host: skipped as on the CPU, in the first update (which makes the optimizer's state)
    and in a later one, with the counts of Adam's steps and the dynamic loss scale."""
    found = {}
    for device in ("cpu", "emu"):
        scale = LossScale(4.0, dynamic=True) if schedule == "1f1b" else None
        pipe = Pipeline(
            plain(), nn.functional.mse_loss, schedule=schedule, num_microbatches=4, num_ranks=2, device=device,
            optimizer=OPTIMIZERS[optimizer], clip_norm=0.2, loss_scale=scale,
        )  # fmt: skip
        given = batches(4, 32)
        given[bad][1][20] = float("inf")
        for batch in given:
            pipe.train_step(*batch)
        told = [
            (engine.updater.num_skipped, engine.updater.last_norm, engine.updater.loss_scale) for engine in pipe.engines
        ]
        counts = [
            float(value)
            for made in pipe.optimizers.values()
            for state in made.state.values()
            for name, value in state.items()
            if name == "step"
        ]
        found[device] = (
            {name: value.cpu() for name, value in pipe.state_dict().items()},
            told,
            counts,
        )
        pipe.close()
    assert found["cpu"][1:] == found["emu"][1:]
    assert found["cpu"][1][0][0] == 1
    assert all(torch.equal(found["emu"][0][name], value) for name, value in found["cpu"][0].items())
