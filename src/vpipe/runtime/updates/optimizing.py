"""What the runtime does with an optimizer: makes it, steps it, sets its learning rate.

Every ``torch.optim.Optimizer`` imports ``torch._dynamo`` when it is made and whenever it steps: a second of processor
time before the first step of every run, only to tell a compiler that might be tracing to stop there. A compiler that
is not loaded traces nothing. So for the length of one call a stand-in answers the two names that are asked for:

    torch._dynamo.graph_break()    does nothing outside a trace: it does nothing
    torch._dynamo.disable(f)       is f outside a trace: it is f, and torch forgets it when the call is over

A request for another name loads the real module, loaded then and there. Outside of such a call torch is
as it was, and where the real module is loaded already nothing happens at all.

The learning rate is a pure function of progress, said in updates of a run that makes ``total``: all stages must use the
same rate at the same place, and a resumed run must go on as if it had never stopped.

    pipe.set_learning_rate(LearningRate(3e-4, "cosine", total=1000, warmup=100))
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from vpipe.errors import UserError, nearest

COMPILER = "torch._dynamo"
REMEMBERED = "__dynamo_disable"
"""The attribute in which ``torch._compile`` keeps what ``disable`` made of a function."""
PLAIN = ("torch.optim.", "vpipe.")
"""Packages whose optimizers run code of torch and ours alone."""


class Asleep(ModuleType):
    """What stands for the compiler while it is not needed."""

    def __init__(self) -> None:
        super().__init__(COMPILER)
        self.disabled: list[Any] = []

    def graph_break(self, msg: str = "") -> None:
        """Nothing is traced, so nothing is interrupted."""

    def disable(self, function: Callable[..., Any], recursive: bool = True, **_: Any) -> Callable[..., Any]:
        self.disabled.append(function)
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.leave()
        return getattr(import_module(COMPILER), name)

    def enter(self) -> None:
        sys.modules[COMPILER] = self
        torch.__dict__["_dynamo"] = self

    def leave(self) -> None:
        """Torch as it was: the next call of a function that was not disabled asks again."""
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER]
        if torch.__dict__.get("_dynamo") is self:
            del torch.__dict__["_dynamo"]
        while self.disabled:
            with suppress(AttributeError):
                delattr(self.disabled.pop(), REMEMBERED)


OPTIONS = "vpipe_options"
"""The attribute of a parameter that says what its optimizer does otherwise with it."""
CLIP = "vpipe_clip"
"""That which says by the norm of which group's gradients its own is clipped, and to what norm: two numbers; without it
by that of all that have none."""
RATE_PART = "rate_part"
"""The key of a parameter group whose learning rate is a part of that of all."""

_LOCK = threading.Lock()
_ASLEEP = Asleep()
_inside = 0
"""Calls under way: ranks may be threads."""


@contextmanager
def uncompiled(kind: type[Optimizer]) -> Iterator[None]:
    """Around a call of an optimizer of this class."""
    global _inside
    if sys.modules.get(COMPILER, _ASLEEP) is not _ASLEEP or not kind.__module__.startswith(PLAIN):
        yield
        return
    with _LOCK:
        _inside += 1
        if _inside == 1:
            _ASLEEP.enter()
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            if not _inside:
                _ASLEEP.leave()


@dataclass(frozen=True)
class OptimizerMaker:
    """Makes optimizers of one kind, which a config calls ``name``."""

    name: str
    kind: Callable[..., Any]
    options: Mapping[str, Any]

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        groups = self._groups(list(parameters))
        try:
            with uncompiled(self.kind) if isinstance(self.kind, type) else nullcontext():
                made = self.kind(groups, **self.options)
        except (TypeError, ValueError) as error:
            if isinstance(error, ValueError) and not groups:
                raise
            raise UserError(
                f"the optimizer {self.name} does not take {dict(self.options)} ({error}); change "
                "training.optimizer_options"
            ) from None
        if not isinstance(made, Optimizer):
            raise UserError(
                f"the optimizer {self.name!r} must make a torch.optim.Optimizer, not a {type(made).__name__}"
            )
        known = {*made.defaults, "params", RATE_PART}
        for name in sorted({name for group in made.param_groups for name in group} - known):
            raise UserError(
                f"training.parameter_groups has {name}, which the optimizer {self.name} does not take"
                f"{nearest(name, known)}; it has {', '.join(sorted(made.defaults.keys() - {'lr'}))}, learning_rate, "
                "layer_decay, gradient_clipping and frozen"
            )
        return with_rate_parts(made)

    def _groups(self, parameters: list[nn.Parameter]) -> list[Any]:
        """The parameters, those that are marked alike together."""
        found: dict[str, dict[str, Any]] = {}
        for parameter in parameters:
            options = dict(getattr(parameter, OPTIONS, {}))
            if "learning_rate" in options:
                part = options.pop("learning_rate")
                options |= {"lr": part * self.options["lr"], RATE_PART: part}
            group = found.setdefault(repr(sorted(options.items())), {"params": [], **options})
            group["params"].append(parameter)
        plain = len(found) < 2 and not any(group.keys() - {"params"} for group in found.values())
        return parameters if plain else list(found.values())


def with_rate_parts(optimizer: Optimizer) -> Optimizer:
    """The optimizer, its groups knowing which part of the learning rate is theirs: what they were made with."""
    whole = optimizer.defaults.get("lr")
    for group in optimizer.param_groups:
        if whole and group.get("lr", whole) != whole:
            group.setdefault(RATE_PART, float(group["lr"]) / float(whole))
    return optimizer


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Let each group have its part of a learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(RATE_PART, 1.0)


def step(optimizer: Optimizer) -> None:
    """``optimizer.step()``"""
    with uncompiled(type(optimizer)):
        optimizer.step()


def clear(optimizer: Optimizer) -> None:
    """``optimizer.zero_grad(set_to_none=True)``"""
    with uncompiled(type(optimizer)):
        optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class LearningRate:
    """``rate(u)`` is the rate of update ``u`` of a run that makes ``total``; between two updates there are rates too.
    With W = ``warmup`` it is peak · min(1, (u + 1) / W) before W (polynomial: u / W), then peak · policy(u), and never
    above the peak."""

    peak: float
    policy: str = "constant"
    """How it moves after warm-up: one of ``POLICIES``."""
    total: float = 1
    warmup: int = 0
    """Updates during which it rises to its peak."""
    lowest: float = 0.0
    """It never falls below this after warm-up."""
    degree: float = 0.5
    """For polynomial."""
    steps: tuple[int, ...] = ()
    """For step: the updates from which on it is multiplied by ``factor`` once more."""
    factor: float = 0.1

    def __call__(self, update: float) -> float:
        if update < self.warmup:  # BERT's begins at zero, the others at the first step above it
            return self.peak * min(1.0, (update if self.policy == "polynomial" else update + 1) / self.warmup)
        return min(self.peak, max(self.lowest, self.peak * POLICIES[self.policy](self, update)))


def _constant(rate: LearningRate, update: float) -> float:
    return 1.0


def _linear(rate: LearningRate, update: float) -> float:
    return max(0.0, (rate.total - update) / max(1.0, rate.total - rate.warmup))


def _polynomial(rate: LearningRate, update: float) -> float:
    found: float = max(0.0, 1 - update / rate.total) ** rate.degree
    return found


def _cosine(rate: LearningRate, update: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (update - rate.warmup) / max(1.0, rate.total - rate.warmup))))


def _step(rate: LearningRate, update: float) -> float:
    return rate.factor ** sum(update >= place for place in rate.steps)


def _inverse_sqrt(rate: LearningRate, update: float) -> float:
    anchor = max(rate.warmup, 1.0)
    return math.sqrt(anchor / max(update + 1, anchor))


POLICIES: dict[str, Callable[[LearningRate, float], float]] = {
    "constant": _constant,
    "linear": _linear,
    "polynomial": _polynomial,
    "cosine": _cosine,
    "step": _step,
    "inverse_sqrt": _inverse_sqrt,
}
"""Policy → what the peak is multiplied by at an update after warm-up."""
