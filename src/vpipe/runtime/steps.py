"""What a step is given and what it leaves: checked arguments, units, the mean loss, and what a failure has spoilt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from vpipe.errors import UserError
from vpipe.runtime.microbatches import Microbatches, split
from vpipe.runtime.transport.wire import copied_value, flatten


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
    """The inputs of a unit that is trained; what made them is not a part of the pipeline."""
    tensors: list[Tensor] = []
    flatten(inputs, tensors)
    if any(tensor.requires_grad for tensor in tensors):
        raise UserError(
            "the inputs require a gradient, but a pipeline gives none back to what made them; "
            "make that a layer, or give inputs.detach()"
        )
    return inputs


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


def mean_loss(contributions: Mapping[tuple[int, int], float], num_layers: int) -> float:
    """The loss of a batch from what every layer contributed by every unit: the layers' parts of a unit in their order,
    times its share, unit by unit. (Python adds floats by ``sum`` with or without compensation, by its version.)"""
    shares = num_layers + 1
    sums: dict[int, float] = {}
    for layer, microbatch in sorted(contributions):
        if layer != shares:
            sums[microbatch] = sums.get(microbatch, 0.0) + contributions[layer, microbatch]
    total = 0.0
    for microbatch in sorted(sums):
        total += contributions.get((shares, microbatch), 0.0) * sums[microbatch]
    return total


def units_of(
    value: Any, num_units: int, needed: bool, what: str, num_batches: int = 1
) -> tuple[Callable[[int], Any], list[float] | None]:
    """A batch (or several) as a function of the unit, and the units' weights; what is not needed here is not cut."""
    if isinstance(value, Microbatches):
        return value.get, _checked(value.weights, num_units)
    if value is None:
        if needed:
            raise UserError(f"this rank needs the {what}: it holds the {'first' if what == 'inputs' else 'last'} stage")
        return lambda microbatch: None, None
    parts, weights = split(value, num_units, num_batches)
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
