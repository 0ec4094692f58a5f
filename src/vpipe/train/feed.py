"""From a data set to the units of an iteration.

Only the ranks that hold the first or the last stage read data; labels do not hop through the middle. Both read the same
batch by themselves, because a batch is a pure function of its position. With d replicas of every stage, unit k is part
k // d of replica k mod d's batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from vpipe.data.dataset import Batch, DataSet
from vpipe.data.order import BatchOrder
from vpipe.runtime.microbatches import Microbatches, split_sizes

Position = tuple[int, int]
"""(epoch, batch)."""


@dataclass(frozen=True)
class Units:
    """The units of one or several iterations, read."""

    batches: Sequence[Batch]

    @property
    def num_tokens(self) -> int:
        return sum(batch.num_tokens for batch in self.batches)

    def shares(self) -> list[float]:
        """Each unit's part of all valid tokens: the weights that make the mean over units the mean over tokens."""
        total = self.num_tokens
        if total == 0:
            return [1 / len(self.batches)] * len(self.batches)
        return [batch.num_tokens / total for batch in self.batches]

    def inputs(self) -> Microbatches:
        return Microbatches(lambda unit: self.batches[unit].inputs, self.shares())

    def targets(self) -> Microbatches:
        return Microbatches(lambda unit: self.batches[unit].targets, self.shares())


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

    def next(self, position: Position) -> Position:
        """The position after this one."""
        epoch, batch = position
        return (epoch, batch + 1) if batch + 1 < self.num_batches else (epoch + 1, 0)

    def read(self, positions: Sequence[Position]) -> Units:
        """The units of these iterations, in order."""
        if self._pool is None:
            return Units([unit for position in positions for unit in self._units(position)])
        wanted = list(positions)
        for _ in range(self._num_workers):
            wanted.append(self.next(wanted[-1]))
        for position in wanted:
            if position not in self._ahead:
                self._ahead[position] = self._pool.submit(self._units, position)
        return Units([unit for position in positions for unit in self._ahead.pop(position).result()])

    def _units(self, position: Position) -> list[Batch]:
        epoch, batch = position
        parts: list[list[Sequence[int]]]
        if self._by_tokens:  # every unit is a batch of its own, padded by itself
            first = batch * self._num_microbatches
            parts = [[o.indices(first + i, epoch) for i in range(self._num_microbatches)] for o in self._orders]
        else:
            parts = [_cut(order.indices(batch, epoch), self._num_microbatches) for order in self._orders]
        return [
            self._data.batch(parts[replica][i]) for i in range(self._num_microbatches) for replica in range(len(parts))
        ]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _cut(indices: Sequence[int], num_units: int) -> list[Sequence[int]]:
    sizes = split_sizes(len(indices), num_units)
    ends = [sum(sizes[: unit + 1]) for unit in range(num_units)]
    return [indices[end - size : end] for size, end in zip(sizes, ends, strict=True)]
