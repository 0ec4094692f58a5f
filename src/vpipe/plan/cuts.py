"""The cuts of a partition, as a shortest path over stages that are solved only when needed.

At a cycle time T, bounds that only grow with a stage say how far s stages can reach from the left, and how far the
remaining ones reach back from the right. Cut s lies between the two: a narrow window where T is close to the best.

    layers   0 ─────────────────────────────── L
    cut 1        [────]                             reached by one stage … needed by the other three
    cut 2               [─────]
    cut 3                       [───]

Inside the windows a shortest path runs over *lower bounds* of stages (``bounds``). Only the stages on the path are
priced, and when all of them are, solved exactly (``knapsack``); each time the path is asked again, until it consists
of solved stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vpipe.plan.bounds import Floats, Ints, Options, StageBounds, range_table
from vpipe.plan.costs import Profile
from vpipe.plan.knapsack import LABEL_LIMIT, Knapsack, Packing
from vpipe.plan.memory import StageFacts
from vpipe.plan.shortfall import shortfall

_INFINITE = float("inf")
_SLACK = 1e-9
_SHY = 1e-10
_EVEN = 1e-10
_CALL_WORK = 50

Key = tuple[int, int, int]
"""A stage: which facts, first layer, layer after the last."""
_HARDENINGS = 2
"""How often a stage that was left with a gap is solved again, each time with ten times the labels."""


@dataclass
class Cells:
    """The candidate stages of one position: row = where it stops, column = how many layers it has."""

    first_start: int
    first_stop: int
    fewest: int
    start: Ints
    times: Floats
    priced: NDArray[np.bool_]
    """Whether the time is the stage's own bound, or better."""
    solved: NDArray[np.bool_]
    """Whether the time is the stage's, or as close to it as the labels allowed."""
    links: Floats
    fills: Floats


class Cutter:
    """The partitions of a profile into stages with given facts."""

    def __init__(
        self,
        profile: Profile,
        stages: Sequence[StageFacts],
        options: Options,
    ) -> None:
        if len(stages) > profile.num_layers:
            raise ValueError(f"{len(stages)} stages for {profile.num_layers} layers")
        self.profile, self.options = profile, options
        self.num_layers, self.num_stages = profile.num_layers, len(stages)
        self.work = 0
        self._hardened: dict[Key, int] = {}
        ranges = range_table(profile)
        shared: dict[tuple[StageFacts, bool, bool], StageBounds] = {}
        self.stages: list[StageBounds] = []
        for index, facts in enumerate(stages):
            ends = index == 0, index == len(stages) - 1
            if (facts, *ends) not in shared:
                shared[facts, *ends] = StageBounds(profile, facts, options, ranges, first=ends[0], last=ends[1])
            self.stages.append(shared[facts, *ends])
        inner = range(1, self.num_layers)
        self.links = np.array([0.0, *(profile.link_time(cut) for cut in inner), 0.0])
        self.fills = np.array([0.0, *(profile.fill_time(cut) for cut in inner), 0.0])
        self._knapsacks: dict[Key, Knapsack] = {}
        self._bounds: dict[Key, float] = {}
        self._prices: dict[int, float] = {}
        self._packings: dict[Key, Packing | None] = {}

    # ── stages ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def bound(self, stage: int, start: int, stop: int) -> float:
        """The stage's own lower bound, with the inputs of its segments: much closer than ``StageBounds``, once."""
        key = id(self.stages[stage]), start, stop
        if key not in self._bounds:
            hint = self._prices.get(key[0], 0.0)
            knapsack = self._knapsacks[key] = self.stages[stage].knapsack(start, stop, hint)
            self._bounds[key] = knapsack.bound()
            self._prices[key[0]] = knapsack.price or hint
            self.work += knapsack.work + _CALL_WORK
        return self._bounds[key]

    def packing(self, stage: int, start: int, stop: int) -> Packing | None:
        """The stage solved, once."""
        key = id(self.stages[stage]), start, stop
        if key not in self._packings:
            self.bound(stage, start, stop)
            self._keep(key, self._solve(key, LABEL_LIMIT))
        return self._packings[key]

    def _keep(self, key: Key, packing: Packing | None) -> None:
        self._packings[key] = packing
        self._bounds[key] = _INFINITE if packing is None else packing.bound

    def _solve(self, key: Key, label_limit: int) -> Packing | None:
        knapsack = self._knapsacks[key]
        before = knapsack.work
        packing = knapsack.solve(label_limit)
        self.work += knapsack.work - before + _CALL_WORK
        return packing

    def harden(self, cells: list[Cells], cuts: list[int]) -> bool:
        """Solves those stages of a path that were left with a gap again, with more labels; whether that helped."""
        helped = False
        for index in range(self.num_stages):
            start, stop = cuts[index], cuts[index + 1]
            key = id(self.stages[index]), start, stop
            before = self._packings.get(key)
            level = self._hardened.get(key, 0) + 1
            if before is None or before.exact or level > _HARDENINGS:
                continue
            self._hardened[key] = level
            packing = self._solve(key, LABEL_LIMIT * 10**level)
            if packing is not None:
                self._keep(key, replace(packing, bound=max(packing.bound, before.bound)))
                helped = True
                self._spread(cells, index, start, stop, solved=True)
        return helped

    def _spread(self, cells: list[Cells], index: int, start: int, stop: int, *, solved: bool) -> None:
        """Writes what is known of a stage to every position whose facts are the same."""
        bound = self._bounds[id(self.stages[index]), start, stop]
        for cell, stage in zip(cells, self.stages, strict=True):
            if stage is self.stages[index]:
                self._write(cell, start, stop, bound, solved=solved)

    def windows(self, time: float) -> list[tuple[int, int]] | None:
        """Where each cut may lie if no stage takes longer than ``time``; ``None`` where there is no partition."""
        layers, count = self.num_layers, self.num_stages
        high = [0]
        for index, stage in enumerate(self.stages):
            # A stage that fits no layer here may fit one further left, so it does not end the walk.
            high.append(min(max(stage.furthest(high[-1], time), high[-1]), layers - (count - 1 - index)))
        if high[-1] < layers:
            return None
        low = [layers]
        for index in reversed(range(count)):
            low.append(max(self.stages[index].earliest(low[-1], time), index))
        low.reverse()
        low[0] = 0
        windows = list(zip(low, high, strict=True))
        return windows if all(a <= b for a, b in windows) else None

    def least_cycle(self) -> float:
        """A lower bound of the cycle time: the least at which the windows leave room."""
        total = max(float(stage.base[-1]) for stage in self.stages)
        low, high = 0.0, max(total * 2 + max(stage.overhead for stage in self.stages), 1e-12)
        if self.windows(high) is None:
            return high
        while high - low > 1e-4 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.windows(middle) is not None else (middle, high)
        return low

    def longest(self) -> float:
        """No stage takes longer than this, whatever it recomputes and swaps."""
        stages = self.stages
        forward = sum(stages[0].forward) * stages[0].facts.speed / min(stage.facts.speed for stage in stages)
        compute = max(float(stage.base[-1]) + stage.overhead for stage in stages) + forward
        bandwidth = stages[0].swap_bandwidth
        lane = 2.0 * sum(stages[0].saved) / bandwidth if bandwidth else 0.0
        return max(compute, lane, float(self.links.max())) * (1 + _SLACK)

    def least_sum(self) -> float:
        """No partition's Σ (t_s + transfers) is less than this."""
        transfers = (
            float(self.fills[1:-1].min(initial=_INFINITE)) * (self.num_stages - 1) if self.num_stages > 1 else 0.0
        )
        return min(float(stage.base[-1]) for stage in self.stages) + sum(s.overhead for s in self.stages) + transfers

    def fits(self) -> bool:
        """Whether some partition fits into memory, however slow."""
        facts = [stage.facts for stage in self.stages]
        return shortfall(self.profile, facts, self.options).missing <= 0

    def cells(self, time: float) -> list[Cells] | None:
        """The candidate stages at a cycle time, or ``None`` where there is no partition."""
        windows = self.windows(time)
        if windows is None:
            return None
        found = []
        for index, stage in enumerate(self.stages):
            (start_low, start_high), (stop_low, stop_high) = windows[index], windows[index + 1]
            stops = np.arange(stop_low, stop_high + 1)
            most = stage.longest_run(stops, start_low, time)
            fewest = max(1, stop_low - start_high)
            lengths = np.arange(fewest, max(most, fewest) + 1)
            start = stops[:, None] - lengths[None, :]
            inside = (start >= start_low) & (start <= start_high)
            start = np.where(inside, start, start_low)
            times, solved = stage.times(start, np.broadcast_to(stops[:, None], start.shape))
            times[~inside] = _INFINITE
            times[~solved] *= 1 + _SHY  # of two equal paths, the one that is solved
            solved |= ~inside
            found.append(
                Cells(
                    start_low,
                    stop_low,
                    fewest,
                    start - start_low,
                    times,
                    solved.copy(),
                    solved,
                    self.links[stops],
                    self.fills[stops],
                )
            )
            for (known, a, b), bound in self._bounds.items():
                if known == id(stage):
                    self._write(found[-1], a, b, bound, solved=(known, a, b) in self._packings)
        return found

    def num_cells(self, time: float) -> int:
        windows = self.windows(time) or []
        mean = time / max(float(self.stages[0].base[-1]) / self.num_layers, 1e-300)
        return sum(int((high - low + 1) * min(mean, high - low + 1, self.num_layers)) for low, high in windows)

    @staticmethod
    def _write(cells: Cells, start: int, stop: int, bound: float, *, solved: bool) -> None:
        """Puts a priced or solved stage into the cells, if it is among them."""
        row, column = stop - cells.first_stop, stop - start - cells.fewest
        rows, columns = cells.times.shape
        # A cell whose start lies outside the window stands for no stage: it must stay infinite.
        if 0 <= row < rows and 0 <= column < columns and cells.start[row, column] == start - cells.first_start:
            cells.times[row, column] = bound if solved else bound * (1 + _SHY)
            cells.priced[row, column] = True
            cells.solved[row, column] = solved

    # ── paths ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def path(self, cells: list[Cells], time: float) -> tuple[float, list[int]] | None:
        """The least Σ (t_s + transfers) over partitions whose stages and links take at most ``time``, and its cuts."""
        sums = np.zeros(1)
        columns: list[Ints] = []
        even = _EVEN / max(time, 1e-300)
        for cell in cells:
            # Among equal sums the one with stages more alike: it idles less where the closed form sees no difference.
            through = np.where(cell.times > time, _INFINITE, cell.times)
            through += even * through * through
            through += sums[cell.start]
            column = through.argmin(axis=1)
            columns.append(column)
            sums = through[np.arange(len(column)), column] + cell.fills
            sums[cell.links > time] = _INFINITE
        if not np.isfinite(sums[-1]):
            return None
        cuts = [self.num_layers]
        for cell, column in zip(reversed(cells), reversed(columns), strict=True):
            cuts.append(cuts[-1] - cell.fewest - int(column[cuts[-1] - cell.first_stop]))
        return float(sums[-1]), cuts[::-1]

    def refine(self, cells: list[Cells], cuts: list[int], *, exactly: bool) -> tuple[bool, float]:
        """Prices or solves the stages of a path; whether there was one to do, and the slowest of stages and links."""
        new, slowest = False, 0.0
        for index, cell in enumerate(cells):
            start, stop = cuts[index], cuts[index + 1]
            row, column = stop - cell.first_stop, stop - start - cell.fewest
            if not (cell.solved if exactly else cell.priced)[row, column]:
                new = True
                if exactly:
                    self.packing(index, start, stop)
                else:
                    self.bound(index, start, stop)
                self._spread(cells, index, start, stop, solved=exactly or cell.solved[row, column])
            slowest = max(slowest, float(cell.times[row, column]), float(cell.links[row]))
        return new, slowest
