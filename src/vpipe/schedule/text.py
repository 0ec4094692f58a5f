"""Programs on paper: torch's CSV, one row a rank, one cell an action.

The form that ``torch.distributed.pipelining`` dumps and loads, so schedules travel both ways. Reading also takes what torch writes and
vpipe does not: empty cells (idle slots), compound cells such as ``(1F3;2B1)OVERLAP_F_B`` (read as their parts in order), ``REDUCE_GRAD``
(our ``REDUCE``), and ``UNSHARD``/``RESHARD`` (the business of a sharded weight store: left out).
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from vpipe.errors import UserError
from vpipe.schedule.action import OF_A_STAGE, Action, parse
from vpipe.schedule.placement import Placement
from vpipe.schedule.program import Program, Versions

MAX_BYTES = 512 * 2**20
_COMPOUND = re.compile(r"\((.*)\)OVERLAP_F_B")
_SHARDING = re.compile(r"\d+(UNSHARD|RESHARD)\d*")
_REDUCE_GRAD = re.compile(r"(\d+)REDUCE_GRAD\d*")


def to_csv(program: Program) -> str:
    """The program as CSV; ``from_csv`` reads it back exactly (the versions rule is a parameter of reading)."""
    return "".join(",".join(map(str, row)) + "\n" for row in program.rows)


def from_csv(text: str, source: str = "the CSV", versions: Versions = Versions.NEWEST) -> Program:
    """The program that a CSV writes; ``UserError`` with row and column where it writes none."""
    rows = []
    for number, cells in enumerate(csv.reader(io.StringIO(text)), 1):
        rows.append(tuple(action for column, cell in enumerate(cells, 1) for action in _cell(cell, source, number, column)))
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise UserError(f"{source} holds no action; a schedule is one row a rank, one cell an action, such as 0F0,0F1,0B0,0B1")
    for number, row in enumerate(rows, 1):
        if not row:
            raise UserError(f"{source}, row {number}: rank {number - 1} does nothing; give every rank a row with actions")
    units = max((action.microbatch for row in rows for action in row), default=-1) + 1
    return Program(tuple(rows), _placement(rows, source), units, versions)


def read_csv(path: str | Path, versions: Versions = Versions.NEWEST) -> Program:
    """``from_csv`` of a file."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path} has {path.stat().st_size} bytes; a schedule has at most {MAX_BYTES}")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text (byte {error.start}); a schedule is a CSV file of actions such as 0F0") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if "\0" in text:
        raise UserError(f"{path} is not text (byte {text.index(chr(0))}); a schedule is a CSV file of actions such as 0F0")
    return from_csv(text, str(path), versions)


def _cell(cell: str, source: str, row: int, column: int) -> Iterator[Action]:
    cell = cell.strip()
    if not cell or _SHARDING.fullmatch(cell):
        return
    if compound := _COMPOUND.fullmatch(cell):
        for part in compound[1].split(";"):
            yield from _cell(part, source, row, column)
        return
    if reduced := _REDUCE_GRAD.fullmatch(cell):
        cell = f"{reduced[1]}REDUCE"
    try:
        yield parse(cell)
    except ValueError as error:
        raise UserError(f"{source}, row {row}, column {column}: {error}") from None


def _placement(rows: list[tuple[Action, ...]], source: str) -> Placement:
    """Who holds which stage: the ranks that take its units in turn, or else the one that runs most of it."""
    votes: dict[int, Counter[int]] = defaultdict(Counter)
    units: dict[tuple[int, int], set[int]] = defaultdict(set)
    for rank, row in enumerate(rows):
        for stage, kind, microbatch in row:
            votes[stage][rank] += 1
            if kind not in OF_A_STAGE:
                units[stage, rank].add(microbatch)
    missing = sorted(set(range(max(votes) + 1)) - set(votes))
    if missing:
        raise UserError(f"{source}: stage {missing[0]} is on no rank, though stage {max(votes)} is; stages are numbered without a gap")
    ranks_of = []
    for stage in range(len(votes)):
        ranks = sorted(votes[stage], key=lambda rank: min(units[stage, rank], default=0))
        turns = all(
            units[stage, rank] and {unit % len(ranks) for unit in units[stage, rank]} == {turn}
            for turn, rank in enumerate(ranks)
        )
        ranks_of.append(tuple(ranks) if turns else (votes[stage].most_common(1)[0][0],))
    held = {rank for ranks in ranks_of for rank in ranks}
    idle = sorted(set(range(len(rows))) - held)
    if idle:
        raise UserError(f"{source}, row {idle[0] + 1}: rank {idle[0]} holds no stage of its own; every rank holds at least one")
    return Placement(tuple(ranks_of))
