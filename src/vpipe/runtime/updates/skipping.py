"""An update that is made only if the gradients are finite, where only the device knows whether they are.

Three ways, from the best:

    fused       the optimizer's own kernel is told (``found_inf``), as torch's GradScaler tells it
    kept        weights and state are copied before the step, and the device chooses between old and new after it; what
                the host counts (Adam's ``step``) is taken back when the step's numbers are read
    asked       the host waits for the answer: for optimizers that we do not know, and where several updates of a step
                would count on the host (an asynchronous schedule and Adam that is not fused)
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vpipe.runtime.device import is_host

TakeBack = Callable[[], None]
_OPEN = ("torch.optim.", "vpipe.")
"""Packages whose optimizers keep all they know in ``state`` and ``param_groups``."""


def step_if(finite: Tensor, optimizer: Optimizer, step: Callable[[], None], *, once: bool) -> TakeBack | None:
    """Step if ``finite``. ``once``: no other update follows before the host reads the answer; the result then takes
    back what the host has counted, if the answer is no."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        held: Any = optimizer
        held.found_inf, held.grad_scale = 1.0 - finite.float(), None
        try:
            step()
        finally:
            del held.found_inf, held.grad_scale
        return None
    if not keeps_all_in_state(optimizer) or (not once and _counts_on_host(optimizer)):
        if bool(finite):
            step()
        return None
    before = Before(optimizer)
    step()
    return before.unless(finite, once)


def keeps_all_in_state(optimizer: Optimizer) -> bool:
    """Whether ``Before`` knows all that the optimizer may change beside weights."""
    return type(optimizer).__module__.startswith(_OPEN)


def _counts_on_host(optimizer: Optimizer) -> bool:
    return any(not _is_there(value) for state in optimizer.state.values() for value in state.values())


def _is_there(value: Any) -> bool:
    return isinstance(value, Tensor) and not is_host(value.device)


class Before:
    """What an optimizer may change, as it was."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._weights = [
            (p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        self._state = {
            p: {name: value.clone() if isinstance(value, Tensor) else deepcopy(value) for name, value in state.items()}
            for p, state in optimizer.state.items()
        }
        self._groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]

    def unless(self, finite: Tensor, once: bool) -> TakeBack | None:
        """Let the device keep the old where it must; state that this step has made, and what the host counts, is taken
        back by the host."""
        with torch.no_grad():
            for parameter, old in self._weights:
                parameter.copy_(torch.where(finite, parameter, old))
            for parameter, state in self._state.items():
                for name, old in state.items():
                    new = self._optimizer.state[parameter].get(name)
                    if _is_there(old) and isinstance(new, Tensor):
                        new.copy_(torch.where(finite, new, old))
        if once:
            return self._take_back
        if self._has_made_some() and not bool(finite):  # in the first update only
            self._take_back()
        return None

    def restore(self) -> None:
        """Take all back, whatever the device says."""
        with torch.no_grad():
            for parameter, old in self._weights:
                parameter.copy_(old)
            for parameter, state in self._state.items():
                for name, value in state.items():
                    new = self._optimizer.state[parameter].get(name)
                    if _is_there(value) and isinstance(new, Tensor):
                        new.copy_(value)
        self._take_back()

    def _has_made_some(self) -> bool:
        return any(state.keys() != self._state.get(p, {}).keys() for p, state in self._optimizer.state.items())

    def _take_back(self) -> None:
        for parameter, state in list(self._optimizer.state.items()):
            old = self._state.get(parameter)
            if old is None:
                del self._optimizer.state[parameter]
                continue
            for name in list(state):
                if name not in old:
                    del state[name]
                elif not _is_there(old[name]):
                    state[name] = old[name]
        for group, values in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(values)
