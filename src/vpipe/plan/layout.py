"""Which layers a stage holds and what it does with each: the part of a plan that a run obeys.

A layout travels in three forms: our own ``plan.json``, VPipe's ``{"partition": […], "recompute_ratio": […]}``, and a
plain list of layer counts. VPipe's form knows only one kind of stage: the last ``int(r · n)`` of its n layers are
recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from vpipe.errors import UserError
from vpipe.plan.memory import Choice


@dataclass(frozen=True)
class PlannedLayout:
    """Stage s holds layers ``cuts[s] .. cuts[s+1]-1`` and treats them as ``choices[s]`` says."""

    cuts: tuple[int, ...]
    choices: tuple[tuple[Choice, ...], ...]

    @classmethod
    def of_counts(cls, counts: Sequence[int], choices: Sequence[Sequence[Choice]] | None = None) -> PlannedLayout:
        """From the number of layers of each stage; without choices everything is kept."""
        kept = choices or [[Choice.KEEP] * count for count in counts]
        return cls((0, *accumulate(counts)), tuple(tuple(stage) for stage in kept))

    @property
    def num_stages(self) -> int:
        return len(self.choices)

    @property
    def num_layers(self) -> int:
        return self.cuts[-1]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(len(stage) for stage in self.choices)

    @property
    def stage_of(self) -> tuple[int, ...]:
        """The stage of each layer."""
        return tuple(stage for stage, count in enumerate(self.counts) for _ in range(count))

    def layers(self, stage: int, choice: Choice) -> tuple[int, ...]:
        """The layers of a stage that are treated so, by their index in the model."""
        start = self.cuts[stage]
        return tuple(start + i for i, c in enumerate(self.choices[stage]) if c is choice)

    def to_json(self) -> dict[str, Any]:
        stages = range(self.num_stages)
        return {
            "partition": list(self.counts),
            "recompute": [list(self.layers(stage, Choice.RECOMPUTE)) for stage in stages],
            "swap": [list(self.layers(stage, Choice.SWAP)) for stage in stages],
        }


def layout_from_json(data: object, where: str, num_layers: int | None = None) -> PlannedLayout:
    """A layout from our form, VPipe's form, or a list of counts; ``num_layers`` is what the model really has."""
    if isinstance(data, list):
        data = {"partition": data}
    if not isinstance(data, dict):
        raise UserError(f"{where}: a partition is a list of layer counts or an object with the key 'partition'")
    counts = _counts(data.get("partition"), where)
    if num_layers is not None and sum(counts) != num_layers:
        raise UserError(
            f"{where}: partition adds up to {sum(counts)} layers, but the model has {num_layers}; plan this model anew"
        )
    if "recompute_ratio" in data and "recompute" not in data:
        return PlannedLayout.of_counts(counts, _from_ratios(counts, data["recompute_ratio"], where))
    starts = [0, *accumulate(counts)]
    choices = [[Choice.KEEP] * count for count in counts]
    for key, choice in (("recompute", Choice.RECOMPUTE), ("swap", Choice.SWAP)):
        per_stage = data.get(key) or [[] for _ in counts]
        if not isinstance(per_stage, list) or len(per_stage) != len(counts):
            raise UserError(
                f"{where}: {key} must be a list with one list of layers for each of the {len(counts)} stages"
            )
        for stage, layers in enumerate(per_stage):
            for layer in layers if isinstance(layers, list) else [layers]:
                if not isinstance(layer, int) or not starts[stage] <= layer < starts[stage + 1]:
                    raise UserError(
                        f"{where}: {key}[{stage}] names layer {layer!r}, but stage {stage} holds layers "
                        f"{starts[stage]} to {starts[stage + 1] - 1}"
                    )
                choices[stage][layer - starts[stage]] = choice
    return PlannedLayout.of_counts(counts, choices)


def to_ratio(num_recomputed: int, num_layers: int) -> float:
    """A ratio r with ``int(r · num_layers) == num_recomputed``, as short as possible."""
    for digits in (1, 2, 3, 4, 6):
        scale = 10**digits
        ratio = math.ceil(num_recomputed * scale / num_layers) / scale
        if int(ratio * num_layers) == num_recomputed and ratio <= 1:
            return ratio
    ratio = num_recomputed / num_layers
    return ratio if int(ratio * num_layers) == num_recomputed else math.nextafter(ratio, 2.0)


def _counts(value: object, where: str) -> list[int]:
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: partition must be a list with the number of layers of each stage, not {value!r}")
    for stage, count in enumerate(value):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UserError(f"{where}: partition[{stage}] is {count!r}; every stage needs at least one whole layer")
    return value


def _from_ratios(counts: list[int], ratios: object, where: str) -> list[list[Choice]]:
    if not isinstance(ratios, list) or len(ratios) != len(counts):
        found = len(ratios) if isinstance(ratios, list) else repr(ratios)
        raise UserError(f"{where}: recompute_ratio must have one entry per stage ({len(counts)}), not {found}")
    choices = []
    for stage, (count, ratio) in enumerate(zip(counts, ratios, strict=True)):
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
            raise UserError(f"{where}: recompute_ratio[{stage}] is {ratio!r}; it must be between 0 and 1")
        again = int(ratio * count)
        choices.append([Choice.KEEP] * (count - again) + [Choice.RECOMPUTE] * again)
    return choices
