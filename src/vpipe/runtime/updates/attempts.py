"""An update that is made before all ranks have agreed on it, and can be taken back to the bit.

sail-sg's zero bubble, which this follows, undoes an optimizer's arithmetic; that gives back almost the same weights.
Here what the optimizer may change is copied before, so that a run with post-validation ends equal to one without. The
copies (weights and optimizer state of a rank) live from its update to the agreement.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vpipe.errors import UserError
from vpipe.runtime.device import Number, beside, is_host
from vpipe.runtime.stage import Stage
from vpipe.runtime.surroundings import forget_casts
from vpipe.runtime.updates import optimizing
from vpipe.runtime.updates.agreement import LossKey, Waited, counted, divide, judge, judge_there, multiply
from vpipe.runtime.updates.skipping import Before, can_be_restored
from vpipe.runtime.updates.update import Updater


class Attempt:
    """One stage's update. ``sizes`` are the norms of its gradients before it."""

    def __init__(self, optimizer: Optimizer, gradients: Sequence[Tensor], sizes: Tensor) -> None:
        self.optimizer, self.gradients, self.sizes = optimizer, gradients, sizes
        self._versions = [gradient._version for gradient in gradients]
        self._before = Before(optimizer)

    def take_back(self) -> None:
        """Weights and state are what they were; the gradients are there still."""
        if self._versions != [gradient._version for gradient in self.gradients]:
            raise UserError(
                f"the optimizer {type(self.optimizer).__name__} changes the gradients themselves, so its update cannot "
                "be made again with clipped ones; leave out post_validation"
            )
        self._before.restore()


class AgreeingAfterwards(Updater):
    """Updates first and agrees afterwards (``schedule.post_validation``)."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._attempts: dict[int, Attempt] = {}
        """Stage → its update that is not agreed on."""
        for optimizer in self.optimizers.values():
            _check(optimizer)

    def begin(self, losses: dict[LossKey, Number], num_units: int, num_updates: int) -> None:
        super().begin(losses, num_units, num_updates)
        self._attempts.clear()

    def step(self, stage: Stage) -> None:
        """The update as it is right if no rank objects. A gradient that is not finite is an objection of one's own."""
        self.before_update()
        optimizer, update = self.optimizers[stage.index], self.num_updates[stage.index]
        gradients = [p.grad for p in stage.weights.parameters.values() if p.grad is not None]
        if self.loss_scale != 1.0:
            divide(gradients, self.loss_scale)
        hopeless = False
        if self._judges:
            sizes = self._norms(counted(stage, self._tied))
            self._attempts[stage.index] = Attempt(optimizer, gradients, sizes)
            hopeless = self._skips and is_host(self._device) and not bool(torch.isfinite(sizes).all())
        if not hopeless:
            self._set_learning_rate(stage.index, update)
            optimizing.step(optimizer)
        if not self._judges:
            optimizing.clear(optimizer)
        self.num_updates[stage.index] = update + 1
        forget_casts()

    def forget_losses(self, microbatches: Collection[int]) -> None:
        """Of units whose forwards are made again."""
        for key in [key for key in self._losses if key[1] in microbatches]:
            del self._losses[key]

    def settle(self, waited: Waited) -> bool:
        """Agree on the updates that are made: whether they, or the loss scale, are not what the forwards since then
        have read. The host waits for the answer."""
        if not self._attempts:
            return False
        sizes = [self._attempts[stage].sizes for stage in sorted(self._attempts)]
        found, dtype = self._exchanged(sizes, None, waited)
        answer, factor = self._verdict_of(*(judge if is_host(self._device) else judge_there)(found, dtype))
        finite, scale = bool(answer), self.loss_scale
        self._learn(finite)
        wrong = not finite or (factor is not None and float(factor) != 1.0)
        for index, attempt in self._attempts.items():
            if wrong:
                attempt.take_back()
            if wrong and finite and attempt.gradients:
                assert factor is not None, "a finite update is taken back to be clipped"
                multiply(attempt.gradients, beside(factor, attempt.gradients[0]))
            if wrong and finite:
                self._set_learning_rate(index, self.num_updates[index] - 1)
                optimizing.step(attempt.optimizer)
            optimizing.clear(attempt.optimizer)
        self._attempts.clear()
        forget_casts()
        return wrong or self.loss_scale != scale


def _check(optimizer: Optimizer) -> None:
    """Refuse what cannot be taken back for certain."""
    if not can_be_restored(optimizer):
        name = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        raise UserError(
            f"post_validation takes updates back, and the optimizer {name} keeps more than its state, its groups and "
            "plain numbers; use one of torch.optim, or leave out post_validation"
        )
