"""Which schedule a pipeline runs: a name, a number of ranks, and what follows from the two.

A schedule is chosen in several places (a config, ``Pipeline``, a test before any rank starts); what its program, its
placement and its traits are, all of them ask here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from vpipe.errors import UserError
from vpipe.schedule import catalog
from vpipe.schedule.entry import BATCHES, Chain, Entry
from vpipe.schedule.placement import Placement
from vpipe.schedule.program import Program
from vpipe.schedule.replicas import replicate
from vpipe.schedule.semantics import agrees_after


@dataclass(frozen=True)
class ScheduleSpec:
    """What the user chose."""

    schedule: str | Program
    num_ranks: int
    num_microbatches: int
    stages_per_rank: int | None = None
    replicas: int | Sequence[int] = 1
    options: Mapping[str, Any] | None = None
    entry: Entry = field(init=False, compare=False, repr=False)
    """The catalogue's entry, or that of the user's own program: whoever asks for a trait asks it."""
    synchronous: bool = field(init=False, compare=False, repr=False)
    """Whether every unit of a step reads the same weights and each stage updates once at the end."""
    chains: Chain = field(init=False, compare=False, repr=False)
    """How several batches run without a drain between them."""

    def __post_init__(self) -> None:
        entry = catalog.find(self.schedule)
        traits = {
            "entry": entry,
            "synchronous": not entry.asynchronous,
            "chains": entry.chains_with(self.options or {}),
        }
        for name, value in traits.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of_run(
        cls,
        name: str,
        num_ranks: int,
        num_microbatches: int,
        stages_per_rank: int | None,
        replicas: int | Sequence[int],
        options: Mapping[str, Any],
        num_readers: int,
    ) -> ScheduleSpec:
        """The choice of a run whose ``num_readers`` replicas read ``num_microbatches`` units each: where units of
        several updates are in flight together those of all are counted, and a chain of batches begins as one."""
        entry = catalog.get(name)
        entry.check_options(options)
        units = num_microbatches * (num_readers if entry.chains is Chain.UNITS else 1)
        if entry.chains_with(options) is Chain.BATCHES:
            options = {**options, BATCHES: 1}
        return cls(name, num_ranks, units, stages_per_rank, replicas, options)

    @cached_property
    def program(self) -> Program:
        """The author's program: only F, B, I, W and STEP (or whatever a program of the user's own says)."""
        options = dict(self.options or {})
        replicas = self._replicas()
        ranks, copies = self.num_ranks, 1
        if replicas is not None and "replicas" in self.entry.options:
            options["replicas"] = replicas
        elif replicas is not None:
            if len(set(replicas)) > 1:
                raise UserError(
                    f"{self.entry.name} has the same number of replicas on every stage, not {list(replicas)}; "
                    f"give one number, or use pipedream"
                )
            ranks, copies = len(replicas), replicas[0]
        program = self.entry.build(ranks, self.num_microbatches, self.stages_per_rank, **options)
        return replicate(program, copies) if copies > 1 else program

    def _replicas(self) -> tuple[int, ...] | None:
        """Replicas per rank of one pipeline; ``None`` where nothing is replicated."""
        if self.replicas == 1:
            return None
        if not isinstance(self.replicas, int):
            replicas = tuple(self.replicas)
            if sum(replicas) != self.num_ranks:
                raise UserError(
                    f"replicas {list(replicas)} need {sum(replicas)} ranks, but there are {self.num_ranks}; "
                    "make the sum equal"
                )
            return None if set(replicas) == {1} else replicas
        if self.replicas < 1 or self.num_ranks % self.replicas:
            raise UserError(
                f"{self.num_ranks} ranks cannot hold {self.replicas} replicas of every stage; the number must divide"
            )
        return (self.replicas,) * (self.num_ranks // self.replicas)

    @property
    def placement(self) -> Placement:
        return self.program.placement

    @cached_property
    def agrees_after(self) -> bool:
        """Whether ranks update first and agree on it afterwards."""
        return agrees_after(self.program)

    def describe(self) -> str:
        return f"{self.entry.name} on {self.num_ranks} ranks"
