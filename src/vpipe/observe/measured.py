"""One step of all ranks on one clock: what the page draws, the trace exports and the bubbles are computed from.

A simulated timeline takes the same form, so that both are drawn and explained by the same code. Times are whole
nanoseconds, which is why sums of parts are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import sha256

from vpipe.rundir.reader import Event, Step
from vpipe.schedule.action import Action
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import LANE, NEEDS, Lane, Where
from vpipe.schedule.simulate import Simulation

_text = lru_cache(maxsize=100_000)(str)
"""Steps repeat the same actions."""


@dataclass(frozen=True, eq=False)
class Measured:
    """``ranks[rank]`` lists what the rank did, in order, in nanoseconds after ``begin`` = 0.

    A step is itself and equals no other: what is computed from it is remembered for it.
    """

    planned: Program
    ranks: tuple[tuple[Event, ...], ...]
    step: int = 0
    iteration: int = 0
    lead: int = 0
    """How long before the step's first action the step before had ended on all ranks; 0 where that is not known."""
    memory: Sequence[Mapping[str, int]] = field(default_factory=tuple)
    swaps: tuple[tuple[Event, ...], ...] = ()
    """Per rank, what its swap lane did beside the row; empty where no rank swaps."""
    time: float = 0.0
    """Seconds of the epoch when the last rank had written it down; 0 where that is not known."""

    @cached_property
    def program(self) -> Program:
        """The executed program. An asynchronous run may chain more units between two drains than its plan shows."""
        rows = tuple(tuple(event.action for event in row) for row in self.ranks)
        units = 1 + max((action.microbatch for row in rows for action in row), default=0)
        return replace(self.planned, rows=rows, num_microbatches=units)

    @cached_property
    def key(self) -> str:
        """The same for steps that executed the same program."""
        text = "\n".join(" ".join(map(_text, row)) for row in self.program.rows)
        return sha256(text.encode()).hexdigest()[:12]

    @cached_property
    def producers(self) -> dict[Action, list[Action]]:
        """Action → the executed actions of other ranks whose messages it needs."""
        known = {event.action for row in self.ranks for event in row}
        return {
            action: [each for each in producers(self.program, action) if each in known]
            for action in known
            if LANE[action.kind] is Lane.COMPUTE
        }

    @cached_property
    def span(self) -> int:
        """First begin to last end."""
        return max((row[-1].end for row in self.ranks if row), default=0)

    @cached_property
    def took(self) -> int:
        """First work to last end: a rank that waits for the first unit has not begun it."""
        return self.span - min((event.ready for row in self.ranks for event in row if computes(event)), default=0)

    @cached_property
    def busy(self) -> list[int]:
        """Per rank, the time its compute actions ran once they had what they needed."""
        return [sum(event.work for event in row if computes(event)) for row in self.ranks]


def producers(program: Program, action: Action) -> Iterator[Action]:
    """The actions of other ranks whose messages ``action`` needs."""
    stage, kind, microbatch = action
    if microbatch < 0:
        return
    here = program.placement.rank(stage, microbatch)
    for need in NEEDS[kind]:
        if need.where is Where.HERE:
            continue
        stages = (program.writers if need.where is Where.WRITERS else program.readers)[stage]
        for other in stages:
            if program.placement.rank(other, microbatch) != here:
                for each in need.kinds:
                    yield Action(other, each, microbatch)


def computes(event: Event) -> bool:
    return LANE[event.action.kind] is Lane.COMPUTE


def join(planned: Program, steps: Sequence[Step]) -> Measured:
    """The records of all ranks for one step."""
    origin = min(step.origin_ns for step in steps)

    def shifted(events: Sequence[Event], by: int) -> tuple[Event, ...]:
        return tuple(e._replace(begin=e.begin + by, ready=e.ready + by, end=e.end + by) for e in events)

    ranks = tuple(shifted(step.events, step.origin_ns - origin) for step in steps)
    swaps = tuple(shifted(step.swaps, step.origin_ns - origin) for step in steps)
    before = [step.before_ns for step in steps if step.before_ns is not None]
    lead = max(0, origin - max(before)) if len(before) == len(steps) else 0
    memory, ended = [step.memory for step in steps], max(step.time for step in steps)
    return Measured(planned, ranks, steps[0].step, steps[0].iteration, lead, memory, swaps, ended)


def from_simulation(simulation: Simulation, scale: float = 1e9) -> Measured:
    """A simulated timeline in the form of a measured one; ``scale`` is nanoseconds per unit of its time.

    An action begins when its lane is free and is ready when the simulation starts it. The runtime's overhead, which the
    simulation adds to the action, stands before it here: it is no work.
    """
    line, program = simulation.timeline, simulation.program
    origin = min((line.begin[lane[0]] for lane in line.lanes[: program.num_ranks] if lane), default=0.0)
    overhead = round(simulation.costs.overhead * scale)

    def at(time: float) -> int:
        return round((time - origin) * scale)

    ranks = []
    for rank in range(program.num_ranks):
        free = 0
        row = []
        for event in line.lanes[rank]:
            end = at(line.end[event])
            ready = min(at(line.begin[event]) + overhead, end)
            row.append(Event(line.flat.action(event), min(free + overhead, ready), ready, end))
            free = end
        ranks.append(tuple(row))
    swaps = tuple(
        tuple(
            Event(line.flat.action(event), at(line.begin[event]), at(line.begin[event]), at(line.end[event]))
            for event in lane
        )
        for lane in line.lanes[program.num_ranks : 2 * program.num_ranks]
    )
    return Measured(program, tuple(ranks), swaps=swaps)
