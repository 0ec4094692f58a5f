"""Updates that are taken back, and those that a device leaves out.

An update should be made only if the gradients are finite, and where the host does not wait, only the device knows. From
the best way to the worst:

    told         the optimizer's own kernel is told (``found_inf``), as torch's GradScaler tells it
    taken back   the update is made, whatever comes of it; what it changes was copied before, and is put back when the
                 host reads the numbers of the step and they say so. In an asynchronous schedule units of later updates
                 have read the weights by then, so all ranks put back what they had when the step began, and run it once
                 more, this time asking before every update
    asked        the host waits for the answer: for an optimizer that keeps more than can be copied

Units, and with them random numbers, are those of the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from vpipe.runtime.stage import Stage
from vpipe.runtime.updates.optimizing import uncompiled


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
    """Whether ``Rollback`` knows all that it may change: what it has beside state and groups is plain data."""
    return all(_is_plain(value) for value in _more(optimizer).values())


def _more(optimizer: Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if name not in _common()}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    return value is None or isinstance(value, int | float | complex | str | bytes | torch.dtype | torch.device)


class Rollback:
    """What optimizers may change, and the buffers, generators and gradients of stages, as they were."""

    def __init__(self, optimizers: Iterable[Optimizer], stages: Iterable[Stage]) -> None:
        stages = list(stages)
        self._weights: list[tuple[Tensor, Tensor]] = []
        self._optimizers = []
        """(optimizer, its state, the settings of its groups, what it has beside these)."""
        for optimizer in optimizers:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            self._weights += [(p, p.detach().clone()) for p in held if p.requires_grad or p.grad is not None]
            settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            state = {p: tree_map(_copied, state) for p, state in optimizer.state.items()}
            self._optimizers.append((optimizer, state, tree_map(_copied, settings), deepcopy(_more(optimizer))))
        self._found = [stage.state() for stage in stages]
        parameters = [p for stage in stages for p in stage.weights.parameters.values()]
        self._gradients = [(p, None if p.grad is None else p.grad.clone()) for p in parameters]

    def restore(self) -> None:
        """Put all of it back; called once, since the copies of the state become the state."""
        with torch.no_grad():
            for parameter, old in self._weights:
                parameter.copy_(old)
        for optimizer, state, groups, more in self._optimizers:
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)
            for name in _more(optimizer).keys() - more.keys():
                delattr(optimizer, name)
            vars(optimizer).update(more)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for found in self._found:
            found.restore()


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else deepcopy(leaf)
