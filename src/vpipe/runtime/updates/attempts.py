"""An update that is made before all ranks have agreed on it, and can be taken back to the bit.

sail-sg's zero bubble, which this follows, undoes an optimizer's arithmetic; that gives back almost the same weights.
Here what the optimizer may change is copied before, so that a run with post-validation ends equal to one without. The
copies (weights, optimizer state and buffers of a rank) live from its update to the agreement. What stands between the
two on a rank are forwards of the next batch; after a wrong update they are run again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from vpipe.errors import UserError
from vpipe.runtime.device import Number, beside, is_host
from vpipe.runtime.job import Call
from vpipe.runtime.stage import Stage
from vpipe.runtime.surroundings import forget_casts
from vpipe.runtime.updates import optimizing
from vpipe.runtime.updates.agreement import LossKey, Waited, counted, divide, judge, judge_there, multiply
from vpipe.runtime.updates.rollback import Rollback, can_be_restored
from vpipe.runtime.updates.update import Updater
from vpipe.schedule.action import Action, Kind


class Attempt(NamedTuple):
    """One stage's update, ``sizes`` the norms of its gradients before it."""

    optimizer: Optimizer
    gradients: Sequence[Tensor]
    versions: Sequence[int]
    sizes: Tensor
    undo: Rollback

    def take_back(self) -> None:
        """Weights, state and buffers are what they were; the gradients are there still."""
        if self.versions != [gradient._version for gradient in self.gradients]:
            raise UserError(
                f"the optimizer {type(self.optimizer).__name__} changes the gradients themselves, so its update cannot "
                "be made again with clipped ones; leave out post_validation"
            )
        self.undo.restore()


class AgreeingAfterwards(Updater):
    """Updates first and agrees afterwards (``schedule.post_validation``)."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._attempts: dict[int, Attempt] = {}
        """Stage → its update that is not agreed on."""
        for optimizer in self.optimizers.values():
            if not can_be_restored(optimizer):
                raise UserError(
                    f"post_validation takes updates back, and the optimizer {type(optimizer).__module__}."
                    f"{type(optimizer).__name__} keeps more than its state, its groups and plain numbers; use one of "
                    "torch.optim, or leave out post_validation"
                )

    def begin(self, losses: dict[LossKey, Number], num_units: int, updates: Mapping[int, Sequence[float]]) -> None:
        super().begin(losses, num_units, updates)
        self._attempts.clear()

    def _judged(self, stage: Stage, gradients: Sequence[Tensor]) -> tuple[bool, None]:
        """Update as it is right if no rank objects. A gradient that is not finite is an objection of one's own."""
        if self.loss_scale != 1.0:
            divide(gradients, self.loss_scale)
        if not self._judges:
            return True, None
        optimizer = self.optimizers[stage.index]
        sizes = self._norms(counted(stage, self._tied))
        versions = [gradient._version for gradient in gradients]
        undo = Rollback([optimizer], [stage], gradients=False)
        self._attempts[stage.index] = Attempt(optimizer, gradients, versions, sizes, undo)
        return not (self._skips and is_host(self._device) and not bool(torch.isfinite(sizes).all())), None

    def _clear(self, optimizer: Optimizer) -> None:
        if not self._judges:
            super()._clear(optimizer)

    def agree_on(self, calls: Sequence[Call], watch: Callable[[Action], None], waited: Waited) -> None:
        """Agree on the updates that are made; if they were wrong, run the forwards since then once more, as if they had
        not been run: units and losses are dropped, buffers are what they were. ``watch`` is told every action."""
        if not self.settle(waited):
            return
        units = [(stage, microbatch) for (stage, kind, microbatch), _ in calls if kind is Kind.F]
        for stage, microbatch in units:
            del self._stages[stage].units[microbatch]
        for key in [key for key in self._losses if key[1] in {microbatch for _, microbatch in units}]:
            del self._losses[key]
        for action, call in calls:
            watch(action)
            call()

    def settle(self, waited: Waited) -> bool:
        """Agree on the updates that are made: whether they, or the loss scale, are not what the forwards since then
        have read. The host waits for the answer."""
        if not self._attempts:
            return False
        sizes = [self._attempts[stage].sizes for stage in sorted(self._attempts)]
        found, dtypes = self._exchanged(sizes, None, waited)
        answer, factor = self._verdict_of(*(judge if is_host(self._device) else judge_there)(found, dtypes))
        finite, scale = bool(answer), self.loss_scale
        self._learn(finite)
        wrong = not finite or (factor is not None and float(factor) != 1.0)
        for index, attempt in self._attempts.items():
            if wrong:
                attempt.take_back()
            elif self.loss_scale != scale:
                attempt.undo.restore_buffers()
            if wrong and finite and attempt.gradients:
                assert factor is not None, "a finite update is taken back to be clipped"
                multiply(attempt.gradients, beside(factor, attempt.gradients[0]))
            if wrong and finite:
                self._set_learning_rate(index, made=1)
                optimizing.step(attempt.optimizer)
            optimizing.clear(attempt.optimizer)
        self._attempts.clear()
        forget_casts()
        return wrong or self.loss_scale != scale


def with_second_tries(
    calls: list[Call], updater: AgreeingAfterwards, watch: Callable[[Action], None], waited: Waited
) -> list[Call]:
    """The calls of a row, each agreement knowing the forwards since the update, which it may have to repeat."""
    found, begin = list(calls), 0
    for at, (action, _) in enumerate(calls):
        if action.kind is Kind.STEP:
            begin = at + 1
        elif action.kind is Kind.AGREE:
            found[at] = (action, partial(updater.agree_on, calls[begin:at], watch, waited))
    return found
