"""What the runtime does with an optimizer: makes it, steps it, sets its learning rate.

Every ``torch.optim.Optimizer`` imports ``torch._dynamo`` when it is made and whenever it steps: a second of processor
time before the first step of every run, only to tell a compiler that might be tracing to stop there. A compiler that
is not loaded traces nothing. So for the length of one call a stand-in answers the two names that are asked for:

    torch._dynamo.graph_break()    does nothing outside a trace: it does nothing
    torch._dynamo.disable(f)       is f outside a trace: it is f, and torch forgets it when the call is over

Whoever asks the stand-in for another name gets the real module, loaded then and there. Outside of such a call torch is
as it was, and where the real module is loaded already nothing happens at all.

The learning rate is a pure function of the update's number: all stages must use the same rate for the same update, and
a resumed run must go on as if it had never stopped.

    pipe.set_learning_rate(LearningRate(3e-4, "cosine", total=1000, warmup=100))
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from vpipe.errors import UserError

if TYPE_CHECKING:
    from vpipe.runtime.updates.blocks import Block

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


NUMBERWISE = tuple(
    getattr(torch.optim, name)
    for name in ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop", "SGD"]
)
"""Classes that compute each number of a parameter from this number's own gradient and state, and from counts; what they
do to clear gradients is torch's."""

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
        try:
            with uncompiled(self.kind) if isinstance(self.kind, type) else nullcontext():
                made = self.kind(parameters, **self.options)
        except TypeError as error:
            raise UserError(
                f"the optimizer {self.name} does not take {dict(self.options)} ({error}); change "
                "training.optimizer_options"
            ) from None
        if not isinstance(made, Optimizer):
            raise UserError(
                f"the optimizer {self.name!r} must make a torch.optim.Optimizer, not a {type(made).__name__}"
            )
        return made


def step(optimizer: Optimizer) -> None:
    """``optimizer.step()``"""
    with uncompiled(type(optimizer)):
        optimizer.step()


def clear(optimizer: Optimizer) -> None:
    """``optimizer.zero_grad(set_to_none=True)``"""
    if type(optimizer) not in NUMBERWISE:
        with uncompiled(type(optimizer)):
            optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


class OptimizerStep:
    """The updates of one optimizer of one stage."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def prepare(self) -> Sequence[Block]:
        """Called when all gradients are there: what of the weights must lie together for this update (``flat``)."""
        return ()

    def step(self) -> None:
        """One update, after ``prepare``."""
        step(self.optimizer)

    def clear(self) -> None:
        """The gradients are used."""
        clear(self.optimizer)


@dataclass(frozen=True)
class LearningRate:
    """``rate(n)`` is the rate of update ``n`` of a run that makes ``total``."""

    peak: float
    policy: str = "constant"
    """How it moves after warm-up: one of ``POLICIES``."""
    total: int = 1
    warmup: float = 0.0
    """Updates during which it rises to its peak."""
    lowest: float = 0.0
    """It never falls below this after warm-up."""
    degree: float = 0.5
    """For polynomial."""
    steps: tuple[float, ...] = ()
    """For step: the updates from which on it is multiplied by ``factor`` once more."""
    factor: float = 0.1

    def __call__(self, update: int) -> float:
        if update < self.warmup:
            return self.peak * self._rise(update)
        return max(self.lowest, self.peak * POLICIES[self.policy](self, update))

    def _rise(self, update: int) -> float:
        """BERT's warm-up begins at zero, the others at the first step above it."""
        return (update if self.policy == "polynomial" else update + 1) / max(self.warmup, 1)


def _constant(rate: LearningRate, update: int) -> float:
    return 1.0


def _linear(rate: LearningRate, update: int) -> float:
    return max(0.0, (rate.total - update) / max(1.0, rate.total - rate.warmup))


def _polynomial(rate: LearningRate, update: int) -> float:
    found: float = max(0.0, 1 - update / rate.total) ** rate.degree
    return found


def _cosine(rate: LearningRate, update: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (update - rate.warmup) / max(1.0, rate.total - rate.warmup))))


def _step(rate: LearningRate, update: int) -> float:
    return rate.factor ** sum(update >= place for place in rate.steps)


def _inverse_sqrt(rate: LearningRate, update: int) -> float:
    anchor = max(rate.warmup, 1.0)
    return math.sqrt(anchor / max(update + 1, anchor))


POLICIES: dict[str, Callable[[LearningRate, int], float]] = {
    "constant": _constant,
    "linear": _linear,
    "polynomial": _polynomial,
    "cosine": _cosine,
    "step": _step,
    "inverse_sqrt": _inverse_sqrt,
}
"""Policy → what the peak is multiplied by at an update after warm-up."""
