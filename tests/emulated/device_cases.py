"""Train the same pipeline on the host and on emulated devices, and compare to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vpipe import Pipeline
from vpipe.layer import Layer, TiedWeight
from vpipe.schedule import catalog
from vpipe.train.optimizers import Lamb

WIDTH = 16


class Foreign(torch.optim.Optimizer):
    """An optimizer of another package, as torch's know none: it counts in an attribute and in its groups, and keeps
    numbers and lists of tensors in its state. It waits for no device."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "seen": 0})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            group["seen"] += 1
            for p in [p for p in group["params"] if p.grad is not None]:
                state = self.state[p]
                state.setdefault("last", []).append(p.grad.clone())
                del state["last"][:-2]
                state["times"] = state.get("times", 0) + 1
                step = sum(state["last"]) / (self.count + state["times"])
                p.sub_(group["lr"] * step)


class Secretive(Foreign):
    """One that keeps what nobody can copy."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = object()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "nadam": partial(torch.optim.NAdam, lr=0.01, foreach=False),
    "lamb": Lamb,
    "foreign": Foreign,
    "secretive": Secretive,
}
SCHEDULES = [entry.name for entry in catalog.entries()]


class Block(nn.Module):
    """A residual block with a normalisation whose statistics must advance once a forward."""

    def __init__(self, dropout: float = 0.0, batch_norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if batch_norm else nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class First(nn.Module):
    """Writes the value of the chain and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return y, torch.tanh(y)


class Join(nn.Module):
    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return x + skip


def plain(num_layers: int = 8, dropout: float = 0.0) -> list[nn.Module]:
    torch.manual_seed(5)
    return [Block(dropout, batch_norm=index % 3 == 1) for index in range(num_layers)]


def with_skip(num_layers: int = 8) -> list[Layer]:
    torch.manual_seed(6)
    first = Layer(First(), reads=("x",), writes=("x", "skip"))
    join = Layer(Join(), reads=("x", "skip"), writes=("x",))
    return [first, *(Layer(Block(), reads=("x",), writes=("x",)) for _ in range(num_layers - 2)), join]


class Wide(nn.Module):
    """Takes some values and gives some, each of which depends on all."""

    def __init__(self, given: int) -> None:
        super().__init__()
        self.inner, self.given = nn.Linear(WIDTH, WIDTH), given

    def forward(self, *values: Tensor) -> Any:
        mixed = torch.tanh(self.inner(torch.stack(values).sum(0)))
        found = tuple(mixed * (0.5 + number) + values[number % len(values)] for number in range(self.given))
        return found if self.given > 1 else found[0]


class Waiting(nn.Module):
    """A layer that waits for its whole device, as a timer in it would, or an allocator that gives memory back."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *values: Tensor) -> Any:
        if values[0].device.type == "emu":
            torch.accelerator.synchronize()
        return self.inner(*values)


CARRIED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "two": (("x", "y"), ()),
    "three": (("x", "y", "z"), ()),
    "skip": (("x",), ("s", "t")),
}
"""What every message of the chain carries, and what skips from the first stage to the last."""


def wide(num_layers: int, carried: str) -> list[Layer]:
    torch.manual_seed(7)
    chain, skip = CARRIED[carried]
    reads = [("x",), *[chain] * (num_layers - 2), (*chain, *skip)]
    writes = [(*chain, *skip), *[chain] * (num_layers - 2), ("x",)]
    return [Layer(Wide(len(given)), reads=taken, writes=given) for taken, given in zip(reads, writes, strict=True)]


TIED = (TiedWeight(((0, "up.weight"), (7, "up.weight"))),)


class Outcome(NamedTuple):
    """What a training run came to."""

    losses: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def on_host(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu() for name, value in values.items()}


def batches(num_steps: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(9)
    return [
        (torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator))
        for _ in range(num_steps)
    ]


def trained(
    layers: list[Any], device: str, schedule: str, *, steps: int = 2, optimizer: str = "adamw", **options: Any
) -> Outcome:
    """Two steps, then the gradients of one more batch."""
    units = options.setdefault("num_microbatches", 4)
    pipe = Pipeline(
        copy.deepcopy(layers),
        nn.functional.mse_loss,
        schedule=schedule,
        optimizer=OPTIMIZERS[optimizer],
        device=device,
        **options,
    )
    *training, (inputs, targets) = batches(steps + 1, 8 * units)
    losses = [pipe.train_step(*batch) for batch in training]
    gradients: dict[str, Tensor] = {}
    if catalog.get(schedule).mode == "bsp":
        losses.append(pipe.train_step(inputs, targets, update=False))
        gradients = on_host(pipe.gradients())
    losses.append(pipe.evaluate(inputs, targets))
    found = Outcome(losses, gradients, on_host(pipe.state_dict()))
    pipe.close()
    return found


def assert_equal(found: Outcome, expected: Outcome) -> None:
    assert found.losses == expected.losses
    assert found.gradients.keys() == expected.gradients.keys()
    for mine, theirs in ((found.gradients, expected.gradients), (found.state, expected.state)):
        different = [name for name in theirs if not torch.equal(mine[name], theirs[name])]
        assert not different, f"{different[0]} and {len(different) - 1} more differ"
