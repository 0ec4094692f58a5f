"""From a data set to the units of an iteration.

Only the ranks that hold the first or the last stage read data; labels do not hop through the middle. Both read the same
batch by themselves, because a batch is a pure function of its position. With d replicas of every stage, unit k is part
k // d of replica k mod d's batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

from torch import Tensor

from vpipe.data.dataset import Batch, DataSet
from vpipe.data.order import BatchOrder
from vpipe.errors import UserError
from vpipe.layer import split_sizes
from vpipe.runtime.microbatches import Microbatches

Position = tuple[int, int]
"""(epoch, batch)."""


@dataclass(frozen=True)
class Whole:
    """What shares are shares of: all units between two updates."""

    num_targets: int
    num_units: int


@dataclass(frozen=True)
class Units:
    """The units of one or several iterations, read."""

    batches: Sequence[Batch]
    pad_id: int | None = None
    whole: Whole | None = None
    """The units of the update, where these are only a part of them (gradient accumulation)."""
    num_updates: int = 1
    """Of how many updates these are the units, where each update has shares of its own."""

    @property
    def num_targets(self) -> int:
        """Targets that count in the loss."""
        return sum(batch.num_tokens for batch in self.batches)

    @property
    def num_tokens(self) -> int:
        """Tokens that the model reads, padding left out: what throughput and MFU count."""
        return sum(_num_tokens(batch, self.pad_id) for batch in self.batches)

    @property
    def num_samples(self) -> int:
        return sum(_leading(batch.inputs).shape[0] for batch in self.batches)

    @property
    def part(self) -> float:
        """The part that these units are of their update."""
        return reduce(add, self.shares(), 0.0) if self.whole is not None else 1.0

    def shares(self) -> list[float]:
        """Each unit's part of all valid targets: the weights that make the mean over units the mean over targets."""
        if self.num_updates > 1:
            return [share for update in self.by_update() for share in update.shares()]
        whole = self.whole or Whole(self.num_targets, len(self.batches))
        if whole.num_targets == 0:
            return [1 / whole.num_units] * len(self.batches)
        return [batch.num_tokens / whole.num_targets for batch in self.batches]

    def by_update(self) -> list[Units]:
        """The units of one update after the other."""
        each = len(self.batches) // self.num_updates
        parts = (self.batches[begin : begin + each] for begin in range(0, len(self.batches), each))
        return [replace(self, batches=part, num_updates=1) for part in parts]

    def inputs(self) -> Microbatches:
        return Microbatches([batch.inputs for batch in self.batches].__getitem__, self.shares())

    def targets(self) -> Microbatches:
        return Microbatches([batch.targets for batch in self.batches].__getitem__, self.shares())


def accumulated(parts: Sequence[Units]) -> list[Units]:
    """The iterations of one update, each knowing its part of the whole."""
    whole = Whole(sum(part.num_targets for part in parts), sum(len(part.batches) for part in parts))
    return [replace(part, whole=whole) for part in parts]


def _leading(inputs: Any) -> Tensor:
    """The tensor that says how much the model reads: of a translation the target, which the loss is counted in."""
    if isinstance(inputs, Mapping):
        for name in ("tokens", "target_in"):
            if name in inputs:
                return _leading(inputs[name])
        return _leading(next(iter(inputs.values())))
    return inputs if isinstance(inputs, Tensor) else _leading(inputs[0])


def _num_tokens(batch: Batch, pad_id: int | None) -> int:
    leading = _leading(batch.inputs)
    if leading.is_floating_point():
        return int(leading.shape[0])
    return int(leading.numel() if pad_id is None else (leading != pad_id).sum())


class Feed:
    """Reads iterations in order, ahead of the training loop if there are workers."""

    def __init__(
        self,
        data: DataSet,
        *,
        num_microbatches: int,
        num_replicas: int = 1,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        shuffle: bool = True,
    ) -> None:
        self._data = data
        self._num_microbatches = num_microbatches
        options: dict[str, Any] = {"max_tokens": max_tokens} if max_tokens else {"batch_size": batch_size}
        self._orders: list[BatchOrder] = [
            data.order(seed=seed, num_replicas=num_replicas, replica=replica, shuffle=shuffle, **options)
            for replica in range(num_replicas)
        ]
        self._by_tokens = max_tokens is not None
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="vpipe-data") if num_workers else None
        self._num_workers = num_workers
        self._ahead: dict[Position, Future[list[Batch]]] = {}
        per_iteration = num_microbatches if self._by_tokens else 1
        self.num_batches = len(self._orders[0]) // per_iteration
        """Iterations of an epoch."""
        if self.num_batches == 0:
            raise UserError(
                f"dataset.max_tokens {max_tokens} makes {len(self._orders[0])} batches on each of {num_replicas} "
                f"replicas, fewer than training.num_microbatches = {num_microbatches}; lower one of them"
            )
        per_replica = num_microbatches if max_tokens else int(batch_size or 0)
        self.step = per_replica * num_replicas
        """What one iteration takes of an epoch, over all replicas: examples, or batches where they go by tokens."""

    def next(self, position: Position) -> Position:
        """The position after this one."""
        epoch, batch = position
        return (epoch, batch + 1) if batch + 1 < self.num_batches else (epoch + 1, 0)

    def read(self, positions: Sequence[Position]) -> Units:
        """The units of these iterations, in order."""
        if self._pool is None:
            return self._made([unit for position in positions for unit in self._batches(self._indices(position))])
        wanted = list(positions)
        for _ in range(self._num_workers):
            wanted.append(self.next(wanted[-1]))
        for position in wanted:
            if position not in self._ahead:
                # The order is asked here: it remembers one epoch, which threads would take from each other.
                self._ahead[position] = self._pool.submit(self._batches, self._indices(position))
        return self._made([unit for position in positions for unit in self._ahead.pop(position).result()])

    def _made(self, batches: list[Batch]) -> Units:
        return Units(batches, self._data.pad_id)

    def _indices(self, position: Position) -> list[Sequence[int]]:
        """The examples of every unit of an iteration."""
        epoch, batch = position
        parts: list[list[Sequence[int]]]
        if self._by_tokens:  # every unit is a batch of its own, padded by itself
            first = batch * self._num_microbatches
            parts = [[o.indices(first + i, epoch) for i in range(self._num_microbatches)] for o in self._orders]
        else:
            parts = [_cut(order.indices(batch, epoch), self._num_microbatches) for order in self._orders]
        return [parts[replica][i] for i in range(self._num_microbatches) for replica in range(len(parts))]

    def _batches(self, units: Sequence[Sequence[int]]) -> list[Batch]:
        return [self._data.batch(unit) for unit in units]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _cut(indices: Sequence[int], num_units: int) -> list[Sequence[int]]:
    sizes = split_sizes(len(indices), num_units)
    ends = [sum(sizes[: microbatch + 1]) for microbatch in range(num_units)]
    return [indices[end - size : end] for size, end in zip(sizes, ends, strict=True)]
