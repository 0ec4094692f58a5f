"""The split at work: a user's own module, fallbacks, one recompute per microbatch, replicas."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from runtime_models import CLASSES, WIDTH
from runtime_support import Case, check
from torch import Tensor, nn

from vpipe import Pipeline
from vpipe.runtime import deferred
from vpipe.runtime.deferred import WeightQueue


class OwnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, defer: Callable[[Callable[[], None]], None]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.defer = defer
        return x * weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.defer(lambda: deferred.accumulate(weight, (dy * x).sum(0)))
        return dy * weight, None, None


class Own(nn.Module):
    """A module of a user's that takes part in the split."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight

    def deferred_forward(self, x: Tensor, defer: Callable[[Callable[[], None]], None]) -> Tensor:
        return OwnProduct.apply(x, self.weight, defer)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.own = Own()
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.own(self.norm(torch.tanh(self.linear(x))))


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "dualpipe-v", "1f1b"])
@pytest.mark.parametrize("recompute", [0.0, 1.0])
def test_one_recompute_per_microbatch(schedule: str, recompute: float) -> None:
    """torch recomputes once per group of parameters; here once per unit. A user's module and fallbacks give autograd's bits."""
    torch.manual_seed(0)
    layers = [Counting() for _ in range(8)]
    plain = copy.deepcopy(nn.Sequential(*layers))
    pipe = Pipeline(
        layers, nn.functional.mse_loss, schedule=schedule, num_microbatches=4, num_ranks=2, recompute=recompute
    )
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    pipe.train_step(x, y, update=False)
    assert [layer.num_calls for layer in layers] == [8 if recompute else 4] * 8
    for part, goal in zip(x.chunk(4), y.chunk(4), strict=True):
        (nn.functional.mse_loss(plain(part), goal) / 4).backward()
    found = pipe.gradients()
    for name, parameter in plain.named_parameters():
        assert torch.equal(found[name], parameter.grad), name


def test_replicas_are_synchronised() -> None:
    """torch's DDP around a zero-bubble schedule leaves gradients unsynchronised."""
    check(Case("zb-h1", "plain", 4, 4, replicas=2, recompute=1.0))


def test_deferred_gradients_really_wait() -> None:
    torch.manual_seed(0)
    module, queue = nn.Linear(3, CLASSES), WeightQueue()
    deferred.install([module], queue)
    queue.open(0)
    module(torch.randn(2, 3)).sum().backward()
    queue.close()
    assert module.weight.grad is None
    queue.run(0)
    assert module.weight.grad is not None


def test_fused_accumulation_is_close() -> None:
    torch.manual_seed(0)
    module = nn.Linear(WIDTH, WIDTH)
    fused = copy.deepcopy(module)
    queue = WeightQueue(fused=True)
    deferred.install([fused], queue)
    for number in range(3):
        x = torch.randn(5, WIDTH)
        queue.open(number)
        fused(x).square().sum().backward()
        queue.close()
        queue.run(number)
        module(x).square().sum().backward()
    torch.testing.assert_close(fused.weight.grad, module.weight.grad)
