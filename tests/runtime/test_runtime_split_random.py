"""Random layers under every schedule that separates I and W, against a plain loop of torch's.

The reference knows nothing of the engine: modules, a loop over microbatches, ``loss.backward()``.
"""

from __future__ import annotations

import warnings
from random import Random
from typing import Any

import pytest
import torch
from random_layers import LENGTH, WIDTH, Buffered, Derived, Steps
from torch import Tensor, nn

from vpipe import Pipeline
from vpipe.runtime.memory import swap
from vpipe.schedule.action import Kind
from vpipe.schedule.catalog import build, entries

SCHEDULES = {
    **{"zb-h1": 1, "zb-h2": 1, "zb-auto": 1},
    **{"zb-v": 2, "v-half": 2, "v-min": 2, "interleaved-zb": 2, "dualpipe-v": 2},
}
"""Schedule → stages per rank."""


def _loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and (
        torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    )


def _calls(layers: list[nn.Module]) -> list[int]:
    return [part.num_calls for layer in layers for part in layer.modules() if hasattr(part, "num_calls")]


def differences(
    schedule: str, layers: list[nn.Module], twins: list[nn.Module], seed: int, autocast: bool = False, **more: Any
) -> list[str]:
    """What differs between a pipelined step over ``layers`` and a plain one over ``twins``; ``more`` is for Pipeline."""
    dice = Random(seed)
    m = dice.randint(3, 4)
    data = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(2 * m, LENGTH, WIDTH, generator=data) for _ in range(2))
    cast = lambda: torch.autocast("cpu", torch.bfloat16, enabled=autocast)  # noqa: E731
    losses = []
    for part, goal in zip(x.chunk(m), y.chunk(m), strict=True):
        with cast():
            h = part
            for twin in twins:
                h = twin(h)
            loss = _loss(h, goal)
        loss.backward(torch.tensor(1 / m))
        losses.append(loss.item())
    more |= {"autocast": cast} if autocast else {}
    pipe = Pipeline(layers, _loss, schedule=schedule, num_microbatches=m, num_ranks=2, **more)
    found = pipe.train_step(x, y, update=False)
    pipe.close()
    wrong = [] if abs(found - sum(losses) / m) <= 1e-6 * abs(found) else [f"loss {found} for {sum(losses) / m}"]
    for index, (layer, twin) in enumerate(zip(layers, twins, strict=True)):
        pairs = zip(layer.named_parameters(), twin.parameters(), strict=True)
        wrong += [f"{index}.{name}" for (name, p), q in pairs if not _equal(p.grad, q.grad)]
    return wrong + ([] if _calls(layers) == _calls(twins) else ["calls of hooks"])


def check(schedule: str, seed: int) -> int:
    """One random model; returns the number of its layers."""
    dice = Random(seed)
    num_layers = 2 * SCHEDULES[schedule] + dice.randint(5, 11)
    forbidden = dice.choice([Buffered, Derived])  # torch.func refuses to run where buffers are watched
    seeds: list[int] = []
    while len(seeds) < num_layers:
        drawn = dice.randrange(1 << 30)
        if not any(isinstance(part, forbidden) for part in Steps(drawn).modules()):
            seeds.append(drawn)
    layers, twins = ([Steps(seed) for seed in seeds] for _ in range(2))
    treatment = dice.choice([{}, {}, {"recompute": 1.0}, {"swap": 1.0}, {"recompute": 0.5, "swap": 0.5}])
    if any(isinstance(part, Derived) for layer in layers for part in layer.modules()):
        treatment = {}  # a forward that differentiates keeps its tensors: see test_a_derivative_in_a_treated_layer
    story = "; ".join(f"{index} {layer.describe()}" for index, layer in enumerate(layers))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrong = differences(schedule, list(layers), list(twins), seed, dice.random() < 0.15, **treatment)
    assert not wrong, f"{schedule} {treatment}, seed {seed}: {', '.join(wrong)} of {story}"
    return num_layers


def test_every_schedule_that_splits_is_here() -> None:
    """All but those that hold a stage twice: their gradients are complete only after a REDUCE."""
    found = set()
    for entry in entries():
        program = build(entry.name, 2, 4)
        homes = {(rank, action.stage) for rank, action in program.actions()}
        splits = any(action.kind is Kind.W for _, action in program.actions())
        if splits and len(homes) == len({stage for _, stage in homes}):
            found.add(entry.name)
    assert found == set(SCHEDULES)


@pytest.fixture(autouse=True)
def _everything_is_worth_moving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "MIN_BYTES", 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_few_random_layers(schedule: str) -> None:
    assert sum(check(schedule, seed) for seed in range(2)) >= 4


@pytest.mark.rotates(1)
@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_many_random_layers(schedule: str) -> None:
    """Over all schedules more than 5,000 layers."""
    first = 1000 * (1 + list(SCHEDULES).index(schedule))
    num_layers, seed = 0, first
    while num_layers < 640:
        num_layers += check(schedule, seed)
        seed += 1
