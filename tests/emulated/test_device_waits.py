"""The host never waits for the device inside a step but to read its numbers once; no wait of a stream can be left out."""

from __future__ import annotations

import ast
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from device_cases import OPTIMIZERS, SCHEDULES, Outcome, assert_equal, batches, plain, trained
from torch import nn

import vpipe.runtime
from vpipe import Pipeline
from vpipe.runtime.device_times import DeviceTimes
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


RUNTIME = Path(vpipe.runtime.__file__).parent
FILES = {
    "handover": "transport/handover",
    "prefetch": "prefetch",
    "swap_device": "memory/swap_device",
    "departures": "departures",
}
WAITS = {"wait_event", "wait_stream", "share"}
"""A statement that is a call of one of these orders two streams or keeps memory."""


def waits_of(file: str) -> list[int]:
    """The lines of a module on which it waits for a stream, or shares memory with one."""
    found = []
    for node in ast.walk(ast.parse((RUNTIME / f"{FILES[file]}.py").read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            found += [node.lineno] if name in WAITS else []
    return sorted(found)


MUTANTS = [(file, line) for file in FILES for line in waits_of(file)]


@contextmanager
def without(file: str, line: int) -> Iterator[None]:
    """The module without the statement on this line, in every module that has taken something from it."""
    module = importlib.import_module(f"vpipe.runtime.{FILES[file].replace('/', '.')}")
    tree = ast.parse((RUNTIME / f"{FILES[file]}.py").read_text())
    for node in ast.walk(tree):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            for place, statement in enumerate(body if isinstance(body, list) else ()):
                if statement.lineno == line and isinstance(statement, ast.Expr):
                    body[place] = ast.copy_location(ast.Pass(), statement)  # type: ignore[index]
    before = dict(vars(module))
    exec(compile(tree, f"{file} without line {line}", "exec"), vars(module))  # noqa: S102 - our own source, less a line
    changed = {id(old): getattr(module, name) for name, old in before.items() if getattr(module, name) is not old}
    patched = []
    for other in [m for name, m in sys.modules.items() if name.startswith("vpipe.") and m is not module]:
        for name, value in list(vars(other).items()):
            if id(value) in changed and callable(value):
                patched.append((other, name, value))
                setattr(other, name, changed[id(value)])
    try:
        yield
    finally:
        vars(module).update(before)
        for other, name, value in patched:
            setattr(other, name, value)


PROGRAMS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "handover": (4, "1f1b", {"num_ranks": 2, "num_microbatches": 6}),
    "prefetch": (2, "gpipe", {"num_ranks": 1, "num_microbatches": 12}),
    "departures": (1, "gpipe", {"num_ranks": 1, "num_microbatches": 1}),
    "swap_device": (6, "1f1b", {"num_ranks": 3, "num_microbatches": 8, "swap": 1.0}),
}
"""(layers, schedule, options) that need every wait of a module."""
TRIES = 6
"""A race is lost by chance: how often each way of running may fail to show a missing wait."""
HARD: list[dict[str, float]] = [
    {"lazy": 1},
    {"jitter_us": 300, "seed": 7},
    {"op_us": 500},
    {"copy_bytes_per_us": 4},
    {"copy_bytes_per_us": 4, "lazy": 1},
    {"copy_bytes_per_us": 20, "poison": 0},
]
"""Ways of running streams in which a forgotten wait shows; the last ones make copies or kernels slow."""


def swapped_directly(emulated: Any) -> list[float]:
    """Five storages go out and come back early, while kernels that read the ones before are still queued; then others
    take their pinned memory. (What the first version of this lane got wrong in two ways.)"""
    from vpipe.runtime.memory.swap import Slot

    module = importlib.import_module("vpipe.runtime.memory.swap_device")
    device, size = torch.device("emu:0"), 8192
    lane = module.DeviceSwapper(device, DeviceTimes(device))
    slots = [Slot(torch.full((size,), value + 1.0, device="emu:0").untyped_storage()) for value in range(5)]
    for number, slot in enumerate(slots):
        lane.out([slot], f"unit {number}")
    moves = [lane.fetch([slot], "back") for slot in slots[:3]]
    others = [Slot(torch.full((size,), -1.0, device="emu:0").untyped_storage()) for _ in range(3)]
    for slot in others:
        lane.out([slot], "another")
    moves += [lane.fetch([slot], "back") for slot in slots[3:]]
    found = []
    for slot, move in zip(slots, moves, strict=True):
        move.wait()
        emulated.native.sleep(3000)
        found.append(torch.empty(0, device="emu:0").set_(slot.full(), 0, (size,), (1,)) * 1)  # the backward
        slot.empty()
    values = [float(tensor.mean()) for tensor in found]
    lane.abandon()
    lane.close()
    return values


def departed_directly(emulated: Any) -> list[float]:
    """A weight that is still being computed leaves for the host, and is changed at once by the next kernel."""
    module = importlib.import_module("vpipe.runtime.departures")
    found = []
    for value in (1.0, 2.0, 3.0):
        weight, place = torch.zeros(8192, device="emu:0"), torch.zeros(8192, pin_memory=True)
        emulated.native.sleep(3000)
        weight.fill_(value)
        copies = module.Departures()
        copies.copy(place, weight)
        arrivals = copies.arrivals()
        weight.fill_(-1.0)
        torch.accelerator.current_stream(torch.device("emu:0")).synchronize()
        for arrived in arrivals:
            arrived.synchronize()
        found.append(float(place.mean()))
    return found


DIRECT: dict[str, tuple[Callable[[Any], list[float]], list[float]]] = {
    "swap_device": (swapped_directly, [1.0, 2.0, 3.0, 4.0, 5.0]),
    "departures": (departed_directly, [1.0, 2.0, 3.0]),
}
"""Module → what it is asked beside a pipeline, and the right answer."""


def right_directly(file: str, emulated: Any) -> bool:
    ask, answer = DIRECT.get(file, (lambda _: [], []))
    return ask(emulated) == answer


def differs(train: Callable[[], Outcome], expected: Outcome) -> bool:
    try:
        assert_equal(train(), expected)
    except (AssertionError, RuntimeError):  # also events that nobody has waited for when they are read
        return True
    return False


@pytest.mark.parametrize(("file", "line"), MUTANTS, ids=[f"{file}:{line}" for file, line in MUTANTS])
def test_no_wait_can_be_left_out(file: str, line: int, emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.runtime.memory.swap.MIN_BYTES", 64)
    layers, schedule, options = PROGRAMS[file]
    expected = trained(plain(layers), "cpu", schedule, steps=1, **options)
    caught = []
    with without(file, line):
        for settings in HARD * TRIES:
            emulated.reset()
            emulated.settings(**settings)
            if differs(partial(trained, plain(layers), "emu", schedule, steps=1, **options), expected):
                caught.append(settings)
                break
            if not right_directly(file, emulated):
                caught.append(settings)
                break
    assert caught, f"{file}.py works without its line {line}: the wait is not needed, or no program needs it"


@pytest.mark.parametrize("file", FILES)
def test_with_all_waits_the_same_programs_are_right(file: str, emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.runtime.memory.swap.MIN_BYTES", 64)
    layers, schedule, options = PROGRAMS[file]
    expected = trained(plain(layers), "cpu", schedule, steps=1, **options)
    for settings in HARD:
        emulated.reset()
        emulated.settings(**settings)
        assert_equal(trained(plain(layers), "emu", schedule, steps=1, **options), expected)
        assert right_directly(file, emulated)
