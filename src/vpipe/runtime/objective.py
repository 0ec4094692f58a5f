"""What a unit weighs among the units of its batch: as much as its loss counts.

The mean over a batch is the mean of its units where each weighs by what its own mean is over. That is its rows, unless
the loss ignores some labels, weighs classes, or sums. What it does is found by calling it once with a stand-in for the
model's output: every operation on it gives a stand-in again, and torch's losses are noted together with the real labels
that they get. A loss that says by itself what it counts (``loss.count(targets)``) is not asked.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from vpipe.errors import UserError
from vpipe.runtime.crossing import flatten

IGNORED = -100
"""The label that torch's losses ignore by default."""
LABELLED = (F.cross_entropy, F.nll_loss)
"""Losses that ignore a label and weigh classes."""
OTHERS = (
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy),
    *(F.binary_cross_entropy_with_logits, F.kl_div, F.poisson_nll_loss),
)
"""Losses whose mean is over all numbers."""
REMEDY = "say what a unit's loss is divided by: Pipeline(count=lambda targets: (targets != -100).sum())"


SCALINGS = (torch.div, torch.mul, Tensor.div, Tensor.mul, Tensor.__truediv__, Tensor.__mul__, Tensor.__rmul__)


class _Unknown(Exception):
    """The loss asks for something that only the model's output can say."""


@dataclass(frozen=True)
class LossCall:
    """A call of one of torch's losses."""

    labels: Tensor
    is_sum: bool
    labelled: bool
    ignored: int
    class_weights: Tensor | None

    def count(self, labels: Tensor) -> float:
        """What its mean over these labels is over."""
        if not self.labelled or labels.is_floating_point():
            return float(labels.numel())
        counting = labels != self.ignored
        if self.class_weights is None:
            return float(counting.sum())
        return float(self.class_weights[labels[counting].long()].sum())


class StandIn:
    """Stands for the model's output while a loss is asked what it does."""

    def __init__(self, calls: list[LossCall], device: torch.device) -> None:
        self._calls, self.device, self.dtype, self.requires_grad = calls, device, torch.float32, True

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def _same(self, *args: Any, **kwargs: Any) -> StandIn:
        return self

    def _ask(self, *args: Any) -> Any:
        raise _Unknown

    def _scaled(self, *args: Any) -> StandIn:
        """Multiplied or divided: a mean stays one, a sum may become one."""
        if any(call.is_sum for call in self._calls):
            raise _Unknown
        return self

    __call__ = __getitem__ = __neg__ = __pow__ = __add__ = __radd__ = __sub__ = __rsub__ = _same
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _scaled
    __bool__ = __len__ = __iter__ = __int__ = __float__ = __index__ = __eq__ = __lt__ = __gt__ = _ask
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        own = next(leaf for leaf in tree_leaves([args, options]) if isinstance(leaf, StandIn))
        if func in SCALINGS:
            own._scaled()
        if func in LABELLED or func in OTHERS:
            own._calls.append(_call(func, *args, **options))
        return own


def _call(func: Any, output: Any, labels: Any, weight: Any = None, *more: Any, **options: Any) -> LossCall:
    reduction = options.get("reduction", "mean")
    if more or reduction not in ("mean", "sum") or not isinstance(labels, Tensor):
        raise _Unknown
    labelled = func in LABELLED
    weights = weight if labelled and labels.dim() else None
    return LossCall(labels, reduction == "sum", labelled, options.get("ignore_index", IGNORED), weights)


class Objective:
    """What the units of a batch weigh under a loss; ``count`` is the user's word for it."""

    def __init__(self, loss: Callable[[Any, Any], Tensor], count: Callable[[Any], float] | None) -> None:
        self._loss, self._count = loss, count or getattr(loss, "count", None)
        self._known: list[tuple[LossCall, int]] | None = None
        """The calls of the loss and which tensor of the targets each gets; ``None`` until they have been seen."""
        self._is_by_rows = False

    def shares(self, units: Callable[[int], Any], num_units: int) -> list[float] | None:
        """The units' shares of the batch; ``None`` where rows say it."""
        if self._is_by_rows or (num_units == 1 and self._count is None):
            return None
        targets = [units(microbatch) for microbatch in range(num_units)]
        counts = self._counts(targets)
        if counts is None or math.inf in counts:
            return counts and [1.0] * num_units
        if not all(math.isfinite(count) and count >= 0 for count in counts):
            raise UserError(f"the units of this batch count {counts}; {REMEDY}")
        total = math.fsum(counts)
        return [count / total for count in counts] if total else None

    def _counts(self, targets: Sequence[Any]) -> list[float] | None:
        """What the loss of every unit is over; infinite where it sums; ``None`` where that is its rows, or unknown."""
        if self._count is not None:
            return [float(self._count(each)) for each in targets]
        try:
            calls = [self._calls(each) for each in targets]
        except Exception:  # of the user's code, which may want anything of the model's output
            calls = []
        if not calls or not calls[0]:
            _refuse_ignored(targets)
            return None
        if all(call.is_sum for call, _ in calls[0]):
            return [math.inf] * len(targets)
        columns = [[call.count(labels) for call, labels in column] for column in zip(*calls, strict=True)]
        first, *others = ([count / (math.fsum(column) or 1) for count in column] for column in columns)
        mixed = any(call.is_sum for call, _ in calls[0])
        if mixed or any(not math.isclose(a, b) for other in others for a, b in zip(first, other, strict=True)):
            raise UserError(f"the parts of this loss are means over different counts, {columns}; {REMEDY}")
        self._is_by_rows = not any(call.labelled for call, _ in calls[0])
        return None if self._is_by_rows else columns[0]

    def _calls(self, targets: Any) -> list[tuple[LossCall, Tensor]]:
        """The losses of torch that a unit reaches, with its labels; where these are tensors of its targets, the loss
        is called once for all."""
        leaves: list[Tensor] = []
        flatten(targets, leaves)
        if self._known is not None:
            return [(call, leaves[leaf]) for call, leaf in self._known]
        calls: list[LossCall] = []
        loss = copy.deepcopy(self._loss) if isinstance(self._loss, nn.Module) else self._loss  # it may have buffers
        with torch.random.fork_rng(devices=()), torch.no_grad():
            loss(StandIn(calls, leaves[0].device), targets)
        places = [next((i for i, leaf in enumerate(leaves) if _is_view(call.labels, leaf)), None) for call in calls]
        if calls and None not in places:
            self._known = [(call, place) for call, place in zip(calls, places, strict=True) if place is not None]
        return [(call, call.labels) for call in calls]


def _refuse_ignored(targets: Sequence[Any]) -> None:
    """Refuse labels that look ignored under a loss that hides what it counts; rows are right where all labels count."""
    leaves: list[Tensor] = []
    flatten(list(targets), leaves)
    for leaf in leaves:
        if leaf.dtype in (torch.int64, torch.int32) and bool((leaf == IGNORED).any()):
            raise UserError(
                f"targets hold {IGNORED}, which losses ignore, but this loss hides what it counts; {REMEDY}"
            )


def _is_view(labels: Tensor, leaf: Tensor) -> bool:
    return labels.data_ptr() == leaf.data_ptr() and labels.numel() == leaf.numel() and labels.dtype == leaf.dtype
