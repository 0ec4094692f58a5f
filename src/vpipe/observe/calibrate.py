"""The simulation that a run should have been: measured medians as costs.

Medians, because a step on a shared machine has outliers. What a stage's F, B, I, W, R, REDUCE and STEP took is their
work alone, without waiting; the latency is what passed between the end of the action that made a message and the start
of the one that was already waiting for it; the overhead is what a rank spent beside work and waiting, per action.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from statistics import median

from vpipe.observe.measured import Measured, computes
from vpipe.schedule.action import Action, Kind
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import PRICE
from vpipe.schedule.timeline import Costs, StageCosts

NS = 1e-9
Medians = dict[tuple[int, Kind], float]


def calibrate(steps: Sequence[Measured]) -> Costs:
    """Costs in seconds from measured steps; the first step is left out where there are others."""
    steps = steps[1:] if len(steps) > 2 else steps
    program = steps[-1].program
    medians = _medians(steps)
    return Costs(
        tuple(_stage(medians, stage, program) for stage in range(program.num_stages)),
        latency=_latency(steps),
        overhead=_overhead(steps),
    )


def _medians(steps: Sequence[Measured]) -> Medians:
    taken: dict[tuple[int, Kind], list[int]] = defaultdict(list)
    for step in steps:
        computed = (event for row in step.ranks for event in row if computes(event))
        swapped = (event for lane in step.swaps for event in lane)
        for event in chain(computed, swapped):
            taken[event.action.stage, event.action.kind].append(event.work)
    return {place: median(times) * NS for place, times in taken.items()}


def _stage(medians: Medians, stage: int, program: Program) -> StageCosts:
    """``B`` is priced as I + W: measured as such where the program has them, else half and half."""

    def of(kind: Kind) -> float:
        return medians.get((stage, kind), 0.0)

    parts = {part: max(map(of, kinds)) for part, kinds in _ALONE.items()}
    if (stage, Kind.I) not in medians:
        parts["input_grad"] = parts["weight_grad"] = of(Kind.B) / 2
    parts["step"] += of(Kind.AGREE)  # an agreement is the first part of a rank's first update
    return StageCosts(**parts)


_ALONE = {price[0]: [kind for kind in Kind if PRICE[kind] == price] for price in PRICE.values() if len(price) == 1}
"""Time of a stage → the kinds that take it and no other."""


def _latency(steps: Sequence[Measured]) -> float:
    """Seconds of the messages that were awaited when they were made."""
    taken = []
    for step in steps:
        ends: dict[Action, int] = {event.action: event.end for row in step.ranks for event in row}
        for row in step.ranks:
            for event in row:
                made = [ends[each] for each in step.producers.get(event.action, ())]
                if made and max(made) > event.begin and event.ready >= max(made):
                    taken.append(max(0, event.ready - event.late - max(made)))
    return median(taken) * NS if taken else 0.0


def _overhead(steps: Sequence[Measured]) -> float:
    """Time between actions, and for posting messages, per compute action."""
    taken = []
    for step in steps:
        for row in step.ranks:
            actions = sum(map(computes, row))
            if not actions:
                continue
            inside = sum(event.end - event.begin for event in row if computes(event))
            taken.append((row[-1].end - row[0].begin - inside) / actions)
    return median(taken) * NS if taken else 0.0
