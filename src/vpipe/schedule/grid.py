"""The rank × step grid around a violation, with the culprit marked: where to look, as programs are written.

          3      4        5       6
rank 0    0B0    0F3     >0B2<    0B1
rank 1    1B1    1B0      1F2     1B2
"""

from __future__ import annotations

from collections.abc import Collection

from vpipe.schedule.program import Program
from vpipe.schedule.violation import Violation

BESIDE = 5
"""Steps and ranks shown on each side of the culprit."""


def around(program: Program, violation: Violation, violations: Collection[Violation] = ()) -> str:
    """The part of the grid around ``violation``; all ``violations`` that fall into it are marked as well."""
    marked = {(each.rank, each.index) for each in (violation, *violations)}
    rank, index = violation.rank, max(violation.index, 0)
    ranks = range(max(0, rank - BESIDE), min(program.num_ranks, rank + BESIDE + 1))
    longest = max((len(program.rows[each]) for each in ranks), default=0)
    steps = range(max(0, index - BESIDE), max(min(longest, index + BESIDE + 1), min(longest, 2 * BESIDE + 1)))
    table = [["", *map(str, steps)]]
    for each in ranks:
        row = program.rows[each]
        cells = [_cell(str(row[step]) if step < len(row) else "", (each, step) in marked) for step in steps]
        table.append([_cell(f"rank {each}", (each, -1) in marked), *cells])
    table[0][1:] = [f" {step}" for step in table[0][1:]]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table
    )


def _cell(cell: str, marked: bool) -> str:
    return f">{cell}<" if marked else f" {cell}" if cell else ""
