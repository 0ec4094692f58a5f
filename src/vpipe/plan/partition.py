"""Where to cut: the partition whose pipeline is fastest, with a bound that proves it.

A pipeline of stages with times t_s needs ``fill · (Σ t_s + Σ transfers) + rounds · max t_s``: a unit passes all stages
once, and every further unit waits for the slowest. Without the maximum this is a shortest path (``cuts``), so the
search branches over the maximum:

    cycle time   T_lo ───────────────── M ─────────── T_hi
                      still open          closed by the path found with stages ≤ T_hi, whose slowest takes M

What is open is halved; a half ``(T_lo, T_hi]`` is bounded by ``fill · path(T_hi) + rounds · T_lo`` and dropped when
that reaches the best value known. Every number that is not exact here is a lower bound, so whatever is left open when
the effort ends is the gap.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vpipe.plan.bounds import Options
from vpipe.plan.costs import Profile
from vpipe.plan.cuts import Cells, Cutter
from vpipe.plan.memory import Choice, StageFacts
from vpipe.plan.shortfall import Shortfall, shortfall

TOLERANCE = 1e-9
"""Values closer than this are equal: the sums of thousands of floats are no better."""
EFFORT = 500_000
"""About a second."""
_MAX_CELLS = 3_000_000
_FIRST_TOP = 1.05
_PATH_WORK = 20


@dataclass(frozen=True)
class Objective:
    """``fill · (Σ t_s + Σ transfers) + rounds · max(t_s, links)``."""

    fill: float
    rounds: float


@dataclass(frozen=True)
class Partition:
    """Stage s holds layers ``cuts[s] .. cuts[s+1]-1``. ``bound`` is a lower bound of every partition's ``value``."""

    cuts: tuple[int, ...]
    choices: tuple[tuple[Choice, ...], ...]
    times: tuple[float, ...]
    cycle: float
    value: float
    bound: float = 0.0

    @property
    def gap(self) -> float:
        return max(0.0, 1.0 - self.bound / self.value) if self.value > 0 else 0.0

    @property
    def exact(self) -> bool:
        return self.gap <= 2 * TOLERANCE


def best_partition(
    profile: Profile,
    stages: Sequence[StageFacts],
    objective: Objective,
    options: Options | None = None,
    *,
    effort: int = EFFORT,
) -> Partition | Shortfall:
    """The fastest partition into ``len(stages)`` stages, or by how much memory is short.

    ``effort`` counts layers priced and partial choices extended: a count, not a time, so that every machine finds the
    same plan.
    """
    options = options or Options()
    return _Search(Cutter(profile, stages, options), objective, effort).run() or shortfall(profile, stages, options)


class _Search:
    def __init__(self, cutter: Cutter, objective: Objective, effort: int) -> None:
        self.cutter, self.fill, self.rounds, self.effort = cutter, objective.fill, objective.rounds, effort
        self.best: Partition | None = None
        self.left = float("inf")
        """The least bound of what was left open."""

    def run(self) -> Partition | None:
        low, limit, floor = self.cutter.least_cycle(), self.cutter.longest(), self.cutter.least_sum()
        top = min(limit, low * _FIRST_TOP)
        while True:
            cells = self.cutter.cells(top)
            if cells is not None:
                self._close(cells, self.fill * floor, low, top)
            if top >= limit:
                break
            above = self.fill * floor + self.rounds * top
            if self.best is not None and above >= self.best.value * (1 - TOLERANCE):
                break
            low = top
            if self.best is None:
                if not self.cutter.fits():
                    return None
                top = min(limit, top * 1.5)
            else:
                needed = (self.best.value - self.fill * floor) / self.rounds if self.rounds else limit
                top = min(limit, needed * (1 + TOLERANCE))
                if self.cutter.num_cells(top) > _MAX_CELLS:
                    self.left = min(self.left, above)
                    break
        return self.best and replace(self.best, bound=min(self.left, self.best.value))

    def _spent(self) -> bool:
        return self.cutter.work >= self.effort

    def _close(self, cells: list[Cells], least: float, low: float, high: float) -> None:
        """Closes all cycle times in ``(low, high]``, or adds what stays open to ``left``."""
        open_ranges = [(least + self.rounds * low, low, high)]
        while open_ranges:
            bound, low, high = heapq.heappop(open_ranges)
            if self._beaten(bound):
                return
            found = self.cutter.path(cells, high)
            if found is None:
                continue
            total, cuts = found
            bound = max(bound, self.fill * total + self.rounds * low)
            if self._beaten(bound):
                continue
            if self.best is not None and self._spent():
                self.left = min(self.left, bound)
                continue
            self.cutter.work += _PATH_WORK * len(cells)
            new, slowest = self.cutter.refine(cells, cuts, exactly=False)
            if not new or self.best is None:
                new, slowest = self.cutter.refine(cells, cuts, exactly=True)
                self._offer(cuts)
            if not new and not self._beaten(self.fill * total + self.rounds * slowest):
                new = self.cutter.harden(cells, cuts)
                self._offer(cuts)
            if not new:
                # All stages of the path are solved: nothing between its slowest stage and ``high`` can beat it.
                solved = self.fill * total + self.rounds * slowest
                if not self._beaten(solved):
                    self.left = min(self.left, solved)
                high = slowest * (1 - 1e-12)
            if high <= low:
                continue
            if not new or self._wide(bound, low, high):
                middle = (low + high) / 2
                heapq.heappush(open_ranges, (self.fill * total + self.rounds * middle, middle, high))
                high = middle
            heapq.heappush(open_ranges, (bound, low, high))

    def _wide(self, bound: float, low: float, high: float) -> bool:
        """Whether a range is open because of its width rather than because its stages are not solved yet."""
        return self.best is not None and self.rounds * (high - low) > 0.25 * (self.best.value - bound)

    def _beaten(self, bound: float) -> bool:
        return self.best is not None and bound >= self.best.value * (1 - TOLERANCE)

    def _offer(self, cuts: list[int]) -> None:
        """Takes the path as the best partition if all its stages fit and it is faster."""
        cutter = self.cutter
        packings = [cutter.packing(stage, cuts[stage], cuts[stage + 1]) for stage in range(cutter.num_stages)]
        good = [packing for packing in packings if packing is not None]
        if len(good) < len(packings):
            return
        times = tuple(packing.time for packing in good)
        inner = np.array(cuts[1:-1], dtype=np.int64)
        cycle = max(*times, float(cutter.links[inner].max(initial=0.0)), 0.0)
        value = self.fill * (sum(times) + float(cutter.fills[inner].sum())) + self.rounds * cycle
        if self.best is None or value < self.best.value:
            self.best = Partition(tuple(cuts), tuple(packing.choices for packing in good), times, cycle, value)
