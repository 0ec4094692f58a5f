"""An optimizer's own calls without torch's compiler, where nobody has loaded it.

Every ``torch.optim.Optimizer`` imports ``torch._dynamo`` when it is made and whenever it steps: a second of processor
time before the first step of every run, only to tell a compiler that might be tracing to stop there. A compiler that
is not loaded traces nothing. So for the length of one call a stand-in answers the two names that are asked for:

    torch._dynamo.graph_break()    does nothing outside a trace: it does nothing
    torch._dynamo.disable(f)       is f outside a trace: it is f, and torch forgets it when the call is over

Whoever asks the stand-in for another name gets the real module, loaded then and there. Outside of such a call torch is
as it was, and where the real module is loaded already nothing happens at all.
"""

from __future__ import annotations

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

from vpipe.errors import UserError

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
    with uncompiled(type(optimizer)):
        optimizer.zero_grad(set_to_none=True)
