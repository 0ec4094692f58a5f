"""The moving average of weights: after each update, average ← decay · average + (1 − decay) · weight.

It begins at the weights before their first update: torch's ``AveragedModel`` with ``get_ema_multi_avg_fn(decay)`` which
has been told once before the first step. A stage's optimizer keeps it with what else it keeps of a parameter, so
checkpoints, copies, moves and updates that are taken back have it as they have Adam's moments.

    pipe = Pipeline(layers, loss, optimizer=averaging(torch.optim.Adam, 0.999))
    with averaged(pipe):
        pipe.evaluate(inputs, targets)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vpipe.runtime.holdings import Holdings
from vpipe.runtime.surroundings import forget_casts

AVERAGE = "vpipe_average"
"""Its name in the state of a parameter."""


def averaging(make: Callable[[Any], Optimizer], decay: float) -> Callable[[Any], Optimizer]:
    """Makes the optimizers that ``make`` does, which keep averages of their weights, too."""

    def made(parameters: Iterable[nn.Parameter]) -> Optimizer:
        optimizer = make(parameters)
        begun: dict[Tensor, Tensor] = {}

        def before(self: Optimizer, *_: Any) -> None:
            begun.clear()
            for parameter in _parameters(self):  # an optimizer may take any state for one that it has made
                if parameter.grad is not None and AVERAGE not in self.state.get(parameter, ()):
                    begun[parameter] = parameter.detach().clone()

        def after(self: Optimizer, *_: Any) -> None:
            for parameter, first in begun.items():
                self.state[parameter][AVERAGE] = first
            begun.clear()
            part: Any = 1 - decay
            left_out = getattr(self, "found_inf", None)  # what a device decides: rollback.step_told
            with torch.no_grad():
                for parameter in _parameters(self):
                    if AVERAGE in (state := self.state.get(parameter, {})):
                        told = part if left_out is None else part * (1 - left_out).to(parameter.dtype)
                        state[AVERAGE].lerp_(parameter, told)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        return optimizer

    return made


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


@contextmanager
def averaged(pipeline: Holdings) -> Iterator[None]:
    """While it is open, weights are their averages, where there are some. Between two steps."""
    weights = []
    for held in pipeline.held_layers():
        for parameter in held.module.parameters():
            average = held.optimizer.state.get(parameter, {}).get(AVERAGE) if held.optimizer else None
            if average is not None:
                weights.append((parameter, parameter.data))
                parameter.data = torch.empty_like(parameter).copy_(average)  # a kernel's sums depend on strides
    forget_casts()
    try:
        yield
    finally:
        for parameter, weight in weights:
            parameter.data = weight
        forget_casts()
