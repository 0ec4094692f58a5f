"""An update that is made only if the gradients are finite, where only the device knows whether they are.

Three ways, from the best:

    told         the optimizer's own kernel is told (``found_inf``), as torch's GradScaler tells it
    taken back   the update is made, whatever comes of it; what it changes was copied before, and is put back when the
                 host reads the numbers of the step and they say so. In an asynchronous schedule other updates follow
                 before that, so the whole step is taken back there (``repeats``)
    asked        the host waits for the answer: for an optimizer that keeps more than can be copied
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from vpipe.runtime.updates.optimizing import uncompiled

TakeBack = Callable[[], None]


@cache
def _common() -> frozenset[str]:
    """What every optimizer has; a learning-rate scheduler of torch puts ``step`` there too."""
    with uncompiled(Optimizer):
        return frozenset([*vars(Optimizer([torch.zeros(1)], {})), "step"])


def can_be_told(optimizer: Optimizer) -> bool:
    """Whether its kernels skip the update by themselves."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_told(finite: Tensor, optimizer: Optimizer, step: Callable[[], None]) -> None:
    """Step if ``finite``, as the device decides."""
    held: Any = optimizer
    held.found_inf, held.grad_scale = 1.0 - finite.float(), None
    try:
        step()
    finally:
        del held.found_inf, held.grad_scale


def can_be_restored(optimizer: Optimizer) -> bool:
    """Whether ``Before`` knows all that the optimizer may change: what it has beside state and groups is plain data."""
    return all(_is_plain(value) for value in _more(optimizer).values())


def _more(optimizer: Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if name not in _common()}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    return value is None or isinstance(value, int | float | complex | str | bytes | torch.dtype | torch.device)


class Before:
    """What an optimizer may change, as it was."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self._weights = [(p, p.detach().clone()) for p in held if p.requires_grad or p.grad is not None]
        self._state = {p: tree_map(_copied, state) for p, state in optimizer.state.items()}
        self._groups = [
            {k: tree_map(_copied, v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups
        ]
        self._more = deepcopy(_more(optimizer))

    def restore(self) -> None:
        """Put all of it back; called once, since the copies of the state become the state."""
        with torch.no_grad():
            for parameter, old in self._weights:
                parameter.copy_(old)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, values in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(values)
        for name in _more(self._optimizer).keys() - self._more.keys():
            delattr(self._optimizer, name)
        vars(self._optimizer).update(self._more)


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else deepcopy(leaf)
