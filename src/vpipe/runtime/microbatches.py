"""A batch cut into units.

Rows are dealt out evenly, the first units taking one more where they do not divide. A unit's weight is its share of the
rows, so that the weighted sum of the units' mean losses is the mean over the batch; for equal units it is exactly ``1 /
num_microbatches``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vpipe.errors import UserError
from vpipe.runtime.transport.wire import flatten, unflatten


@dataclass(frozen=True)
class Microbatches:
    """Units that are already cut: ``get(k)`` is the k-th. Give this instead of a batch to choose the cut, or to read
    units lazily."""

    get: Callable[[int], Any]
    weights: Sequence[float] | None = None
    """The units' weights; equal if not given."""


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


def split_sizes(rows: int, num_units: int) -> list[int]:
    if rows < num_units:
        raise UserError(
            f"a batch of {rows} rows cannot be cut into {num_units} microbatches; "
            f"give at least {num_units} rows or fewer microbatches"
        )
    return [rows // num_units + (microbatch < rows % num_units) for microbatch in range(num_units)]


class CutBatch:
    """The units of a batch, each made when it is asked for: most ranks ask for none."""

    def __init__(self, value: Any, sizes: list[int]) -> None:
        self._sizes = sizes
        self._tensors: list[Tensor] = []
        self._structure = flatten(value, self._tensors)

    @cached_property
    def _pieces(self) -> list[Sequence[Tensor]]:
        sizes = self._sizes
        return [torch.split(each, sizes) if each.dim() else [each] * len(sizes) for each in self._tensors]

    def __getitem__(self, microbatch: int) -> Any:
        return unflatten(self._structure, iter([piece[microbatch] for piece in self._pieces]).__next__)

    def __iter__(self) -> Iterator[Any]:
        return (self[microbatch] for microbatch in range(len(self._sizes)))


def split(value: Any, num_units: int, num_batches: int = 1) -> tuple[CutBatch | list[Any], list[float]]:
    """The units of a batch and their weights; of several batches, each unit's weight in its own."""
    rows, each = num_rows(value), num_units // num_batches
    if rows is None:
        return [value] * num_units, [1 / each] * num_units
    sizes = split_sizes(rows, num_units)
    units = CutBatch(value, sizes)
    if len(set(sizes)) == 1:
        return units, [1 / each] * num_units
    wholes = [sum(sizes[begin : begin + each]) for begin in range(0, num_units, each)]
    return units, [size / wholes[microbatch // each] for microbatch, size in enumerate(sizes)]
