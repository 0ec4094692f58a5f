"""A schedule with its numbers, and what its program says about every stage and rank.

N units in flight, V weight versions, w units that wait for their weight gradient: none of them is a formula here, all
are counted in the schedule's own program, so a schedule of another package is planned like ours.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from vpipe.errors import UserError
from vpipe.plan.costs import Profile
from vpipe.plan.machine import Machine
from vpipe.plan.memory import Peak, StageFacts
from vpipe.schedule.action import Kind
from vpipe.schedule.authors.authoring import REPLICAS, Chain, Entry
from vpipe.schedule.catalog import get
from vpipe.schedule.communication import communicate
from vpipe.schedule.lower import lower
from vpipe.schedule.program import Program
from vpipe.schedule.replicas import replicate
from vpipe.schedule.semantics import INPUT_GRADIENT, WEIGHT_GRADIENT, live_versions, most_open, units_in_flight

MOST_ACTIONS = 2_000_000
"""Forwards of a program that is still planned: each becomes several actions of a few hundred bytes."""


@dataclass(frozen=True)
class Pipe:
    """``num_ranks`` ranks form a pipeline; ``replicas`` of it run side by side, or, per stage, replicas of each."""

    entry: Entry
    num_ranks: int
    num_microbatches: int
    stages_per_rank: int
    replicas: tuple[int, ...] = ()
    """Of each stage; empty: one. A synchronous schedule has as many of every stage."""

    @classmethod
    def of(
        cls,
        schedule: str,
        num_ranks: int,
        num_microbatches: int,
        stages_per_rank: int | None = None,
        replicas: tuple[int, ...] = (),
    ) -> Pipe:
        entry = get(schedule)
        if entry.two_ways:
            raise UserError(
                f"vpipe plan plans one direction, but in {entry.name} every rank holds stages of both ends; plan "
                "dualpipe-v or 1f1b, or give parallel.partition by hand"
            )
        found = cls(entry, num_ranks, num_microbatches, stages_per_rank or entry.stages_per_rank, replicas)
        if replicas and found.asynchronous and not entry.takes_replicas:
            raise UserError(f"{entry.name} has no replicas; plan pipedream, or a synchronous schedule")
        if len(set(replicas)) > 1 and not found.asynchronous:
            raise UserError(f"{entry.name} has as many replicas of every stage, not {list(replicas)}")
        size = found.num_stages * num_microbatches * found.width
        if size > MOST_ACTIONS:
            raise UserError(
                f"{found.num_stages} stages and {num_microbatches} microbatches are {size} forwards, and a plan "
                f"simulates at most {MOST_ACTIONS}; use fewer microbatches"
            )
        return found

    def __str__(self) -> str:
        copies = f" x {max(self.replicas)}" if self.replicas else ""
        return f"{self.entry.name} p={self.num_ranks}{copies} m={self.num_microbatches}"

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.stages_per_rank

    @property
    def width(self) -> int:
        """Pipelines side by side."""
        return self.replicas[0] if self.replicas and not self.asynchronous else 1

    @property
    def total_ranks(self) -> int:
        return sum(self.replicas) if self.replicas and self.asynchronous else self.num_ranks * self.width

    @property
    def asynchronous(self) -> bool:
        return self.entry.asynchronous

    def charged(self, profile: Profile) -> Profile:
        """The profile as this schedule pays for it: one that updates after every unit has the update in each unit's
        work."""
        if self.entry.chains is not Chain.UNITS:
            return profile
        layers = (replace(x, weight_grad=x.weight_grad + x.update, update=0.0) for x in profile.layers)
        return replace(profile, layers=tuple(layers))

    def batches(self, count: int) -> Program:
        """The program of ``count`` batches without a drain; a synchronous schedule drains after each, so has one."""
        if self.replicas and self.asynchronous:
            placed = {REPLICAS: list(self.replicas)}
            return self.entry.batches(self.total_ranks, self.num_microbatches, count, self.stages_per_rank, **placed)
        program = self.entry.batches(self.num_ranks, self.num_microbatches, count, self.stages_per_rank)
        return replicate(program, self.width) if self.width > 1 else program

    def lowered(self, program: Program, recompute_stages: Collection[int], swap_stages: Collection[int]) -> Program:
        """What ranks run of one of its programs, which is what is predicted: with the agreement before the updates."""
        agrees = not self.asynchronous
        return lower(program, recompute_stages=recompute_stages, swap_stages=swap_stages, agrees=agrees)

    @cached_property
    def num_batches(self) -> int:
        """So many that an asynchronous pipe is in its steady state."""
        return 1 + math.ceil(2 * self.total_ranks / self.num_microbatches) if self.asynchronous else 1

    @cached_property
    def program(self) -> Program:
        return self.batches(self.num_batches)

    @cached_property
    def split(self) -> bool:
        """Whether some backward is divided into I and W."""
        return any(action.kind is Kind.I for _, action in self.program.actions())

    @cached_property
    def units(self) -> tuple[int, ...]:
        """Per stage, the units of one step that the busiest of its ranks runs."""
        if self.asynchronous:
            ranks = self.replicas or (1,) * self.num_stages
            return tuple(math.ceil(self.num_microbatches / r) for r in ranks)
        return (self.num_microbatches,) * self.num_stages

    @cached_property
    def peaks(self) -> tuple[tuple[Peak, ...], ...]:
        """Per rank, the moments at which it holds most: none is below another in every stage."""
        return tuple(_peaks(self.program, rank) for rank in range(self.program.num_ranks))

    @cached_property
    def messages(self) -> tuple[tuple[int, int], ...]:
        """Per stage, the inputs and the gradients that a backward finds room made for, at most."""
        lowered = communicate(self.program)
        found = [(0, 0)] * self.num_stages
        for row in lowered.rows:
            posted: Counter[tuple[int, Kind]] = Counter()
            for stage, kind, _ in row:
                if kind in (Kind.RECV_F, Kind.RECV_B):
                    posted[stage, kind] += 1
                elif kind is Kind.F:
                    posted[stage, Kind.RECV_F] -= 1
                elif kind in INPUT_GRADIENT:
                    here = posted[stage, Kind.RECV_F], posted[stage, Kind.RECV_B]
                    found[stage] = max(found[stage][0], here[0]), max(found[stage][1], here[1])
                    posted[stage, Kind.RECV_B] -= 1
        return tuple((max(1, inputs), max(1, gradients)) for inputs, gradients in found)


def _peaks(program: Program, rank: int) -> tuple[Peak, ...]:
    held = dict.fromkeys(program.placement.stages_of[rank], 0)
    seen: set[Peak] = set()
    for stage, kind, _ in program.rows[rank]:
        if kind is Kind.F:
            held[stage] += 1
            seen.add(tuple(held.items()))
        elif kind in WEIGHT_GRADIENT:
            held[stage] -= 1
    most: list[Peak] = []
    for peak in sorted(seen, key=lambda each: -sum(units for _, units in each)):
        if not any(all(n <= o for (_, n), (_, o) in zip(peak, other, strict=True)) for other in most):
            most.append(peak)
    return tuple(most)


def stage_facts(
    program: Program, machine: Machine, share: float = 1.0, messages: Sequence[tuple[int, int]] = ()
) -> list[StageFacts]:
    """What the schedule and the ranks say about each stage; a stage may use ``share`` of its rank's memory.
    ``messages`` are those of ``Pipe``, where a device makes room for them."""
    facts = []
    versions = live_versions(program)
    deferred = most_open(program, (Kind.I,), (Kind.W,))
    for stage, units in enumerate(units_in_flight(program)):
        ranks = program.placement.ranks_of[stage]
        memory = min(machine.memory[rank] for rank in ranks) * share
        inputs, gradients = messages[stage] if messages else (1, 1)
        waiting = deferred[stage]
        facts.append(StageFacts(units, versions[stage], memory, max(1, waiting), waiting, inputs, gradients))
    return facts
