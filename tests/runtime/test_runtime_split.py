"""The split at work: a user's own module, fallbacks, one recompute per microbatch, replicas."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from runtime_models import CLASSES, WIDTH
from runtime_support import Case, check
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from vpipe import Pipeline
from vpipe.runtime.split.deferred import WeightQueue


class OwnProduct(torch.autograd.Function):
    deferrable = (1,)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        defer = getattr(ctx, "defer", None)
        if defer is None:
            return dy * weight, (dy * x).sum(0)
        defer(lambda: (None, (dy * x).sum(0)))
        return dy * weight, None


class Own(nn.Module):
    """A module of a user's that takes part in the split."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return OwnProduct.apply(x, self.weight)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.own = Own()
        self.calls: list[int] = []  # a number would be put back before a recompute

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
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
    assert [len(layer.calls) for layer in layers] == [8 if recompute else 4] * 8
    for part, goal in zip(x.chunk(4), y.chunk(4), strict=True):
        (nn.functional.mse_loss(plain(part), goal) / 4).backward()
    found = pipe.gradients()
    for name, parameter in plain.named_parameters():
        assert torch.equal(found[name], parameter.grad), name


def test_replicas_are_synchronised() -> None:
    """torch's DDP around a zero-bubble schedule leaves gradients unsynchronised."""
    check(Case("zb-h1", "plain", 4, 4, replicas=2, recompute=1.0))


def _unit(queue: WeightQueue, module: nn.Module, number: int, loss: Tensor) -> None:
    queue.open(number, module.parameters())
    queue.backward([get_gradient_edge(loss)], [torch.ones_like(loss)])
    queue.close()


def test_deferred_gradients_really_wait() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, CLASSES), nn.LayerNorm(CLASSES), Own(CLASSES))
    queue = WeightQueue([name for name, _ in module.named_parameters()])
    _unit(queue, module, 0, module(torch.randn(2, 3)).square().sum())
    queue.run(0)
    module.zero_grad()
    _unit(queue, module, 1, module(torch.randn(2, 3)).square().sum())
    assert all(parameter.grad is None for parameter in module.parameters())
    queue.run(1)
    assert all(parameter.grad is not None for parameter in module.parameters())
