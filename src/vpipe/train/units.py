"""The units of an iteration as they were read, and what each weighs among the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add, mul
from typing import Any, NamedTuple
from zlib import crc32

import torch

from vpipe.models.losses import weighed
from vpipe.runtime.microbatches import Microbatches


class Counts(NamedTuple):
    """What there is in a unit, or in several."""

    num_targets: int = 0
    """Targets that count in the loss, as the model counts them."""
    num_apart: int = 0
    """Those of a second part of the loss, which is a mean of its own."""
    num_tokens: int = 0
    """Tokens that the model reads, padding left out: what throughput and MFU count."""
    num_samples: int = 0
    flops: float = 0
    """What the model computes, forward and backward."""
    num_units: int = 1

    @classmethod
    def of(cls, units: Iterable[ReadUnit]) -> Counts:
        return cls(*map(sum, zip(*(unit.counts for unit in units), strict=True)))


_NOTHING = Counts()


@dataclass(frozen=True)
class ReadUnit:
    """One unit, read."""

    inputs: Any
    targets: Any
    counts: Counts = _NOTHING
    checksums: Mapping[str, int] = field(default_factory=dict)
    """Of each of its tensors: two ranks that read the same unit have the same. Empty where it is not read here."""

    @property
    def checksum(self) -> int:
        """Of all of it, never 0."""
        return 1 + crc32(repr(sorted(self.checksums.items())).encode())


@dataclass(frozen=True)
class Units:
    """The units of one or several iterations, read."""

    batches: Sequence[ReadUnit]
    whole: Counts | None = None
    """The units of the update, where these are only a part of them (gradient accumulation)."""
    num_updates: int = 1
    """Of how many updates these are the units, where each update has shares of its own."""
    alone: bool = False
    """Whether a unit is no part of a batch: an asynchronous schedule updates by units."""

    @property
    def counts(self) -> Counts:
        return Counts.of(self.batches)

    @property
    def part(self) -> float:
        """The part that these units are of their update."""
        return reduce(add, self.shares(), 0.0) if self.whole is not None else 1.0

    def shares(self) -> list[float]:
        """Each unit's part of all valid targets: the weights that make the mean over units the mean over targets."""
        if self.num_updates > 1:
            return [share for update in self.by_update() for share in update.shares()]
        whole = self.whole or self.counts
        if whole.num_targets == 0 or (whole.num_apart and not self.alone):
            return [1 / whole.num_units] * len(self.batches)
        return [batch.counts.num_targets / whole.num_targets for batch in self.batches]

    def weighed(self) -> list[Any]:
        """The targets; of a loss with two parts also what each of them weighs in a unit, so that both are means over
        what counts in the whole."""
        whole = self.whole or self.counts
        if self.num_updates > 1:
            return [targets for update in self.by_update() for targets in update.weighed()]
        if not whole.num_apart or self.alone:
            return [batch.targets for batch in self.batches]
        most = [whole.num_units / max(1, whole.num_targets), whole.num_units / whole.num_apart]
        return [weighed(unit.targets, torch.tensor([*map(mul, unit.counts, most)])) for unit in self.batches]

    def by_update(self) -> list[Units]:
        """The units of one update after the other."""
        return self.split(self.num_updates)

    def split(self, count: int) -> list[Units]:
        """The units of one iteration, or update, after the other."""
        each = len(self.batches) // count
        parts = (self.batches[begin : begin + each] for begin in range(0, len(self.batches), each))
        return [replace(self, batches=part, num_updates=1) for part in parts]

    def message(self) -> tuple[Any, ...]:
        """Itself as what a transport carries; numbers that change are in a tensor, so that its form stays the same."""
        numbers = [torch.tensor([*b.counts, *b.checksums.values()], dtype=torch.float64) for b in self.batches]
        return [(b.inputs, b.targets, list(b.checksums)) for b in self.batches], numbers

    @classmethod
    def of_message(cls, message: tuple[Any, ...]) -> Units:
        units, size = [], len(Counts._fields)
        for (inputs, targets, names), told in zip(*message, strict=True):
            numbers = [*map(int, told.tolist())]
            checksums = dict(zip(names, numbers[size:], strict=True))
            units.append(ReadUnit(inputs, targets, Counts(*numbers[:size]), checksums))
        return cls(units)

    def completed(self, told: Sequence[Sequence[float]]) -> Units:
        """What all ranks have ``told`` of the units that they have read, for those that are not read here."""
        size, best = len(Counts._fields), [int(max(numbers)) for numbers in zip(*told, strict=True)]
        rows = [Counts(*best[begin : begin + size]) for begin in range(0, len(best), size)]
        return replace(self, batches=[replace(unit, counts=row) for unit, row in zip(self.batches, rows, strict=True)])

    def inputs(self) -> Microbatches:
        return self._microbatches([batch.inputs for batch in self.batches])

    def targets(self) -> Microbatches:
        return self._microbatches(self.weighed())

    def _microbatches(self, values: Sequence[Any]) -> Microbatches:
        return Microbatches(values.__getitem__, self.shares(), [batch.checksum for batch in self.batches])


def accumulated(parts: Sequence[Units]) -> list[Units]:
    """The iterations of one update, each knowing its part of the whole."""
    whole = Counts.of(unit for part in parts for unit in part.batches)
    return [replace(part, whole=whole) for part in parts]
