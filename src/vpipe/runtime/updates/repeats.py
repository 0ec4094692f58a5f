"""A step of an asynchronous schedule that is made again, because one of its updates should not have been made.

Units of later updates have read the weights of earlier ones by the time the host may know. So a step on devices is made
as if all gradients were finite, each rank counts those that are not, and all tell each other when they read their
numbers. If there were none (nearly always) that is all. Otherwise every rank puts back what it had when the step began
and runs the step once more, this time asking before every update:

    start ─ copies of weights, state, buffers ─ step, no host waits ─ read: all finite? ─ yes ─▶ next step
                                                                          └─ no: put back, step again, hosts wait

Units, and with them random numbers, are those of the first time. Optimizers whose kernels can be told (``skipping``)
need none of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vpipe.runtime.stage import Stage
from vpipe.runtime.updates.skipping import Before, can_be_restored, can_be_told


class SkipNeed(IntEnum):
    """What the optimizers of a rank ask of an asynchronous schedule; the largest of all ranks is everybody's."""

    NOTHING = 0
    """They are told."""
    REPEAT = 1
    ASK = 2
    """One of them cannot be put back."""


def need_of(optimizers: Mapping[int, Optimizer]) -> SkipNeed:
    untold = [optimizer for optimizer in optimizers.values() if not can_be_told(optimizer)]
    if not untold:
        return SkipNeed.NOTHING
    return SkipNeed.REPEAT if all(map(can_be_restored, optimizers.values())) else SkipNeed.ASK


class Buffers:
    """The buffers of some stages, as they were."""

    def __init__(self, stages: list[Stage]) -> None:
        slots = [(part, slot, part._buffers[slot]) for stage in stages for part, slot in stage.buffer_slots]
        self._held: list[tuple[nn.Module, str, Tensor, Tensor]] = [
            (part, slot, held, held.clone()) for part, slot, held in slots if held is not None
        ]

    def restore(self) -> None:
        with torch.no_grad():
            for part, slot, held, copy in self._held:
                part._buffers[slot] = held.copy_(copy)


class Start:
    """What a rank had when a step began."""

    def __init__(self, stages: Mapping[int, Stage], optimizers: Mapping[int, Optimizer]) -> None:
        self._before = [Before(optimizer) for optimizer in optimizers.values()]
        self._buffers = Buffers(list(stages.values()))
        parameters = [p for stage in stages.values() for p in stage.weights.parameters.values()]
        self._gradients = [(p, None if p.grad is None else p.grad.clone()) for p in parameters]

    def restore(self) -> None:
        """The step has not been."""
        for before in self._before:
            before.restore()
        self._buffers.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
