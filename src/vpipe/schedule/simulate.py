"""The event loop with a clock: how long a program takes, where it idles, what it holds.

makespan   first start → last end over all ranks
maxspan    the longest single rank's span; reachable only if the optimizer step may be staggered
ideal      the busiest rank's work, without a bubble
bubble     the part of the makespan that the ideal does not fill
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from vpipe.errors import UserError
from vpipe.schedule.action import Action, Kind
from vpipe.schedule.costs import Costs, uniform
from vpipe.schedule.flat import CODE, NONE
from vpipe.schedule.lower import is_lowered, lower
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import WEIGHT_GRADIENT, live_versions, staleness
from vpipe.schedule.timeline import Event, Timeline, Transport, run

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Span:
    """One action on a rank's compute lane."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A timeline and what follows from it."""

    program: Program
    costs: Costs
    timeline: Timeline

    @cached_property
    def spans(self) -> list[list[Span]]:
        """Per rank, what its compute lane did."""
        line = self.timeline
        return [
            [Span(line.flat.action(e), line.begin[e], line.end[e]) for e in line.lanes[rank]]
            for rank in range(self.program.num_ranks)
        ]

    def _lane(self, rank: int) -> list[Event]:
        return self.timeline.lanes[rank]

    @cached_property
    def makespan(self) -> float:
        line = self.timeline
        lanes = [self._lane(rank) for rank in range(self.program.num_ranks) if self._lane(rank)]
        if not lanes:
            return 0.0
        return max(line.end[lane[-1]] for lane in lanes) - min(line.begin[lane[0]] for lane in lanes)

    @cached_property
    def maxspan(self) -> float:
        line = self.timeline
        lanes = (self._lane(rank) for rank in range(self.program.num_ranks))
        return max((line.end[lane[-1]] - line.begin[lane[0]] for lane in lanes if lane), default=0.0)

    @cached_property
    def busy(self) -> list[float]:
        """Per rank, the time its compute lane works."""
        line = self.timeline
        return [sum(line.end[e] - line.begin[e] for e in self._lane(rank)) for rank in range(self.program.num_ranks)]

    @property
    def ideal(self) -> float:
        return max(self.busy, default=0.0)

    @property
    def bubble(self) -> float:
        return 1 - self.ideal / self.makespan if self.makespan else 0.0

    @cached_property
    def weight_versions(self) -> list[int]:
        return live_versions(self.program)

    @cached_property
    def staleness(self) -> list[int]:
        return staleness(self.program)

    def memory(self, rank: int) -> tuple[Array, Array]:
        """Times and the activations held from each on, in the unit of ``StageCosts.activations``.

        A unit's activations live from the start of F to the end of B or W. Between F and R, or between OUT and IN, only
        ``kept`` of them remains. What ends at a time is freed before what starts at that time is allocated.
        """
        flat = self.timeline.flat
        mine = slice(int(flat.row_start[rank]), int(flat.row_start[rank + 1]))
        kind, stage, microbatch = flat.kind[mine], flat.stage[mine], flat.microbatch[mine]
        begin, end = self._begin[mine], self._end[mine]
        whole = np.array([cost.activations for cost in self.costs.stages])[stage]
        part = whole - np.array([cost.kept for cost in self.costs.stages])[stage]
        swapped = flat.find(Kind.OUT, stage, microbatch) != NONE
        recomputed = (flat.find(Kind.R, stage, microbatch) != NONE) & ~swapped
        is_kind = {k: kind == CODE[k] for k in (Kind.F, Kind.R, Kind.OUT, Kind.IN)}
        freed = np.isin(kind, [CODE[k] for k in WEIGHT_GRADIENT])
        changes = [
            (begin, whole, is_kind[Kind.F]),
            (end, -part, is_kind[Kind.F] & recomputed),
            (begin, part, is_kind[Kind.R] & recomputed),
            (end, -part, is_kind[Kind.OUT]),
            (begin, part, is_kind[Kind.IN]),
            (end, -whole, freed),
        ]
        at = np.concatenate([time[chosen] for time, _, chosen in changes])
        change = np.concatenate([amount[chosen] for _, amount, chosen in changes])
        order = np.lexsort((change, np.round(at, 9)))
        return at[order], np.cumsum(change[order])

    @cached_property
    def _begin(self) -> Array:
        return np.array(self.timeline.begin[: len(self.timeline.flat)])

    @cached_property
    def _end(self) -> Array:
        return np.array(self.timeline.end[: len(self.timeline.flat)])

    @cached_property
    def peak_activations(self) -> list[float]:
        held = (self.memory(rank)[1] for rank in range(self.program.num_ranks))
        return [round(float(amounts.max()), 9) if amounts.size else 0.0 for amounts in held]

    def summary(self) -> dict[str, object]:
        """What ``vpipe simulate --json`` prints."""
        return {
            "makespan": _tidy(self.makespan),
            "maxspan": _tidy(self.maxspan),
            "ideal": _tidy(self.ideal),
            "bubble": _tidy(self.bubble),
            "peak_activations": [_tidy(peak) for peak in self.peak_activations],
            "weight_versions": self.weight_versions,
            "staleness": self.staleness,
        }


def simulate(
    program: Program,
    costs: Costs | None = None,
    *,
    transport: Transport = Transport.RENDEZVOUS,
    blocking: bool = False,
) -> Simulation:
    """Time a program; a program that says nothing of communication is lowered first.

    ``blocking`` is the transport of ``naive``: a rank goes on only when its message has arrived.
    """
    costs = costs or uniform(program.placement)
    if len(costs.stages) != program.num_stages:
        raise UserError(f"costs are given for {len(costs.stages)} stages, but the program has {program.num_stages}")
    executable = program if is_lowered(program) else lower(program)
    timeline = run(executable, costs, transport=transport, blocking_sends=blocking)
    if stuck := timeline.stuck:
        heads = ", ".join(str(timeline.flat.action(event)) for event in stuck[:4])
        raise UserError(f"the program deadlocks at {heads}; 'vpipe verify' says why")
    return Simulation(executable, costs, timeline)


def _tidy(number: float) -> float | int:
    """A float without the dust of addition, an integer where it is one."""
    rounded = round(number, 9)
    return int(rounded) if rounded == int(rounded) else rounded
