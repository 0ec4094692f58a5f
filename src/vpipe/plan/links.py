"""Links that differ: what a message takes from each rank to each other one.

Two hosts are joined by less than two ranks of one host are. ``vpipe profile`` measures every pair where a launcher has
started the ranks; a person may also write the values of the boundaries alone. The form is the same in a profile and in
the file of ``vpipe plan --links``:

    {"latency": [[0, 1e-5, 1e-3], …], "bandwidth": [[…], …]}     a matrix over the ranks
    {"latency": [1e-5, 1e-3], "bandwidth": [1e9, 2e7]}           one number for each boundary between rank r and r+1
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from vpipe.errors import UserError

Matrix = tuple[tuple[float, ...], ...]

MOST = 2**53
"""Seconds or bytes per second: more is a slip of the pen."""


@dataclass(frozen=True)
class Links:
    """``latency[a][b]`` in seconds and ``bandwidth[a][b]`` in bytes per second, from rank a to rank b; ``None``: as the
    profile says for all."""

    latency: Matrix | None = None
    bandwidth: Matrix | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.latency or self.bandwidth or ())

    def of_ranks(self, num_ranks: int, where: str) -> Links:
        """Those of the first ``num_ranks`` ranks."""
        if num_ranks > self.num_ranks:
            raise UserError(
                f"{where} has the links between {self.num_ranks} ranks, but the plan is for {num_ranks}; measure with "
                f"{num_ranks} ranks, or give --links"
            )

        def first(matrix: Matrix | None) -> Matrix | None:
            return None if matrix is None else tuple(row[:num_ranks] for row in matrix[:num_ranks])

        return Links(first(self.latency), first(self.bandwidth))

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """From which rank to which there is one."""
        return [(a, b) for a in range(self.num_ranks) for b in range(self.num_ranks) if a != b]

    def to_json(self) -> dict[str, Any]:
        both = (("latency", self.latency), ("bandwidth", self.bandwidth))
        return {name: [list(row) for row in matrix] for name, matrix in both if matrix is not None}


def links_from_json(data: object, where: str, num_ranks: int | None = None) -> Links:
    """The links that a JSON value describes, between ``num_ranks`` ranks or as many as it has."""
    if not isinstance(data, dict) or not data or not set(data) <= {"latency", "bandwidth"}:
        raise UserError(
            f"{where}: links are an object with 'latency' (seconds) or 'bandwidth' (bytes per second) or both"
        )
    found = {
        name: _matrix(f"{where}: {name}", rows, num_ranks or _num_ranks(rows), adds=name == "latency")
        for name, rows in data.items()
    }
    sizes = {name: len(matrix) for name, matrix in found.items()}
    if len(set(sizes.values())) > 1:
        raise UserError(f"{where}: latency is of {sizes['latency']} ranks, but bandwidth of {sizes['bandwidth']}")
    return Links(**found)


def _num_ranks(rows: object) -> int:
    if not isinstance(rows, list):
        return 2
    return len(rows) if rows and isinstance(rows[0], list) else len(rows) + 1


def _matrix(where: str, rows: object, num_ranks: int, *, adds: bool) -> Matrix:
    """What goes further than to the neighbour passes all boundaries between: latencies add up, the narrowest counts."""
    if isinstance(rows, list) and len(rows) == num_ranks and all(isinstance(row, list) for row in rows):
        return tuple(_numbers(f"{where}[{index}]", row, num_ranks) for index, row in enumerate(rows))
    values = _numbers(where, rows, num_ranks - 1)
    passed = [0.0, *accumulate(values)]
    return tuple(
        tuple(
            abs(passed[a] - passed[b]) if adds else min(values[min(a, b) : max(a, b)], default=1.0)
            for b in range(num_ranks)
        )
        for a in range(num_ranks)
    )


def _numbers(where: str, row: object, count: int) -> tuple[float, ...]:
    if not isinstance(row, list) or len(row) != count:
        raise UserError(f"{where} must be a list of {count} numbers (one for each rank, or for each boundary)")
    for value in row:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
            raise UserError(f"{where} has {str(value)[:40]!r}, which is no time or bandwidth of a link")
    return tuple(float(value) for value in row)
