"""What the models of the pair table are made of: plain torch, for both sides."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

D = 8


class Apply(nn.Module):
    """A function of what comes, and of modules of its own."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, *values: Any) -> Any:
        return self.function(*values, *self.parts)


class Norm(nn.Module):
    """BatchNorm; with ``reads`` its statistics are used behind the forward that has changed them."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.linear, self.norm, self.reads = nn.Linear(D, D), nn.BatchNorm1d(D), reads

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x).reshape(-1, D)).view_as(x)
        return y * self.norm.running_var if self.reads else y


class Noise(nn.Module):
    """Draws from a generator of its own: torch's, Python's or numpy's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        made = {"torch": torch.Generator().manual_seed, "python": random.Random, "numpy": np.random.default_rng}
        self.generator, self.kind = made[kind](7), kind

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        if self.kind == "torch":
            return x * (torch.rand(x.shape, generator=self.generator) > 0.3)
        return x * (0.5 + self.generator.random())


class Chance(nn.Module):
    """Draws from Python's own random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (0.5 + random.random()) if self.training else x


class Counter(nn.Module):
    """A buffer that every forward changes in place and reads; with ``rate`` 0 it is written and stays what it was."""

    def __init__(self, rate: float = 0.2) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("seen", torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.seen.mul_(1 - self.rate).add_(x.detach().float().reshape(-1, D).mean(0).abs(), alpha=self.rate)
        return x * self.seen


class Counted(nn.Module):
    """Counts its forwards by a number that is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x * (1 + 0.01 * self.calls)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.reshape(-1, D).t() @ gradient.reshape(-1, D)


class Deferred(Product):
    """Lets its weight's gradient wait for W."""

    deferrable = (1,)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        product = lambda: x.reshape(-1, D).t() @ gradient.reshape(-1, D)  # noqa: E731
        defer = getattr(ctx, "defer", None)
        if defer is None:
            return gradient @ weight.t(), product()
        defer(lambda: (None, product()))
        return gradient @ weight.t(), None


class Own(nn.Module):
    def __init__(self, function: type[torch.autograd.Function] = Product) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(D, D) * 0.3), function

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.function.apply(x.float(), self.weight)


class Branches(nn.Module):
    """Uses its weight in another way where the data say so: then no unit's graph need be that of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y + 0.1 * x * self.linear.weight.sum() if x.detach().float().sum() > 0 else y


class Teacher(nn.Module):
    """A frozen copy of a layer that follows it between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(D, D), nn.Linear(D, D).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x) + 0.1 * self.teacher(x).detach()


class Auxiliary(nn.Module):
    """Adds to the loss from the middle of the model."""

    def __init__(self, add: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.add = nn.Linear(D, D), add

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.training:
            self.add(0.01 * y.float().pow(2).mean())
        return y


class Wrapped(nn.Module):
    """A layer applied to the main part of a tuple or a dict."""

    def __init__(self, kind: str, module: nn.Module) -> None:
        super().__init__()
        self.kind, self.module = kind, module

    def forward(self, value: Any) -> Any:
        if self.kind == "tuple":
            return self.module(value[0]), value[1]
        return {"main": self.module(value["main"]), "other": value["other"]}


class ScaledLoss(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((D,), 0.9))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return loss_of(output.float() * self.scale, target)


class CountingLoss(nn.Module):
    """A loss without parameters that has a state: a buffer that every forward of training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if self.training:
            self.scale.mul_(0.97)
        return loss_of(output, target) * self.scale


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).pow(2).mean()


def packed(kind: str) -> nn.Module:
    return Apply(lambda x: (x, x.sin()) if kind == "tuple" else {"main": x, "other": x.sin()})


def unpacked() -> nn.Module:
    return Apply(lambda value: sum(value if isinstance(value, tuple) else (value["main"], value["other"])))


def in_place(x: Tensor, linear: nn.Module) -> Tensor:
    return linear(x.mul_(0.9))


def negated(x: Tensor, k: Tensor) -> Tensor:
    return x.mul_(-0.9) + k


def chunks(x: Tensor, linear: nn.Module) -> Tensor:
    """The second half is saved as a view, which does not begin where its memory does."""
    one, other = linear(x).chunk(2, -1)
    return one * other


def residual(x: Tensor, h: Tensor, linear: nn.Module) -> Tensor:
    return x + h + linear(h)


def half(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def clamped(parameter: nn.Parameter) -> None:
    parameter.grad.clamp_(-0.01, 0.01)


def hooked(layers: list[Any], kind: str) -> list[Any]:
    """The same layers; a weight of the first and of the last has a hook."""
    for module, *_ in (layers[0], layers[-1]):
        weight = next(module.parameters())
        if kind == "tensor":
            weight.register_hook(half)
        else:
            weight.register_post_accumulate_grad_hook(clamped)
    return layers


sgd = partial(torch.optim.SGD, lr=0.1)
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adam = partial(torch.optim.Adam, lr=0.01)
clipped_adam = partial(torch.optim.AdamW, lr=0.01, foreach=False)


def rate(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def rate_of(update: float) -> float:
    return 0.1 / (1 + update)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def parts_of(modules: Iterable[nn.Module], kind: Any) -> Iterable[Any]:
    return (part for module in modules for part in module.modules() if isinstance(part, kind))


def follow(modules: Iterable[nn.Module]) -> None:
    """Teachers take a step towards their students."""
    with torch.no_grad():
        for each in parts_of(modules, Teacher):
            for slow, fast in zip(each.teacher.parameters(), each.student.parameters(), strict=True):
                slow.lerp_(fast, 0.1)


def freeze(modules: dict[int, nn.Module], frozen: list[int], thawed: list[int]) -> None:
    for layers, trained in ((frozen, False), (thawed, True)):
        for layer in layers:
            if layer in modules:
                modules[layer].requires_grad_(trained)
    for each in parts_of(modules.values(), Teacher):
        each.teacher.requires_grad_(False)


def set_modes(modules: Iterable[nn.Module], training: bool) -> None:
    for part in parts_of(modules, nn.Dropout | nn.BatchNorm1d):
        part.train(training)


def batch(number: int, rows: int, length: int = 0, finite: bool = True) -> tuple[Tensor, Tensor]:
    """Inputs and targets; with a length, of sequences."""
    generator = torch.Generator().manual_seed(100 + number)
    shape = (rows, length, D) if length else (rows, D)
    x, y = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    return x, y if finite else y.fill_(float("inf"))


def units(x: Tensor, y: Tensor, count: int) -> list[tuple[Tensor, Tensor, float]]:
    """The batch cut into units, the first of them a row larger where they do not divide: inputs, targets, share."""
    sizes = [len(x) // count + (k < len(x) % count) for k in range(count)]
    equal = len(set(sizes)) == 1
    return [
        (a, b, 1 / count if equal else size / len(x))
        for a, b, size in zip(x.split(sizes), y.split(sizes), sizes, strict=True)
    ]


class Mismatch(AssertionError):
    """A number of the pipeline is not that of plain torch."""


LATER: list[str] = []
"""In a rank that is a process, what differs: it goes on, because others wait for it. (Else empty.)"""
IN_A_PROCESS = [False]


def differs(what: str) -> None:
    if not IN_A_PROCESS[0]:
        raise Mismatch(what)
    LATER.append(what)


def same(what: str, found: float, expected: float) -> None:
    if repr(found) != repr(expected):
        differs(f"{what}: {found!r}, plain torch {expected!r}")
