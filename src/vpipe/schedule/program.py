"""A program: for each rank, the actions it runs, in order.

Everything reads programs: ``verify`` checks them, ``simulate`` times them, ``draw`` paints them, the runtime executes
them, and a measured trace is parsed back into one. A program is a value: frozen, comparable, printable.

Weight versions are not stored. They follow from the order of ``STEP`` actions and from ``Versions``, the rule by which
a unit picks its weights (see ``semantics.versions``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

from vpipe.schedule.action import Action, Kind
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
        row = self.rows[self.placement.ranks_of[0][0]]
        return sum(kind is Kind.STEP and stage == 0 for stage, kind, _ in row)

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
