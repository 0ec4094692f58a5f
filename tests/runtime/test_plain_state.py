"""What layers hold beside weights, against plain torch: buffers that a forward changes and reads, random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from runtime_plain import D, accumulate, batch, gradients, linears, mse, same, seeded, sgd, weights
from torch import Tensor, nn
from torch.nn import functional

from vpipe import Pipeline, UserError


class Holds(nn.Module):
    """``change`` runs before the weight is used, ``use`` on the result."""

    def __init__(self, change: Callable[[Any, Tensor], Any], use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(D, D), nn.BatchNorm1d(D)
        self.register_buffer("scale", torch.ones(D))
        self.register_buffer("mean", torch.zeros(D))
        self.generator: Any = torch.Generator().manual_seed(7)
        self.python, self.numpy = random.Random(5), numpy.random.default_rng(5)
        self.change, self.use = change, use

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.change(self, x.detach())
        return self.use(self, self.linear(x))


def _behind(held: Any, x: Tensor) -> None:
    held.scale.data.mul_(0.8).add_(x.mean(0).abs(), alpha=0.2)


def _late(held: Any, x: Tensor) -> None:
    if "late" not in held._buffers:
        held.register_buffer("late", torch.ones(D))
    with torch.no_grad():
        held.late.mul_(0.8).add_(x.mean(0).abs(), alpha=0.2)


def _draw(held: Any, y: Tensor) -> Tensor:
    mask = torch.rand(y.shape, generator=held.generator) > 0.3
    return y * mask * held.python.random() * float(held.numpy.random())


def _nothing(held: Any, x: Tensor) -> None:
    pass


HELD: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any, Tensor], Tensor]]] = {
    "changed in place": (lambda held, x: held.scale.mul_(0.9).add_(0.2), lambda held, y: y.tanh() * held.scale[:]),
    "behind the version counter": (_behind, lambda held, y: y * held.scale),
    "statistics of a BatchNorm": (_nothing, lambda held, y: held.norm(y) * held.norm.running_var),
    "statistics of one's own": (
        _nothing, lambda held, y: functional.batch_norm(y, held.mean, held.scale, training=True) * held.scale,
    ),
    "registered in forward": (_late, lambda held, y: y + held.late.clone()),
    "registered in forward and saved": (_late, lambda held, y: y + held.late),
    "generators": (_nothing, _draw),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"recompute": 1.0}, {"swap": 1.0}, {"recompute": 0.5, "swap": 0.5}])
@pytest.mark.parametrize(
    ("schedule", "num_ranks"), [("gpipe", 1), ("1f1b", 2), ("zb-h1", 2), ("zb-v", 2), ("naive", 2)]
)
@pytest.mark.parametrize("kind", HELD)
def test_what_a_forward_changes_and_reads(kind: str, schedule: str, num_ranks: int, options: dict[str, Any]) -> None:
    def make() -> list[nn.Module]:
        return seeded(lambda: [Holds(*HELD[kind]) for _ in range(4)])

    x, y = batch()
    plain = make()
    pipe = Pipeline(make(), mse, schedule=schedule, num_ranks=num_ranks, optimizer=sgd, **options)
    optimizer = sgd(nn.ModuleList(plain).parameters())
    for _ in range(2):
        assert pipe.train_step(x, y) == accumulate(plain, mse, x, y, 4)
        optimizer.step()
        optimizer.zero_grad()
        same(pipe.state_dict(), weights(plain))


def test_statistics_that_change_only_in_train_mode() -> None:
    """A part that is switched to train mode later is looked at again."""

    def make() -> list[nn.Module]:
        return seeded(lambda: [Holds(*HELD["behind the version counter"]) for _ in range(4)])

    x, y = batch()
    plain, layers = make(), make()
    pipe = Pipeline(layers, mse, schedule="gpipe", num_ranks=2)
    for training in (False, True):
        for module in (*plain, *layers):
            module.train(training)
        assert pipe.train_step(x, y, update=False) == accumulate(plain, mse, x, y, 4)
        same(pipe.gradients(), gradients(plain))


def test_a_buffer_that_stages_share_may_not_change() -> None:
    def make(change: Callable[[Any, Tensor], Any]) -> list[nn.Module]:
        layers = [Holds(change, lambda held, y: y * held.scale) for _ in range(4)]
        for layer in layers:
            layer.scale = layers[0].scale
        return layers

    x, y = batch()
    plain, constant = seeded(lambda: make(_nothing)), seeded(lambda: make(_nothing))
    assert Pipeline(constant, mse, num_ranks=2).train_step(x, y, update=False) == accumulate(plain, mse, x, y, 4)
    plain, alone = seeded(lambda: make(_behind)), seeded(lambda: make(_behind))
    assert Pipeline(alone, mse, num_ranks=1).train_step(x, y, update=False) == accumulate(plain, mse, x, y, 4)
    with pytest.raises(
        UserError, match=r"layer \d \(Holds\) changes its buffer 'scale', which a layer of another stage"
    ):
        Pipeline(make(_behind), mse, num_ranks=2).train_step(x, y, update=False)


@pytest.mark.parametrize("options", [{"replicas": 2}, {"num_ranks": 4}, {"num_ranks": 2, "recompute": {0}}])
def test_a_generator_for_whose_numbers_there_is_no_order_is_refused(options: dict[str, Any]) -> None:
    layers = [Holds(*HELD["generators"]) for _ in range(4)]
    if "replicas" not in options:
        layers[1].generator = layers[0].generator
    with pytest.raises(UserError, match=r"layer \d \(Holds\) draws from a generator that"):
        Pipeline(layers, mse, **{"num_ranks": 2, **options})


@pytest.mark.parametrize("draw", [random.random, lambda: float(numpy.random.rand())])
def test_draws_from_the_global_generators_are_refused(draw: Callable[[], float]) -> None:
    def make() -> list[nn.Module]:
        return seeded(lambda: [Holds(_nothing, lambda _, y: y * draw()) for _ in range(2)])

    x, y = batch()
    random.seed(3)
    numpy.random.seed(3)
    expected = accumulate(make(), mse, x, y, 4)
    random.seed(3)
    numpy.random.seed(3)
    assert Pipeline(make(), mse, num_ranks=1).train_step(x, y, update=False) == expected
    for options in ({"num_ranks": 2}, {"num_ranks": 1, "recompute": 1.0}):
        with pytest.raises(UserError, match=r"a layer of stage \d \(layers \d to \d\) draws from Python's or numpy's"):
            Pipeline(make(), mse, **options).train_step(x, y, update=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "change"),
    [
        (SimpleNamespace, lambda each: setattr(each, "n", getattr(each, "n", 0) + 1)),
        (dict, lambda each: each.update(n=each.get("n", 0) + 1)),
        (list, lambda each: each.append(1)),
    ],
)
def test_a_python_object_that_stages_share_may_not_change(
    made: Callable[[], Any], change: Callable[[Any], Any]
) -> None:
    """Which stage was first decided the numbers."""

    def pipeline(change: Callable[[Any], Any], num_ranks: int) -> Pipeline:
        shared = made()
        layers = seeded(lambda: [Holds(_nothing, lambda _, y: (change(shared), y)[1]) for _ in range(2)])
        for layer in layers:
            layer.shared = shared
        return Pipeline(layers, mse, num_ranks=num_ranks)

    x, y = batch()
    with pytest.raises(
        UserError, match=r"changes 'shared' of layer 0 .*give each layer its own, or put all on one stage"
    ):
        pipeline(change, 2).train_step(x, y, update=False)
    expected = pipeline(change, 1).train_step(x, y, update=False)
    caches = pipeline(lambda each: each.setdefault("mask", torch.ones(1)) if made is dict else None, 2)
    assert caches.train_step(x, y, update=False) == expected


class Counting(nn.Module):
    """A loss with a state and without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls.add_(1)
        return mse(output, target) * self.calls


@pytest.mark.parametrize("options", [{}, {"recompute": 1.0}, {"swap": 1.0}, {"schedule": "zb-h1"}])
def test_a_loss_with_a_buffer_that_changes(options: dict[str, Any]) -> None:
    x, y = batch()
    plain, loss, ours = linears(2), Counting(), Counting()
    pipe = Pipeline(linears(2), ours, num_ranks=2, **options)
    assert pipe.train_step(x, y, update=False) == accumulate(plain, loss, x, y, 4)
    same(pipe.gradients(), gradients(plain))
    assert torch.equal(ours.calls, loss.calls)
    assert list(pipe.state_dict()) == [*weights(plain), "2.calls"], "or a resumed run would count anew"
