"""A program: for each rank, the actions it runs, in order; and its form on paper.

Everything reads programs: ``verify`` checks them, ``simulate`` times them, ``draw`` paints them, the runtime executes
them, and a measured trace is parsed back into one. A program is a value: frozen, comparable, printable.

Weight versions are not stored. They follow from the order of ``STEP`` actions and from ``Versions``, the rule by which
a unit picks its weights (see ``semantics.versions``).

On paper it is torch's CSV, one row a rank, one cell an action: the form that ``torch.distributed.pipelining`` dumps and
loads, so schedules travel both ways. Reading also takes what torch writes and vpipe does not: empty cells (idle slots),
compound cells such as ``(1F3;2B1)OVERLAP_F_B`` (read as their parts in order) and ``REDUCE_GRAD`` (our ``REDUCE``).
Left out are ``UNSHARD``/``RESHARD`` (the business of a sharded weight store) and
``WAIT_SEND_F``/``WAIT_SEND_B``/``WAIT_REDUCE_GRAD`` (torch 2.15's bookkeeping of what is under way).

Words: docs/glossary.md.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from vpipe.errors import UserError, nearest_file
from vpipe.schedule.action import OF_A_STAGE, Action, Kind, parse
from vpipe.schedule.placement import Placement

if TYPE_CHECKING:
    from vpipe.schedule.flat import Flat

Row = tuple[Action, ...]


class Versions(StrEnum):
    """Which weights a unit reads at a stage."""

    NEWEST = "newest"
    """The newest the stage has when the unit's forward starts (bsp, and PipeDream's weight stashing)."""
    VERTICAL = "vertical"
    """Those the unit read at stage 0, on every stage (PipeDream's vertical sync)."""
    DELAYED = "delayed"
    """Those of one update ago, the same for a whole batch (PipeDream-2BW)."""


@dataclass(frozen=True)
class Program:
    """``rows[rank]`` is what the rank does. ``edges`` are the (writer, reader) pairs of stages between which tensors
    travel."""

    rows: tuple[Row, ...]
    placement: Placement
    num_microbatches: int
    versions: Versions = Versions.NEWEST
    skips: frozenset[tuple[int, int]] = frozenset()
    """Edges beside the chain ``s → s+1``: (writer stage, reader stage) of tensors that jump over stages."""

    @property
    def num_ranks(self) -> int:
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """``readers[stage]``: the stages that read what the stage writes, nearest first."""
        return self._neighbours(forward=True)

    @cached_property
    def writers(self) -> tuple[tuple[int, ...], ...]:
        """``writers[stage]``: the stages whose tensors the stage reads, in order."""
        return self._neighbours(forward=False)

    def _neighbours(self, forward: bool) -> tuple[tuple[int, ...], ...]:
        chain = {(stage, stage + 1) for stage in range(self.num_stages - 1)}
        found: list[list[int]] = [[] for _ in range(self.num_stages)]
        for writer, reader in sorted(chain | self.skips):
            here, there = (writer, reader) if forward else (reader, writer)
            found[here].append(there)
        return tuple(tuple(stages) for stages in found)

    @cached_property
    def num_updates(self) -> int:
        """How many updates stage 0 makes."""
        row = self.rows[self.placement.rank(0, 0)]
        return sum(kind is Kind.STEP and stage == 0 for stage, kind, _ in row)

    def update_numbers(self, stage: int) -> list[float]:
        """The numbers of a stage's updates, counted as stage 0 makes them: a stage that makes twice as many has
        halves."""
        row = self.rows[self.placement.rank(stage, 0)]
        own, first = sum(kind is Kind.STEP and of == stage for of, kind, _ in row), self.num_updates
        return [n * first // own if n * first % own == 0 else n * first / own for n in range(own)]

    @cached_property
    def flat(self) -> Flat:
        """The program as arrays: made once, for all who read it."""
        from vpipe.schedule.flat import flatten

        return flatten(self)

    def actions(self) -> Iterator[tuple[int, Action]]:
        """Every (rank, action), rank by rank."""
        for rank, row in enumerate(self.rows):
            for action in row:
                yield rank, action

    def with_rows(self, rows: Iterable[Iterable[Action]]) -> Program:
        return replace(self, rows=tuple(tuple(row) for row in rows))

    def __len__(self) -> int:
        return sum(len(row) for row in self.rows)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.rows)

    def _repr_svg_(self) -> str | None:
        """The picture that a notebook shows: every action takes one unit of time; none of a program that would hang."""
        from vpipe.schedule.simulate import simulate
        from vpipe.schedule.svg import svg
        from vpipe.schedule.verify import verify

        title = f"{self.num_ranks} ranks, {self.num_stages} stages, {self.num_microbatches} microbatches"
        return None if verify(self) else svg(simulate(self), title)


MAX_BYTES = 512 * 2**20
_COMPOUND = re.compile(r"\((.*)\)OVERLAP_F_B")
_FOREIGN = re.compile(r"\d+(UNSHARD|RESHARD|WAIT_SEND_[FB]|WAIT_REDUCE_GRAD)\d*")
_REDUCE_GRAD = re.compile(r"(\d+)REDUCE_GRAD\d*")
_HUGE = re.compile(r"\d{10}")

Cells = list[list[tuple[int, Action]]]
"""Per row, the actions and the columns (from 1) in which they stand."""


def to_csv(program: Program) -> str:
    """The program as CSV; ``from_csv`` reads it back exactly (the versions rule is a parameter of reading)."""
    return "".join(",".join(map(str, row)) + "\n" for row in program.rows)


def from_csv(text: str, source: str = "the CSV", versions: Versions = Versions.NEWEST) -> Program:
    """The program that a CSV writes; ``UserError`` with row and column where it writes none."""
    return from_cells(cells(text, source), source, versions)


def read_csv(path: str | Path, versions: Versions = Versions.NEWEST) -> Program:
    """``from_csv`` of a file."""
    return from_csv(read_text(path), str(path), versions)


def read_text(path: str | Path) -> str:
    """The text of a CSV file; ``UserError`` for what is no text."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path} has {path.stat().st_size} bytes; a schedule has at most {MAX_BYTES}")
        data = path.read_bytes()
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        hint = nearest_file(path) or f"; 'vpipe draw 1f1b -p 4 -m 8 -o {path}' writes one to begin with"
        why = f"does not exist{hint}" if missing else f"cannot be read: {error.strerror}"
        raise UserError(f"{path} {why}") from None
    return decode(data, str(path))


def decode(data: bytes, source: str) -> str:
    """Bytes as text; ``UserError`` with the place of the first byte that is none."""
    try:
        text = data.decode("utf-8-sig")
        broken = text.find("\0")
    except UnicodeDecodeError as error:
        broken = error.start
    if broken >= 0:
        raise UserError(f"{source} is not text (byte {broken}); a schedule is a CSV file of actions such as 0F0")
    return text


def cells(text: str, source: str = "the CSV") -> Cells:
    """The actions of a CSV and where they stand."""
    rows: Cells = []
    try:
        for number, row in enumerate(csv.reader(io.StringIO(text, newline="")), 1):
            places = enumerate(row, 1)
            rows.append([(column, action) for column, cell in places for action in _cell(cell, source, number, column)])
    except csv.Error as error:
        raise UserError(f"{source}, row {len(rows) + 1} is no row of a CSV file: {error}") from None
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise UserError(f"{source} holds no action; write one row a rank, one cell an action, such as 0F0,0F1,0B0,0B1")
    for number, found in enumerate(rows, 1):
        if not found:
            raise UserError(f"{source}, row {number}: rank {number - 1} does nothing; give every rank a row of actions")
    return rows


def from_cells(rows: Cells, source: str, versions: Versions = Versions.NEWEST) -> Program:
    """The program of these cells: its placement and its number of microbatches follow from them."""
    total = sum(map(len, rows))
    units = 1
    for number, row in enumerate(rows, 1):
        for column, action in row:
            for noun, index in (("stage", action.stage), ("microbatch", action.microbatch)):
                if index >= total:
                    raise UserError(
                        f"{source}, row {number}, column {column}: {action} is of {noun} {index}, but there are only "
                        f"{total} actions; {noun} numbers start at 0 and have no gaps"
                    )
            units = max(units, action.microbatch + 1)
    actions = tuple(tuple(action for _, action in row) for row in rows)
    return Program(actions, _placement(actions, source), units, versions)


def _cell(cell: str, source: str, row: int, column: int) -> Iterator[Action]:
    cell = cell.strip()
    if not cell or _FOREIGN.fullmatch(cell):
        return
    if compound := _COMPOUND.fullmatch(cell):
        for part in compound[1].split(";"):
            yield from _cell(part, source, row, column)
        return
    if reduced := _REDUCE_GRAD.fullmatch(cell):
        cell = f"{reduced[1]}REDUCE"
    try:
        if len(cell) > 40 or _HUGE.search(cell) or not cell.isascii():
            raise ValueError(f"{cell[:40]!r} is not an action such as 0F3, 1SEND_F0 or 2STEP")
        yield parse(cell)
    except ValueError as error:
        raise UserError(f"{source}, row {row}, column {column}: {error}") from None


def _placement(rows: tuple[tuple[Action, ...], ...], source: str) -> Placement:
    """Who holds which stage: the ranks that take its units in turn, or else the one that runs most of it."""
    votes: dict[int, Counter[int]] = defaultdict(Counter)
    units: dict[tuple[int, int], set[int]] = defaultdict(set)
    for rank, row in enumerate(rows):
        for stage, kind, microbatch in row:
            votes[stage][rank] += 1
            if kind not in OF_A_STAGE:
                units[stage, rank].add(microbatch)
    last = max(votes)
    missing = next((stage for stage in range(last) if stage not in votes), None)
    if missing is not None:
        raise UserError(f"{source}: stage {missing} is on no rank, though stage {last} is; is a row missing?")
    ranks_of = []
    for stage in range(len(votes)):
        ranks = sorted(votes[stage], key=lambda rank: min(units[stage, rank], default=0))
        turns = all(
            units[stage, rank] and {microbatch % len(ranks) for microbatch in units[stage, rank]} == {turn}
            for turn, rank in enumerate(ranks)
        )
        ranks_of.append(tuple(ranks) if turns else (votes[stage].most_common(1)[0][0],))
    held = {rank for ranks in ranks_of for rank in ranks}
    idle = next((rank for rank in range(len(rows)) if rank not in held), None)
    if idle is not None:
        raise UserError(
            f"{source}, row {idle + 1}: rank {idle} holds no stage of its own; every rank holds at least one"
        )
    return Placement(tuple(ranks_of))
