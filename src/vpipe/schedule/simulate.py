"""A program with a clock: how long a program takes, where it idles, what it holds.

makespan   first start → last end over all ranks
maxspan    the longest single rank's span; reachable only if the optimizer step may be staggered
ideal      the busiest rank's work
bubble     the idle share over all ranks: 1 - (work of all ranks) / (ranks x makespan); a slow stage makes it larger

Words: docs/glossary.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from vpipe.errors import UserError
from vpipe.schedule.action import Action, Kind
from vpipe.schedule.flat import CODE, NONE, Bools, collector_paused
from vpipe.schedule.lower import is_lowered, lower
from vpipe.schedule.program import Program, Versions
from vpipe.schedule.semantics import Lane, live_versions, staleness, updates_once
from vpipe.schedule.timeline import Costs, Timeline, run, uniform

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
        action = line.flat.action
        return [
            [Span(action(e), line.begin[e], line.end[e]) for e in lane if self._computes[e]]
            for lane in line.lanes[: self.program.num_ranks]
        ]

    @cached_property
    def _computes(self) -> Bools:
        """Which actions are work: not those that wait for a message to go."""
        return self.timeline.flat.on(Lane.COMPUTE)

    @cached_property
    def _ends(self) -> list[tuple[float, float]]:
        """Per rank that does anything, its first start and its last end."""
        line = self.timeline
        lanes = line.lanes[: self.program.num_ranks]
        return [(float(line.begins[lane[0]]), float(line.ends[lane[-1]])) for lane in lanes if lane]

    @cached_property
    def makespan(self) -> float:
        return max((end for _, end in self._ends), default=0.0) - min((begin for begin, _ in self._ends), default=0.0)

    @property
    def maxspan(self) -> float:
        return max((end - begin for begin, end in self._ends), default=0.0)

    @cached_property
    def busy(self) -> list[float]:
        """Per rank, the time its compute lane works; the runtime's overhead is no work."""
        took = np.where(self._computes, self.timeline.ends[:-1] - self.timeline.begins[:-1] - self.costs.overhead, 0.0)
        busy: list[float] = np.bincount(self.timeline.flat.rank, took, self.program.num_ranks).tolist()
        return busy

    @property
    def ideal(self) -> float:
        return max(self.busy, default=0.0)

    @property
    def utilisation(self) -> list[float]:
        """Per rank, the share of the makespan that it works."""
        return [busy / self.makespan if self.makespan else 0.0 for busy in self.busy]

    @property
    def bubble(self) -> float:
        """The idle share over all ranks."""
        return bubble(sum(self.busy), self.program.num_ranks, self.makespan)

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
        begin, end = self.timeline.begins[mine], self.timeline.ends[mine]
        whole, kept = np.array([(cost.activations, cost.kept) for cost in self.costs.stages]).T[:, stage]
        part = whole - kept
        forward = kind == CODE[Kind.F]
        freed = (kind == CODE[Kind.B]) | (kind == CODE[Kind.W])
        changes = [(begin, whole, forward), (end, -whole, freed)]
        if flat.kinds & {Kind.R, Kind.OUT}:
            swapped = flat.find(Kind.OUT, stage, microbatch) != NONE
            recomputed = (flat.find(Kind.R, stage, microbatch) != NONE) & ~swapped
            changes += [
                (end, -part, forward & recomputed),
                (begin, part, (kind == CODE[Kind.R]) & recomputed),
                (end, -part, kind == CODE[Kind.OUT]),
                (begin, part, kind == CODE[Kind.IN]),
            ]
        at = np.concatenate([time[chosen] for time, _, chosen in changes])
        change = np.concatenate([amount[chosen] for _, amount, chosen in changes])
        order = np.lexsort((change, np.round(at, 9)))
        return at[order], np.cumsum(change[order])

    @cached_property
    def peak_activations(self) -> list[float]:
        held = (self.memory(rank)[1] for rank in range(self.program.num_ranks))
        return [round(float(amounts.max()), 9) if amounts.size else 0.0 for amounts in held]

    @collector_paused()
    def summary(self) -> dict[str, object]:
        """What ``vpipe simulate --json`` prints."""
        return {
            "makespan": _tidy(self.makespan),
            "maxspan": _tidy(self.maxspan),
            "ideal": _tidy(self.ideal),
            "bubble": _tidy(self.bubble),
            "utilisation": [_tidy(share) for share in self.utilisation],
            "peak_activations": [_tidy(peak) for peak in self.peak_activations],
            "weight_versions": self.weight_versions,
            "staleness": self.staleness,
        }


def bubble(work: float, num_ranks: int, time: float) -> float:
    """The idle share of ``num_ranks`` ranks that did ``work`` in ``time``: the only definition."""
    return max(0.0, 1 - work / (num_ranks * time)) if time else 0.0


@collector_paused()
def simulate(program: Program, costs: Costs | None = None, *, blocking: bool = False) -> Simulation:
    """Time a program; a program that says nothing of communication is lowered first. Where updates take time, ranks
    of a synchronous one agree before the first of them, as they do when they run it.

    ``blocking`` is the transport of ``naive``: a rank goes on only when its message has arrived.
    """
    costs = costs or uniform(program.placement)
    if len(costs.stages) != program.num_stages:
        raise UserError(f"costs are given for {len(costs.stages)} stages, but the program has {program.num_stages}")
    executable = program if is_lowered(program) else lower(program, agrees=_agrees(program, costs))
    timeline = run(executable, costs, blocking_sends=blocking)
    if stuck := timeline.stuck:
        heads = ", ".join(str(timeline.flat.action(event)) for event in stuck[:4])
        raise UserError(f"the program deadlocks at {heads}; 'vpipe verify' says why")
    return Simulation(executable, costs, timeline)


def _agrees(program: Program, costs: Costs) -> bool:
    """An agreement delays nothing but updates: where these take no time it is left out, and a rank's span ends with its
    own work, which is the papers' ``maxspan``."""
    paid = any(cost.step for cost in costs.stages)
    return paid and program.versions is Versions.NEWEST and updates_once(program)


def _tidy(number: float) -> float | int:
    """A float without the dust of addition, an integer where it is one."""
    rounded = round(number, 9)
    return int(rounded) if rounded == int(rounded) else rounded
