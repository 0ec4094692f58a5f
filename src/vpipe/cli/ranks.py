"""The machine that ``vpipe plan`` is asked about: replicas, and links that differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import click

from vpipe.errors import UserError

AUTO: Literal["auto"] = "auto"


class Replicas(click.ParamType[Any]):
    """``2``, ``2,1,1`` or ``auto``."""

    name = "N[,N…]|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == AUTO or isinstance(value, int | tuple):
            return value
        parts = str(value).split(",")
        if not all(part.isascii() and part.isdigit() and 0 < int(part) <= 65536 for part in parts):
            self.fail(
                f"{str(value)[:40]!r} is neither a number of replicas, nor one for each stage, nor auto", param, ctx
            )
        numbers = tuple(int(part) for part in parts)
        return numbers[0] if len(numbers) == 1 else numbers


def read_links(path: Path, num_ranks: int) -> dict[str, Any]:
    """``latency`` and ``bandwidth`` of links from a file: matrices over the ranks, or lists over the boundaries.

    A list has one number for each boundary between rank r and r+1. What goes further passes all of them: latencies add
    up, and the narrowest counts.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: the links cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: the links are not JSON") from None
    if not isinstance(found, dict) or not found or not set(found) <= {"latency", "bandwidth"}:
        raise UserError(
            f"{path}: links are an object with 'latency' (seconds) or 'bandwidth' (bytes per second) or both"
        )
    return {name: _matrix(f"{path}: {name}", rows, num_ranks, name == "latency") for name, rows in found.items()}


def _matrix(where: str, rows: object, num_ranks: int, adds: bool) -> Sequence[Sequence[float]]:
    if isinstance(rows, list) and len(rows) == num_ranks and all(isinstance(row, list) for row in rows):
        return [_numbers(f"{where}[{index}]", row, num_ranks) for index, row in enumerate(rows)]
    values = _numbers(where, rows, num_ranks - 1)
    passed = [0.0, *accumulate(values)]
    return [
        [
            abs(passed[a] - passed[b]) if adds else min(values[min(a, b) : max(a, b)], default=1.0)
            for b in range(num_ranks)
        ]
        for a in range(num_ranks)
    ]


def _numbers(where: str, row: object, count: int) -> list[float]:
    if not isinstance(row, list) or len(row) != count:
        raise UserError(f"{where} must be a list of {count} numbers (one for each rank, or for each boundary)")
    for value in row:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 2**53:
            raise UserError(f"{where} has {str(value)[:40]!r}, which is no time or bandwidth of a link")
    return [float(value) for value in row]
