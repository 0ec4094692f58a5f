"""The units of an iteration as they were read, and what each weighs among the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any
from zlib import crc32

import torch

from vpipe.models.losses import weighed
from vpipe.runtime.microbatches import Microbatches


@dataclass(frozen=True)
class Whole:
    """What shares are shares of: all units between two updates."""

    num_targets: int
    num_apart: int
    num_units: int

    @classmethod
    def of(cls, units: Sequence[ReadUnit]) -> Whole:
        return cls(sum(unit.num_targets for unit in units), sum(unit.num_apart for unit in units), len(units))


@dataclass(frozen=True)
class ReadUnit:
    """One unit, read."""

    inputs: Any
    targets: Any
    num_targets: int
    """Targets that count in the loss, as the model counts them."""
    num_apart: int = 0
    """Those of a second part of the loss, which is a mean of its own."""
    num_tokens: int = 0
    """Tokens that the model reads, padding left out."""
    num_samples: int = 0
    flops: float = 0.0
    """What the model computes for it, forward and backward."""
    checksums: Mapping[str, int] = field(default_factory=dict)
    """Of each of its tensors: two ranks that read the same unit have the same. Empty where it is not read here."""

    @property
    def numbers(self) -> list[float]:
        return [self.num_targets, self.num_apart, self.num_tokens, self.num_samples, self.flops]

    def told(self, numbers: Sequence[float]) -> ReadUnit:
        """The same, with ``numbers``."""
        counts: dict[str, Any] = dict(zip(NUMBERS, map(int, numbers), strict=False))
        return replace(self, **counts, flops=numbers[-1])

    @property
    def checksum(self) -> int:
        """Of all of it, never 0."""
        return 1 + crc32(repr(sorted(self.checksums.items())).encode())


NUMBERS = ("num_targets", "num_apart", "num_tokens", "num_samples")


@dataclass(frozen=True)
class Units:
    """The units of one or several iterations, read."""

    batches: Sequence[ReadUnit]
    whole: Whole | None = None
    """The units of the update, where these are only a part of them (gradient accumulation)."""
    num_updates: int = 1
    """Of how many updates these are the units, where each update has shares of its own."""
    alone: bool = False
    """Whether a unit is no part of a batch: an asynchronous schedule updates by units."""

    @property
    def num_targets(self) -> int:
        """Targets that count in the loss."""
        return sum(batch.num_targets for batch in self.batches)

    @property
    def num_tokens(self) -> int:
        """Tokens that the model reads: what throughput and MFU count."""
        return sum(batch.num_tokens for batch in self.batches)

    @property
    def num_samples(self) -> int:
        return sum(batch.num_samples for batch in self.batches)

    @property
    def flops(self) -> float:
        return sum(batch.flops for batch in self.batches)

    @property
    def part(self) -> float:
        """The part that these units are of their update."""
        return reduce(add, self.shares(), 0.0) if self.whole is not None else 1.0

    def shares(self) -> list[float]:
        """Each unit's part of all valid targets: the weights that make the mean over units the mean over targets."""
        if self.num_updates > 1:
            return [share for update in self.by_update() for share in update.shares()]
        whole = self.whole or Whole.of(self.batches)
        if whole.num_targets == 0 or (whole.num_apart and not self.alone):
            return [1 / whole.num_units] * len(self.batches)
        return [batch.num_targets / whole.num_targets for batch in self.batches]

    def weighed(self) -> list[Any]:
        """The targets; of a loss with two parts also what each of them weighs in a unit, so that both are means over
        what counts in the whole."""
        whole = self.whole or Whole.of(self.batches)
        if self.num_updates > 1:
            return [targets for update in self.by_update() for targets in update.weighed()]
        if not whole.num_apart or self.alone:
            return [batch.targets for batch in self.batches]
        most = [whole.num_units / max(1, whole.num_targets), whole.num_units / whole.num_apart]
        weights = (torch.tensor([batch.num_targets * most[0], batch.num_apart * most[1]]) for batch in self.batches)
        return [weighed(batch.targets, own) for batch, own in zip(self.batches, weights, strict=True)]

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
        numbers = [[*b.checksums.values(), *b.numbers] for b in self.batches]
        values = [(b.inputs, b.targets, list(b.checksums)) for b in self.batches]
        return values, [torch.tensor(each, dtype=torch.float64) for each in numbers]

    @classmethod
    def of_message(cls, message: tuple[Any, ...]) -> Units:
        units = []
        for (inputs, targets, names), numbers in zip(*message, strict=True):
            checksums = dict(zip(names, map(int, numbers.tolist()), strict=False))
            units.append(ReadUnit(inputs, targets, 0, checksums=checksums).told(numbers.tolist()[len(names) :]))
        return cls(units)

    def completed(self, told: Sequence[Sequence[float]]) -> Units:
        """What all ranks have ``told`` of the units that they have read, for those that are not read here."""
        size, best = len(NUMBERS) + 1, [max(numbers) for numbers in zip(*told, strict=True)]
        rows = [best[begin : begin + size] for begin in range(0, len(best), size)]
        return replace(self, batches=[unit.told(row) for unit, row in zip(self.batches, rows, strict=True)])

    def inputs(self) -> Microbatches:
        return self._microbatches([batch.inputs for batch in self.batches])

    def targets(self) -> Microbatches:
        return self._microbatches(self.weighed())

    def _microbatches(self, values: Sequence[Any]) -> Microbatches:
        return Microbatches(values.__getitem__, self.shares(), [batch.checksum for batch in self.batches])


def accumulated(parts: Sequence[Units]) -> list[Units]:
    """The iterations of one update, each knowing its part of the whole."""
    whole = Whole.of([unit for part in parts for unit in part.batches])
    return [replace(part, whole=whole) for part in parts]
