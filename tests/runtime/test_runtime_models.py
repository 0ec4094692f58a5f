"""Models that others refuse, each by itself: what flows, what is shared, what is uneven, what is evaluated."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from runtime_gloo import Worlds
from runtime_models import WIDTH, Block, build
from runtime_support import OPTIMIZERS, Case, check_processes, differing, modules_of, pipeline, replay_of
from torch import Tensor, nn

from vpipe import Layer, Pipeline
from vpipe.runtime.microbatches import Microbatches
from vpipe.runtime.replay import ReplayUnit

mse = nn.functional.mse_loss


def _gradients(
    layers: list[nn.Module], units: list[tuple[Any, Any]], weights: list[float], loss: Any = mse
) -> dict[str, Tensor]:
    """Plain accumulation over units."""
    plain = nn.Sequential(*layers)
    for (x, y), weight in zip(units, weights, strict=True):
        (loss(plain(x), y) * weight).backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def _equal(
    layers: list[nn.Module],
    units: list[tuple[Any, Any]],
    weights: list[float] | None = None,
    loss: Any = mse,
    **more: Any,
) -> Pipeline:
    """The pipeline's gradients of these units are the plain ones."""
    weights = weights or [1 / len(units)] * len(units)
    expected = _gradients(copy.deepcopy(layers), units, weights, loss)
    pipe = Pipeline(layers, loss, num_microbatches=len(units), **({"num_ranks": 2, "schedule": "1f1b"} | more))
    inputs = Microbatches(lambda unit: units[unit][0], weights)
    pipe.train_step(inputs, Microbatches(lambda unit: units[unit][1], weights), update=False)
    assert not differing(pipe.gradients(), expected)
    return pipe


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


class Changing(nn.Module):
    """Its result has another structure, dtype and number of tensors for every other unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any) -> Any:
        x = given["x"] if isinstance(given, dict) else given[0] if isinstance(given, list | tuple) else given
        y = self.linear(x.float()).tanh()
        if len(y) % 3 == 0:
            return {"x": y, "more": None, "count": len(y)}
        if len(y) % 3 == 1:
            return [y.double(), (True, y > 0)]
        return y


class Last(nn.Module):
    def forward(self, given: Any) -> Tensor:
        x = given["x"] if isinstance(given, dict) else given[0] if isinstance(given, list | tuple) else given
        return x.float()


@pytest.mark.parametrize("recompute", [0.0, 1.0])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
def test_structures_and_shapes_that_change_from_unit_to_unit(schedule: str, recompute: float) -> None:
    torch.manual_seed(0)
    units = [(_noise(rows, WIDTH), _noise(rows, WIDTH)) for rows in (1, 5, 3, 9, 2)]
    _equal([Changing() for _ in range(5)] + [Last()], units, num_ranks=3, schedule=schedule, recompute=recompute)


def test_uneven_last_microbatches() -> None:
    """10 rows in 4 microbatches: torch returned 12 rows with garbage. Here each unit counts by its rows."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, WIDTH)]
    plain = copy.deepcopy(layers)
    x, y = _noise(10, WIDTH), _noise(10, WIDTH)
    pipe = Pipeline(layers, mse, schedule="1f1b", num_microbatches=4, num_ranks=2)
    loss = pipe.train_step(x, y, update=False)
    rows = [3, 3, 2, 2]
    units = list(zip(x.split(rows), y.split(rows), strict=True))
    expected = _gradients(plain, units, [number / 10 for number in rows])
    assert not differing(pipe.gradients(), expected)
    whole = nn.Sequential(*plain)
    assert loss == pytest.approx(mse(whole(x), y).item(), rel=1e-5)
    assert pipe.forward(x).shape == (10, WIDTH)
    assert torch.allclose(pipe.forward(x), whole(x), atol=1e-5)


@pytest.mark.parametrize(
    "first", [nn.ReLU(inplace=True), nn.LeakyReLU(0.3, inplace=True), nn.Dropout(0.0, inplace=True)]
)
@pytest.mark.parametrize("recompute", [0.0, 1.0])
def test_a_first_layer_that_works_in_place(first: nn.Module, recompute: float) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), copy.deepcopy(first), nn.Linear(WIDTH, WIDTH), copy.deepcopy(first)]
    units = [(_noise(2 + number, WIDTH), _noise(2 + number, WIDTH)) for number in range(3)]
    for partition in ([1, 3], [2, 2], [1, 1, 1, 1]):
        _equal(copy.deepcopy(layers), units, partition=partition, num_ranks=len(partition), recompute=recompute)


class Nothing(nn.Module):
    """Also gives a tensor without elements, and one without dimensions."""

    def forward(self, x: Any) -> Any:
        if isinstance(x, tuple):
            return x[0] * x[2]
        return x, x[:0], x.mean()


def test_empty_tensors_and_layers_without_parameters() -> None:
    torch.manual_seed(0)
    units = [(_noise(3, WIDTH), _noise(3, WIDTH)), (_noise(1, WIDTH), _noise(1, WIDTH))]
    layers = [nn.Linear(WIDTH, WIDTH), Nothing(), Nothing(), nn.Identity(), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    for partition in ([2, 4], [1, 1, 1, 1, 1, 1]):
        for recompute in (0.0, 1.0):
            _equal(copy.deepcopy(layers), units, partition=partition, num_ranks=len(partition), recompute=recompute)


def test_double_precision_is_kept() -> None:
    """A loss in float64 is not weighted in float32, and its gradients are clipped in float64."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH).double() for _ in range(4)]
    units = [(_noise(2, WIDTH).double(), _noise(2, WIDTH).double()) for _ in range(3)]
    _equal(layers, units)
    twin = copy.deepcopy(layers)
    optimizer = OPTIMIZERS["sgd"]
    pipe = Pipeline(layers, mse, num_microbatches=1, num_ranks=2, optimizer=optimizer, clip_norm=0.01)
    pipe.zero_grad()
    pipe.train_step(*units[0])
    plain = nn.Sequential(*twin)
    update = optimizer(plain.parameters())
    mse(plain(units[0][0]), units[0][1]).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    update.step()
    assert not differing(pipe.state_dict(), dict(plain.state_dict()))


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.linear(x).chunk(2, -1)
        return a, b


def test_several_outputs_and_named_values() -> None:
    torch.manual_seed(0)
    layers = [
        Layer(Several(), reads=("tokens",), writes=("a", "b")),
        Layer(nn.Linear(WIDTH, WIDTH), reads=("a",), writes=("a",)),
        Layer(Several(), reads=("b",), writes=("b", "c")),
        Layer(nn.Bilinear(WIDTH, WIDTH, WIDTH), reads=("a", "c"), writes=("c",)),
        Layer(Several(), reads=("c",), writes=("logits", "value")),
    ]
    modules = [copy.deepcopy(layer.module) for layer in layers]

    def loss(output: Any, target: Tensor) -> Tensor:
        logits, value = output
        return mse(logits, target) + value.square().mean()

    x, y = _noise(4, WIDTH), _noise(4, WIDTH)
    pipe = Pipeline(layers, loss, schedule="1f1b", num_microbatches=1, num_ranks=5)
    pipe.train_step({"tokens": x}, y, update=False)
    a, b = modules[0](x)
    b, c = modules[2](b)
    loss(modules[4](modules[3](modules[1](a), c)), y).backward()
    expected = {f"{n}.{name}": p.grad for n, m in enumerate(modules) for name, p in m.named_parameters()}
    assert not differing(pipe.gradients(), expected)
    logits, value = pipe.forward({"tokens": x})
    assert logits.shape == value.shape == (4, WIDTH)


@pytest.mark.parametrize("model", ["structured", "skips", "auxiliary", "frozen"])
def test_dual_runs_over_gloo(model: str, worlds: Worlds) -> None:
    check_processes(worlds.run, Case("1f1b", model, 4, 3, recompute=0.5, rows=3))


def test_auxiliary_losses_of_uneven_units() -> None:
    """A middle stage weighs its own loss as the last stage weighs the unit's."""
    case = Case("1f1b", "auxiliary", 3, 4)
    model = build("auxiliary", 10)
    modules = modules_of(model)
    pipe = pipeline(case, model, 3)
    replay = replay_of(pipe, modules, case, model)
    inputs, targets = model.data(10, 0)
    loss = pipe.train_step(inputs, targets)
    rows = [3, 3, 2, 2]
    units = [ReplayUnit(x, y, n / 10) for x, y, n in zip(inputs.split(rows), targets.split(rows), rows, strict=True)]
    assert loss == replay.run(pipe.trace().program(), units)
    assert not differing(pipe.state_dict(), replay.state_dict())


def test_only_the_owner_builds_a_layer() -> None:
    built: list[int] = []

    def factory(number: int) -> Any:
        def make() -> nn.Module:
            built.append(number)
            return nn.Linear(WIDTH, WIDTH)

        return make

    Pipeline([factory(number) for number in range(6)], mse, num_ranks=3, num_microbatches=2)
    assert sorted(built) == list(range(6))
