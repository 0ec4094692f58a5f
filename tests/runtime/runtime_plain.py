"""Plain torch beside a pipeline: modules one after the other, a loop over microbatches. Nothing here knows the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

D = 8


def mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


def batch(rows: int = 8, width: int = D) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(rows, width, generator=generator), torch.randn(rows, width, generator=generator)


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(1)
    return make()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def linears(number: int) -> list[nn.Module]:
    return seeded(lambda: [nn.Linear(D, D) for _ in range(number)])


def run(modules: Sequence[nn.Module], x: Any) -> Any:
    for module in modules:
        x = module(x)
    return x


def accumulate(modules: Sequence[nn.Module], loss: Callable[..., Tensor], x: Tensor, y: Tensor, units: int) -> float:
    """The gradients of ``units`` equal microbatches; the mean loss."""
    total = 0.0
    for part, goal in zip(x.chunk(units), y.chunk(units), strict=True):
        found = loss(run(modules, part), goal)
        (found / units).backward()
        total += found.item() / units
    return total


def gradients(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    return {
        f"{layer}.{name}": parameter.grad
        for layer, module in enumerate(modules)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def weights(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    return {f"{layer}.{name}": t for layer, module in enumerate(modules) for name, t in module.state_dict().items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal to the bit; the first that is not is named."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].to_dense(), tensor.to_dense()), name


def pipedream(
    stages: Sequence[nn.Module],
    x: Tensor,
    y: Tensor,
    units: int,
    rate: float,
    hook: Callable[[Tensor], Any] | None = None,
) -> list[float]:
    """Weight stashing by copies: unit k reads version max(0, k - warmup) of a stage, and every stage then updates."""
    history = [[copy.deepcopy(stage)] for stage in stages]
    losses = []
    for unit, (part, goal) in enumerate(zip(x.chunk(units), y.chunk(units), strict=True)):
        read = [history[s][max(0, unit - (len(stages) - 1 - s))] for s in range(len(stages))]
        found = mse(run(read, part), goal)
        old = [list(stage.parameters()) for stage in read]
        for parameters in old:
            for parameter in parameters:
                parameter.grad = None
        found.backward()
        for stage, parameters, versions in zip(stages, old, history, strict=True):
            for newest, parameter in zip(stage.parameters(), parameters, strict=True):
                newest.grad = parameter.grad
                if hook is not None:
                    hook(newest)
            torch.optim.SGD(stage.parameters(), lr=rate).step()
            stage.zero_grad()
            versions.append(copy.deepcopy(stage))
        losses.append(found.item())
    return losses
