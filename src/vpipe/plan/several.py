"""Several stages per rank: balance the ranks, not the stages.

With a loop or a V placement a rank's time is the sum of its stages, and a unit waits for the longest stage on its way
through. The exact search knows nothing of that; it gives a start, and from there layers are handed along the chain as
long as ``m · slowest rank + (p-1) · slowest stage`` falls. A heuristic: the simulation judges it, and plans of such
schedules are never called exact.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from vpipe.plan.cuts import Cutter
from vpipe.plan.partition import Partition
from vpipe.schedule.placement import Placement

_ALL_RUNS = 24
"""Up to so many stages every run of cuts is tried, beyond only single cuts."""

Score = tuple[float, float]


def balance_ranks(cutter: Cutter, placement: Placement, num_microbatches: int, start: Partition) -> Partition:
    """The partition after moving cuts while that makes the ranks faster, or the stages more alike."""
    cuts = list(start.cuts)
    score = _score(cutter, placement, num_microbatches, cuts)
    while True:
        tried = [(_score(cutter, placement, num_microbatches, moved), moved) for moved in _moves(cuts)]
        best, moved = min(tried, default=(score, cuts))
        if not _better(best, score):
            break
        cuts, score = moved, best
    packings = [cutter.packing(s, a, b) for s, (a, b) in enumerate(pairwise(cuts))]
    good = [packing for packing in packings if packing is not None]
    times = tuple(packing.time for packing in good)
    return replace(start, cuts=tuple(cuts), choices=tuple(p.choices for p in good), times=times, cycle=max(times))


def _moves(cuts: list[int]) -> list[list[int]]:
    """Every run of inner cuts shifted by one layer, where all stages keep at least one."""
    inner = len(cuts) - 1
    found = []
    for first in range(1, inner):
        for last in range(first, inner if inner <= _ALL_RUNS else first + 1):
            for by in (-1, 1):
                moved = [cut + by if first <= i <= last else cut for i, cut in enumerate(cuts)]
                if all(a < b for a, b in pairwise(moved)):
                    found.append(moved)
    return found


def _score(cutter: Cutter, placement: Placement, num_microbatches: int, cuts: list[int]) -> Score:
    """About the step time, then how unlike the stages are."""
    times = []
    for stage, (start, stop) in enumerate(pairwise(cuts)):
        packing = cutter.packing(stage, start, stop)
        if packing is None:
            return math.inf, math.inf
        times.append(packing.time)
    ranks = [sum(times[stage] for stage in stages) for stages in placement.stages_of]
    step = num_microbatches * max(ranks) + (placement.num_ranks - 1) * max(times)
    return step, sum(time * time for time in times)


def _better(new: Score, old: Score) -> bool:
    slack = 1e-9 * old[0]
    return new[0] < old[0] - slack or (new[0] <= old[0] + slack and new[1] < old[1] * (1 - 1e-9))
