"""A batch cut into units, what a step is given of it, and the mean of what its units lose.

Rows are dealt out evenly, the first units taking one more where they do not divide. A unit's weight is its share of the
rows, so that the weighted sum of the units' mean losses is the mean over the batch; for equal units it is exactly ``1 /
num_microbatches``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from vpipe.errors import UserError
from vpipe.layer import split_sizes
from vpipe.runtime.crossing import copied_value, flatten, unflatten


@dataclass(frozen=True)
class Microbatches:
    """Units that are already cut: ``get(k)`` is the k-th, also when it is asked again. Give this instead of a batch to
    choose the cut, or to read units lazily."""

    get: Callable[[int], Any]
    weights: Sequence[float] | None = None
    """The units' weights; by what the loss counts if not given, and equal where it counts no labels."""
    checksums: Sequence[int] | None = None
    """Of each unit's inputs and targets together, where each end of the pipeline has read both; below 2 ** 53 and not
    0. The ends tell each other: a step on units that differ fails (``UnitsDiffer``)."""


class UnitsDiffer(UserError):
    """The first and the last stage have read different units. Raised on every rank."""

    def __init__(self, microbatch: int) -> None:
        super().__init__(
            f"the first and the last stage have read different data for microbatch {microbatch}; give both ends of the "
            "pipeline the same units"
        )
        self.microbatch = microbatch


def num_rows(value: Any) -> int | None:
    """The size of the first dimension that all tensors with one share; ``None`` where there is no tensor."""
    tensors: list[Tensor] = []
    flatten(value, tensors)
    sizes = {tensor.shape[0] for tensor in tensors if tensor.dim()}
    if len(sizes) > 1:
        raise UserError(f"the tensors of a batch must have the same number of rows, but these have {sorted(sizes)}")
    return sizes.pop() if sizes else None


def check_rows(inputs: Any, targets: Any) -> None:
    """Inputs and targets of one batch, where both are known here and are cut here."""
    if isinstance(inputs, Microbatches) or isinstance(targets, Microbatches):
        return
    mine, theirs = num_rows(inputs), num_rows(targets)
    if mine is not None and theirs is not None and mine != theirs:
        raise UserError(
            f"the inputs have {mine} rows, but the targets have {theirs}; "
            f"give one target row per input row, or cut the units yourself with Microbatches"
        )


def split(value: Any, num_units: int) -> tuple[list[Any], list[float]]:
    """The units of a batch and their weights."""
    rows = num_rows(value)
    if rows is None:
        return [value] * num_units, [1 / num_units] * num_units
    sizes = split_sizes(rows, num_units)
    tensors: list[Tensor] = []
    structure = flatten(value, tensors)
    columns = [torch.split(each, sizes) if each.dim() else [each] * num_units for each in tensors]
    units = [unflatten(structure, pieces) for pieces in zip(*columns, strict=True)]
    if len(set(sizes)) == 1:
        return units, [1 / num_units] * num_units
    return units, [size / rows for size in sizes]


def check_counts(num_microbatches: int | None, weight: float) -> None:
    """Arguments of a step that would otherwise be taken for something else, or spoil the weights."""
    if num_microbatches is not None and num_microbatches < 1:
        raise UserError(
            f"num_microbatches is {num_microbatches}; give at least 1, or None for the pipeline's own number"
        )
    if torch.is_inference_mode_enabled():
        raise UserError("train_step inside torch.inference_mode() could train nothing; call it outside")
    if not isfinite(weight):
        raise UserError(f"the weight of a batch is {weight}; give a finite number")


def without_gradient(inputs: Any) -> Any:
    """The inputs of a unit that is trained; what made them is not a part of the pipeline. Slices of one batch count
    their changes in place apart, so that the first layer may make some."""
    tensors: list[Tensor] = []
    structure = flatten(inputs, tensors)
    if any(tensor.requires_grad for tensor in tensors):
        raise UserError(
            "the inputs require a gradient, but a pipeline gives none back to what made them; "
            "make that a layer, or give inputs.detach()"
        )
    return unflatten(structure, [tensor.data for tensor in tensors])


def torn(step: int, before: Mapping[int, int], after: Mapping[int, int]) -> str | None:
    """What to say of a failed step that has updated some stages; ``None`` where it has updated none."""
    made = {stage: number - before[stage] for stage, number in sorted(after.items())}
    if not any(made.values()):
        return None
    counts = ", ".join(f"stage {stage} {number}" for stage, number in made.items())
    return (
        f"step {step} failed after some of its updates ({counts}), so the stages no longer fit together; load a state "
        "of before with load_state_dict (and the optimizers' with theirs), or build the pipeline anew"
    )


UnitLosses = dict[int, tuple[float, float]]
"""Unit → its share of the batch, and its loss."""


def unit_losses(contributions: Mapping[tuple[int, int], float], num_layers: int) -> UnitLosses:
    """The loss of each unit from what every layer contributed to it (``Result.losses``): the layers' parts in their
    order. Raises ``UnitsDiffer`` where the two ends have told different checksums."""
    shares = num_layers + 1
    sums: dict[int, float] = {}
    for layer, microbatch in sorted(contributions):
        if layer < shares:
            sums[microbatch] = sums.get(microbatch, 0.0) + contributions[layer, microbatch]
    for (layer, unit), checksum in sorted(contributions.items()):
        if layer == num_layers + 2 and contributions.get((num_layers + 3, unit), checksum) != checksum:
            raise UnitsDiffer(unit)
    return {unit: (contributions.get((shares, unit), 0.0), sums[unit]) for unit in sorted(sums)}


def mean_loss(losses: Iterable[tuple[float, float]]) -> float:
    """The loss of a batch from (share, loss) of its units, unit by unit. (Python adds floats by ``sum`` with or without
    compensation, by its version.)"""
    total = 0.0
    for share, loss in losses:
        total += share * loss if share else 0.0  # a mean over no label is not a number
    return total


def units_of(value: Any, num_units: int, needed: bool, what: str) -> tuple[Callable[[int], Any], list[float] | None]:
    """A batch as a function of the unit, and the units' weights; what is not needed here is not cut."""
    if isinstance(value, Microbatches):
        return value.get, _checked(value.weights, num_units)
    if value is None:
        if needed:
            raise UserError(f"this rank needs the {what}: it holds the {'first' if what == 'inputs' else 'last'} stage")
        return lambda microbatch: None, None
    parts, weights = split(value, num_units)
    return parts.__getitem__, weights


def copies_of(units: Callable[[int], Any]) -> Callable[[int], Any]:
    """The same units, which a layer may change in place."""
    return lambda microbatch: copied_value(without_gradient(units(microbatch)))


def _checked(weights: Sequence[float] | None, num_units: int) -> list[float] | None:
    if weights is None:
        return None
    found = [float(weight) for weight in weights]
    if len(found) != num_units or not all(map(isfinite, found)):
        raise UserError(f"Microbatches has the weights {found}; give {num_units} finite numbers, one a microbatch")
    return found
