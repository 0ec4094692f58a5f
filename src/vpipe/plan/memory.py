"""How many bytes a stage needs, stated once.

The packing, the planner, the table shown to the user and the tests all count by this module. For a stage of layers
``a .. b-1`` with ``N`` units in flight, ``w`` of them between the start of their backward and the end of their weight
gradient, and ``V`` weight versions:

| term           | bytes                                                                                         |
| -------------- | --------------------------------------------------------------------------------------------- |
| weights        | V × parameters                                                                                |
| gradients      | parameters                                                                                    |
| optimizer      | optimizer state (never versioned)                                                             |
| kept           | N × saved, over the layers that keep                                                          |
| segment_inputs | N × cut bytes before each run of recomputed layers                                            |
| recomputed     | min(N, w) × saved, over the recomputed layers: materialised before the backward               |
| swapped        | min(N, w+1) × saved, over the swapped layers: those in use, and one on its way                |
| deferred       | d × what a unit holds more while its weight gradient waits                                    |
| buffers        | messages before a: i × what comes, and a gradient that leaves; behind b: an activation that   |
|                | leaves, and j × the gradients that come; nothing at the ends of the pipe                      |
| workspace      | what the last layer needs for a moment: at its turn all that the others save is there         |

On the host one message of each kind lies there (``i = j = 1``). A device makes room for a message when its receive is
posted, which is early enough for the sender never to wait: ``i`` and ``j`` are then counted in the lowered program.

``w`` is 1 and ``d`` is 0 where ``B`` computes both gradients; a zero-bubble schedule lets ``W`` of ``d = w`` units
wait. A run of consecutive recomputed layers is one segment: it keeps its input and nothing else. Lowering puts one
``R`` before a unit's backward, which materialises all segments of the stage; a runtime that recomputes them one by one
needs less, never more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from vpipe.plan.costs import Profile

Floats = NDArray[np.float64]
Peak = tuple[tuple[int, int], ...]
"""Units that a rank holds at some moment: (stage, units) of each of its stages."""


class Choice(StrEnum):
    """What becomes of a layer's saved tensors between its forward and its backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True)
class Options:
    """What a plan may use besides keeping."""

    recompute: bool = True
    swap: bool = True


@dataclass(frozen=True)
class StageFacts:
    """What the schedule and the rank say about a stage; the profile says the rest."""

    units: int
    """Units in flight at the peak: the schedule's doing."""
    versions: int = 1
    """Live weight versions: one in synchronous modes."""
    memory: float = float("inf")
    """Cap of the rank, in bytes."""
    waiting: int = 1
    """Units between the start of their backward and the end of their weight gradient, at the peak."""

    deferred: int = 0
    """Those of them whose weight gradient waits: none where a backward is whole."""
    inputs: int = 1
    """Inputs of other units that lie there during a backward."""
    gradients: int = 1
    """Gradients from behind that lie there then, that of the unit itself included."""

    @property
    def recomputing_helps(self) -> bool:
        """Whether fewer units of a recomputed layer are there than of one that is kept."""
        return self.units > self.recomputed

    @property
    def swapping_helps(self) -> bool:
        return self.units > self.resident

    @property
    def recomputed(self) -> int:
        """Units of a recomputed layer whose saved tensors exist at once."""
        return min(self.units, self.waiting)

    @property
    def resident(self) -> int:
        """Units of a swapped layer that are on the device at once: those in use, and one on its way."""
        return min(self.units, self.waiting + 1)

    @property
    def times(self) -> dict[str, int]:
        """How often the bytes of one unit, or of one version, are there at once; terms that are not named: once."""
        return {
            "weights": self.versions,
            "kept": self.units,
            "segment_inputs": self.units,
            "recomputed": self.recomputed,
            "swapped": self.resident,
            "deferred": self.deferred,
        }


@dataclass(frozen=True)
class MemoryTerms:
    """Bytes of a stage, term by term, in the order of the table above."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    kept: int = 0
    segment_inputs: int = 0
    recomputed: int = 0
    swapped: int = 0
    deferred: int = 0
    buffers: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))

    @property
    def lasting(self) -> int:
        """What is there whatever unit is at its turn."""
        return self.weights + self.gradients + self.optimizer + self.deferred + self.buffers

    def held(self, facts: StageFacts, units: int) -> int:
        """What ``units`` units hold, where as many as are in flight at the peak hold what the terms say."""
        each = (self.kept + self.segment_inputs) // facts.units
        return units * each + min(units, facts.resident) * (self.swapped // facts.resident)

    def to_json(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True)
class LayerBytes:
    """What each layer of a profile adds to a stage: the table above, layer by layer. What searches among choices asks
    here, and ``stage_memory`` counts what they come to."""

    lasting: Floats
    """Whatever becomes of its saved tensors."""
    kept: Floats
    recomputed: Floats
    swapped: Floats
    run: Floats
    """The input of a run of recomputed layers that begins with it."""

    @classmethod
    def of(cls, profile: Profile, facts: StageFacts) -> LayerBytes:
        """Of all layers, where the schedule and the rank say so much of the stage."""
        names = ("parameter_bytes", "optimizer_bytes", "deferred_bytes", "saved_bytes")
        parameters, optimizer, deferred, saved = (
            np.array([getattr(layer, name) for layer in profile.layers], np.float64) for name in names
        )
        lasting = (facts.versions + 1) * parameters + optimizer + facts.deferred * deferred
        run = facts.units * np.array(profile.cut_bytes[:-1], np.float64)
        return cls(lasting, facts.units * saved, facts.recomputed * saved, facts.resident * saved, run)


def stage_memory(
    profile: Profile, start: int, stop: int, choices: Sequence[Choice], facts: StageFacts, *, first: bool, last: bool
) -> MemoryTerms:
    """The bytes of a stage of layers ``start .. stop-1``; ``choices[i]`` belongs to layer ``start + i``."""
    layers = profile.layers[start:stop]
    if len(choices) != len(layers):
        raise ValueError(f"{len(choices)} choices for {len(layers)} layers")
    cut = profile.cut_bytes
    saved = dict.fromkeys(Choice, 0)
    segment_inputs = 0
    for index, (layer, choice) in enumerate(zip(layers, choices, strict=True)):
        saved[choice] += layer.saved_bytes
        if choice is Choice.RECOMPUTE and (index == 0 or choices[index - 1] is not Choice.RECOMPUTE):
            segment_inputs += cut[start + index]
    parameters = sum(layer.parameter_bytes for layer in layers)
    once = {
        "weights": parameters,
        "kept": saved[Choice.KEEP],
        "segment_inputs": segment_inputs,
        "recomputed": saved[Choice.RECOMPUTE],
        "swapped": saved[Choice.SWAP],
        "deferred": sum(layer.deferred_bytes for layer in layers),
    }
    return MemoryTerms(
        **{term: times * once[term] for term, times in facts.times.items()},
        gradients=parameters,
        optimizer=sum(layer.optimizer_bytes for layer in layers),
        buffers=(
            (0 if first else bytes_before(cut[start], profile.back_bytes[start], facts))
            + (0 if last else bytes_behind(cut[stop], profile.back_bytes[stop], facts))
        ),
        workspace=layers[-1].workspace_bytes,
    )


Bytes = TypeVar("Bytes", int, NDArray[np.float64])


def bytes_before(there: Bytes, back: Bytes, facts: StageFacts) -> Bytes:
    """Messages at a stage's beginning, where ``there`` and ``back`` cross the cut."""
    return facts.inputs * there + back


def bytes_behind(there: Bytes, back: Bytes, facts: StageFacts) -> Bytes:
    """Messages at its end."""
    return there + facts.gradients * back


def rank_bytes(terms: Mapping[int, MemoryTerms], facts: Sequence[StageFacts], peaks: Iterable[Peak]) -> int:
    """The peak of a rank: its stages together, unit by unit, one of them at work at a time."""
    fixed = sum(each.lasting for each in terms.values())
    fixed += max((each.recomputed for each in terms.values()), default=0)
    fixed += max((each.workspace for each in terms.values()), default=0)
    return fixed + max((sum(terms[s].held(facts[s], n) for s, n in peak) for peak in peaks), default=0)
