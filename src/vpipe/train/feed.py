"""From a data set to the units of an iteration.

Only the ranks that hold the first or the last stage read data, and the one that tells what was read (``Session``);
labels do not hop through the middle. All read the same batch by themselves: its examples follow from its position, and
so do the random numbers of the code that makes it, because torch's, numpy's and Python's generators are seeded for
every unit. With d replicas of every stage, unit k is part k // d of replica k mod d's batch; a rank reads the units of
its replica, and is told what counts in the others.

Workers are processes, since threads would share these generators with each other and with the step.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from operator import gt
from typing import Any, NamedTuple, cast
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from vpipe.data.dataset import DataSet, seeded
from vpipe.data.facts import bytes_of, tensors_of
from vpipe.data.order import ENDLESS, Indices, PartsRead
from vpipe.errors import UserError
from vpipe.layer import split_sizes
from vpipe.process import die_with_parent
from vpipe.rundir.manifest import NONE, Best
from vpipe.train.units import Counts, ReadUnit, Units

Mine = tuple[bool, ...]
"""For each unit of an iteration, whether this rank reads it; all of them, if it is empty."""

Position = tuple[int, int]
"""(epoch, batch): the iterations of an epoch are counted as they were made."""


@dataclass(frozen=True)
class TrainingProgress:
    """How far a run has come."""

    iteration: int
    position: Position
    examples: int
    """Examples trained on since the run began, whatever batches they came in."""
    sound: bool = True
    """Whether its loss is finite."""
    lowered: float = 1.0
    """What the learning rate is multiplied by."""
    best: Best = NONE


def _leading(inputs: Any) -> Tensor:
    """The tensor that says how much the model reads: of a translation the target, which the loss is counted in."""
    if isinstance(inputs, Mapping):
        for name in ("tokens", "target_in"):
            if name in inputs:
                return _leading(inputs[name])
        return _leading(next(iter(inputs.values())))
    return inputs if isinstance(inputs, Tensor) else _leading(inputs[0])


def _num_tokens(inputs: Any, pad_id: int | None) -> int:
    leading = _leading(inputs)
    if leading.is_floating_point():
        return int(leading.shape[0])
    return int(leading.numel() if pad_id is None else (leading != pad_id).sum())


def _checksum(tensor: Tensor) -> int:
    return crc32(bytes_of(tensor), crc32(f"{tensor.dtype} {list(tensor.shape)}".encode()))


class UnitsWanted(NamedTuple):
    """The units of an iteration that are to be read."""

    epoch: int
    first_unit: int
    """How many units of the epoch come before."""
    examples: list[Sequence[int]]
    """Of every unit."""
    mine: Mine = ()


@dataclass(frozen=True)
class Reader:
    """Reads units, here or in a process of its own."""

    data: DataSet
    count: Callable[[Any], int]
    """The model's: how many targets of a unit count."""
    seed: int
    given: Callable[[Any, Any], Any] | None = None
    """The model's: what it takes of a batch's inputs and targets; ``None``: the inputs as they are."""
    apart: Callable[[Any], int] | None = None
    """The same of the second part of its loss."""
    flops: Callable[[Any, int, int | None], float] | None = None
    """What the model computes for inputs with so many tokens and this padding."""

    def __getitem__(self, wanted: UnitsWanted) -> list[ReadUnit] | UserError:
        try:
            mine = wanted.mine or [True] * len(wanted.examples)
            units = zip(mine, wanted.examples, strict=True)
            return [
                self._unit(wanted.epoch, wanted.first_unit + k, examples) if here else ReadUnit(None, None)
                for k, (here, examples) in enumerate(units)
            ]
        except UserError as error:
            return error  # a worker would make a traceback of it

    def _unit(self, epoch: int, number: int, examples: Sequence[int]) -> ReadUnit:
        with seeded(self.seed, epoch, number) if self.data.draws else nullcontext():
            inputs, targets = self.data.batch(examples or [0])
        inputs = inputs if self.given is None else self.given(inputs, targets)
        tensors = [*tensors_of(inputs, "inputs"), *tensors_of(targets, "labels")]
        checksums = {name: _checksum(tensor) for name, tensor in tensors}
        if not examples:  # it fills up the last batch of an evaluation, and weighs nothing
            return ReadUnit(inputs, targets, checksums=checksums)
        num_tokens, num_samples = _num_tokens(inputs, self.data.pad_id), int(_leading(inputs).shape[0])
        flops = self.flops(inputs, num_tokens, self.data.pad_id) if self.flops else 0.0
        num_targets, num_apart = int(self.count(targets)), self.apart(targets) if self.apart else 0
        counts = Counts(num_targets, num_apart, num_tokens, num_samples, flops)
        return ReadUnit(inputs, targets, counts, checksums)


def _begin_worker(parent: int, _: int) -> None:
    """A process that reads ahead ends with the rank, and leaves signals to it."""
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


class Feed:
    """Reads iterations in order, ahead of the training loop if there are workers."""

    def __init__(
        self,
        data: DataSet,
        count: Callable[[Any], int],
        *,
        num_microbatches: int,
        num_replicas: int = 1,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        shuffle: bool = True,
        whole: bool = False,
        **of_model: Any,
    ) -> None:
        """``whole``: the last batch of an epoch may be smaller, instead of being left out. ``of_model`` is what a
        ``Reader`` asks a model."""
        self._whole, self._mine = whole, cast("Mine", ())
        self._data, self._by_tokens = data, max_tokens is not None
        self._num_microbatches, self._num_replicas = num_microbatches, num_replicas
        rows = None if batch_size is None or max_tokens else batch_size * num_replicas
        self._order = data.order(batch_size=rows, max_tokens=max_tokens, seed=seed, shuffle=shuffle)
        self._rows = rows or 0
        self._per_iteration = 1 if rows else num_microbatches * num_replicas
        self._reader = Reader(data, count, seed, **of_model)
        self._num_workers = min(num_workers, 1) if len(data) == ENDLESS else num_workers
        self._ahead: Iterator[list[ReadUnit] | UserError] | None = None
        self._coming: Position | None = None
        """What the workers give next."""
        self._start: Position = (0, 0)
        self._read: PartsRead = ()
        """What had been read of the epoch of ``_start``."""
        self._tables: dict[int, Sequence[Indices]] = {}
        self._sums: dict[int, Indices] = {}
        """Epoch → the examples of its first batches, for each number of them."""
        self.num_batches = self._num_left(0)
        """Iterations of a whole epoch."""
        if self.num_batches == 0:
            on_each = f" on each of {num_replicas} replicas" if num_replicas > 1 else ""
            if max_tokens:
                raise UserError(
                    f"dataset.max_tokens {max_tokens} makes {len(self._table(0))} batches, fewer than "
                    f"training.num_microbatches = {num_microbatches}{on_each}; lower one of them"
                )
            raise UserError(
                f"the data set has {len(data)} examples, fewer than one batch of {batch_size}{on_each}; use a smaller "
                "dataset.batch_size or more data"
            )

    def begin(self, position: Position, read: PartsRead) -> Position:
        """Go on at a position before which ``read`` had been read of its epoch, by whatever batches; the position of
        the next batch."""
        self._start, self._read = position, read
        self._tables.clear()
        self._sums.clear()
        self.close()
        return position if position[1] < self.batches_of(position[0]) else (position[0] + 1, 0)

    def batches_of(self, epoch: int) -> int:
        """Iterations of an epoch: those before ``begin`` are counted as they were made."""
        start, made = self._start
        return made + self._num_left(epoch) if epoch == start else self.num_batches

    def read_before(self, position: Position) -> PartsRead:
        """What has been read of a position's epoch before it, for ``begin``."""
        epoch, batch = position
        start, made = self._start
        read, made = (self._read, made) if epoch == start else ((), 0)
        return self._order.extended(read, (batch - made) * self._per_iteration)

    def passes(self, position: Position) -> float:
        """How often the data have been read before a position: whole epochs, and the part of this one in examples; of a
        stream, the iterations."""
        epoch, batch = position
        if not batch:
            return float(epoch)
        if len(self._data) == ENDLESS:
            return float(batch)
        if epoch not in self._sums:
            self._sums = {epoch: np.cumsum([0, *map(len, self._table(epoch))])}
        sums = self._sums[epoch]
        made = self._start[1] if epoch == self._start[0] else 0
        before = len(self._data) - int(sums[-1])
        end, whole = ((batch - made) * self._per_iteration, self._num_left(epoch) * self._per_iteration)
        return epoch + (before + int(sums[end])) / (before + int(sums[whole]))

    def num_examples(self, position: Position) -> int:
        """The examples of an iteration, over all replicas."""
        return sum(map(len, self._batches_at(position)))

    def next(self, position: Position) -> Position:
        """The position after this one."""
        epoch, batch = position
        return (epoch, batch + 1) if batch + 1 < self.batches_of(epoch) else (epoch + 1, 0)

    def read(self, positions: Sequence[Position], mine: Mine = ()) -> Units:
        """The units of these iterations, in order; of each iteration those that are ``mine``, if it says."""
        self._mine = mine
        return Units([unit for position in positions for unit in self._units(position)])

    def _units(self, position: Position) -> list[ReadUnit]:
        if self._num_workers and self._ahead is None and (any(self._mine) or not self._mine):
            self._ahead, self._coming = self._read_ahead(position), position
        if self._ahead is not None and position == self._coming:
            found, self._coming = next(self._ahead), self.next(position)
        else:
            found = self._reader[self._wanted(position)]
        if not isinstance(found, UserError) and any(map(gt, self._mine, (bool(unit.checksums) for unit in found))):
            found = self._reader[self._wanted(position)]  # layers have moved to this rank since a worker has read it
        if isinstance(found, UserError):
            raise found
        return found

    def _read_ahead(self, position: Position) -> Iterator[list[ReadUnit] | UserError]:
        """All iterations from this one on, by processes."""

        def positions() -> Iterator[UnitsWanted]:
            at = position
            while True:
                yield self._wanted(at)
                at = self.next(at)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # every rank would say that there are fewer cores than workers
            loader: DataLoader[Any] = DataLoader(
                cast("Dataset[Any]", self._reader),
                batch_size=None,
                sampler=cast("Sampler[Any]", positions()),
                num_workers=self._num_workers,
                collate_fn=lambda units: units,
                worker_init_fn=partial(_begin_worker, os.getpid()),
                generator=torch.Generator(),  # else it draws from the one that is everybody's
                multiprocessing_context="fork",
            )
            return iter(loader)

    def _table(self, epoch: int) -> Sequence[Indices]:
        """The batches that are left of an epoch. Two epochs are remembered, for those who read ahead."""
        if epoch not in self._tables:
            self._tables = {known: self._tables[known] for known in list(self._tables)[-1:]}
            self._tables[epoch] = self._order.batches(epoch, self._read if epoch == self._start[0] else ())
        return self._tables[epoch]

    def _num_left(self, epoch: int) -> int:
        table = self._table(epoch)
        if self._whole:
            return -(-len(table) // self._per_iteration)
        short = bool(self._rows and table and len(table[-1]) < self._rows)  # what fills no batch is left out
        return (len(table) - short) // self._per_iteration

    def _batches_at(self, position: Position) -> Sequence[Indices]:
        epoch, batch = position
        begin = (batch - (self._start[1] if epoch == self._start[0] else 0)) * self._per_iteration
        return self._table(epoch)[begin : begin + self._per_iteration]

    def _wanted(self, position: Position) -> UnitsWanted:
        epoch, batch = position
        first = batch * self._num_microbatches * self._num_replicas
        return UnitsWanted(epoch, first, self._examples(position), self._mine)

    def _examples(self, position: Position) -> list[Sequence[int]]:
        """The examples of every unit of an iteration: unit k is of replica k mod d."""
        found = self._batches_at(position)
        if self._by_tokens:  # every unit is a batch of its own, padded by itself
            return [unit.tolist() for unit in found] + [[]] * (self._per_iteration - len(found))
        replicas = [
            _cut(part.tolist(), self._num_microbatches) for part in np.array_split(found[0], self._num_replicas)
        ]
        return [part[i] for i in range(self._num_microbatches) for part in replicas]

    def close(self) -> None:
        self._ahead = self._coming = None  # its processes end with it


def _cut(indices: Sequence[int], num_units: int) -> list[Sequence[int]]:
    sizes = split_sizes(max(len(indices), num_units), num_units)
    ends = [sum(sizes[: microbatch + 1]) for microbatch in range(num_units)]
    return [indices[end - size : end] for size, end in zip(sizes, ends, strict=True)]
