"""The host never waits for the device inside a step but to read its numbers once."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from device_cases import OPTIMIZERS, SCHEDULES, WIDTH, batches, plain
from torch import Tensor, nn

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


class Loops:
    """Every rank's loop ends together, so that what the host waited for in the loops is told from what came after.
    With ``strict`` whatever would wait in a loop raises there, with the line of code."""

    def __init__(self, emulated: Any, monkeypatch: pytest.MonkeyPatch, num_ranks: int, strict: bool = False) -> None:
        self.inside: list[dict[str, int]] = []
        execute = Engine._enqueue

        def ended() -> None:
            emulated.settings(sync_mode=0)
            self.inside.append(emulated.syncs())

        meeting = threading.Barrier(num_ranks, action=ended, timeout=60)
        beginning = threading.Barrier(
            num_ranks, action=lambda: emulated.settings(sync_mode=2 if strict else 0), timeout=60
        )

        def until_all(engine: Engine, *args: Any) -> None:
            beginning.wait()
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
    """Not in the first step, which makes the optimizer's state, and not in the next. (Where the backward is split, the
    first step compares the split with the whole, layer by layer, and the host reads whether they are equal.)"""
    monkeypatch.setattr("vpipe.runtime.memory.swap.MIN_BYTES", 64)
    scale = options.pop("loss_scale", None)
    options["loss_scale"] = LossScale(scale, dynamic=catalog.get(schedule).mode == "bsp") if scale else None
    pipe = Pipeline(
        plain(4), nn.functional.mse_loss, schedule=schedule, num_microbatches=4, device="emu",
        optimizer=OPTIMIZERS[optimizer], **options,
    )  # fmt: skip
    first, *others = batches(3, 32)
    if pipe.programs.splits:
        pipe.train_step(*first)
    loops = Loops(emulated, monkeypatch, len(pipe.engines), strict=True)
    for batch in others:
        loops.inside.clear()
        emulated.native.reset_counts()
        pipe.train_step(*batch)
        assert loops.inside == [{}]
        assert emulated.syncs() == {READ: len(pipe.engines)}, "each rank reads its numbers once, after the loop"
        assert not emulated.native.sync_fallbacks()
    pipe.close()


@pytest.mark.rotates(10)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_loop_never_waits(schedule: str, emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not per unit, not per update, not at the agreement: whatever the schedule and what goes with it."""
    index = SCHEDULES.index(schedule)
    replicated = {"replicas": 2, "num_ranks": 4} if schedule in ("1f1b", "zb-h1", "pipedream") else {"num_ranks": 2}
    optimizer = "adamw" if index % 2 else "fused"
    assert_never_waits(schedule, optimizer, emulated, monkeypatch, **replicated, **MORE[index % len(MORE)])


@pytest.mark.slow
@pytest.mark.rotates(6)
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "secretive"])
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream", "pipedream-2bw"])
def test_no_optimizer_waits(schedule: str, optimizer: str, emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose host counts updates (Adam's), those that make their state in the first, those of other packages."""
    assert_never_waits(schedule, optimizer, emulated, monkeypatch, num_ranks=2, clip_norm=0.1)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_one_that_cannot_be_put_back_waits_once_an_update(
    schedule: str, emulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the counter that raises sees it: the negative control."""
    given = {"num_ranks": 2, "num_microbatches": 4, "schedule": schedule, "device": "emu"}
    pipe = Pipeline(plain(4), nn.functional.mse_loss, optimizer=OPTIMIZERS["secretive"], **given)  # type: ignore[arg-type]
    with monkeypatch.context() as patches:
        loops = Loops(emulated, patches, 2)
        emulated.native.reset_counts()
        pipe.train_step(*batches(1, 32)[0])
    assert [sum(found.values()) for found in loops.inside] == [2 if schedule == "1f1b" else 8]
    pipe.close()
    with pytest.raises((RuntimeError, threading.BrokenBarrierError)):
        assert_never_waits(schedule, "secretive", emulated, monkeypatch, num_ranks=2)
    emulated.settings(sync_mode=0)


@pytest.mark.rotates(6)
@pytest.mark.slow
@pytest.mark.parametrize("more", MORE, ids=lambda more: " ".join(more) or "plain")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "pipedream"])
def test_nothing_that_goes_with_a_schedule_waits(
    schedule: str, more: dict[str, Any], emulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_never_waits(schedule, "adamw", emulated, monkeypatch, num_ranks=2, **more)


def skipping(device: str, schedule: str, optimizer: str, bad: int) -> tuple[dict[str, Tensor], list[Any], list[float]]:
    """Four steps, one of which has an infinite target: the state, what is told of it, what optimizers count."""
    scale = LossScale(4.0, dynamic=True) if schedule == "1f1b" else None
    pipe = Pipeline(
        plain(4), nn.functional.mse_loss, schedule=schedule, num_microbatches=4, num_ranks=2, device=device,
        optimizer=OPTIMIZERS[optimizer], clip_norm=0.2, loss_scale=scale,
    )  # fmt: skip
    given = batches(4, 32)
    given[bad][1][20] = float("inf")
    losses = [pipe.train_step(*batch) for batch in given]
    told: list[Any] = [
        (engine.updater.num_skipped, engine.updater.last_norm, engine.updater.loss_scale, engine.updater.num_updates)
        for engine in pipe.engines
    ]
    states = [state for made in pipe.optimizers.values() for state in made.state.values()]
    counts = [float(state[name]) for state in states for name in ("step", "times") if name in state]
    counts += [float(getattr(made, "count", 0)) for made in pipe.optimizers.values()]
    state = {name: value.cpu() for name, value in pipe.state_dict().items()}
    pipe.close()
    return state, [losses, *told], counts


@pytest.mark.slow
@pytest.mark.rotates(7)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
@pytest.mark.parametrize("bad", [0, 1])
def test_an_update_that_may_not_be_made_is_not(schedule: str, optimizer: str, bad: int) -> None:
    """Whoever decides, device or host: skipped as on the CPU, in the first update (which makes the optimizer's state)
    and in a later one, with the counts of Adam's steps and the dynamic loss scale."""
    found, expected = (skipping(device, schedule, optimizer, bad) for device in ("emu", "cpu"))
    assert found[1:] == expected[1:]
    assert expected[1][1][0] == (1 if schedule == "1f1b" else 2), "an asynchronous stage skips by itself: two do"
    assert all(torch.equal(found[0][name], value) for name, value in expected[0].items())


@pytest.mark.parametrize("forgotten", ["buffers.FoundState", "updates.rollback.Rollback"])
def test_what_a_repeated_step_forgets_to_put_back_is_seen(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"vpipe.runtime.{forgotten}.restore", lambda self: None)
    found, expected = (skipping(device, "pipedream", "adamw", 1)[0] for device in ("emu", "cpu"))
    assert any(not torch.equal(found[name], value) for name, value in expected.items())


class Partly(nn.Module):
    """Has parameters that nobody uses, and frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(3)])
        self.inner, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.frozen(self.inner(x)))


def test_parameters_without_gradients_do_not_count() -> None:
    """The norm is the CPU's to the bit; a zero for each of them would change its last one."""
    torch.manual_seed(8)
    layers = [Partly() for _ in range(12)]
    norms: dict[str, list[float | None]] = {}
    for device in ("cpu", "emu"):
        pipe = Pipeline(
            copy.deepcopy(layers), nn.functional.mse_loss, num_microbatches=4, num_ranks=4, device=device,
            optimizer=OPTIMIZERS["sgd"], clip_norm=0.01,
        )  # fmt: skip
        norms[device] = []
        for batch in batches(6, 32):
            pipe.train_step(*batch)
            norms[device].append(pipe.stats.gradient_norm)
            for module in list(pipe.modules().values())[:2]:
                module.requires_grad_(len(norms[device]) % 2 == 1)  # which of them have one changes
        pipe.close()
    assert norms["emu"] == norms["cpu"]
    sizes = torch.rand(40, 24, generator=torch.Generator().manual_seed(1))
    padded = torch.stack([sizes, torch.zeros_like(sizes)], 2).view(40, 48)
    norm = torch.linalg.vector_norm
    assert any(norm(alone) != norm(beside) for alone, beside in zip(sizes, padded, strict=True))
