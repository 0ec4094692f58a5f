"""Where the closed form would cut: shortest paths over stages that are solved only when needed.

A pipeline of stages with times t_s needs about ``Σ t_s + Σ transfers + (m-1) · max t_s``. For a cycle time T, bounds
that only grow with a stage say how far s stages can reach from the left, and how far the remaining ones reach back from
the right. Cut s lies between the two: a narrow window where T is close to the best.

    layers   0 ─────────────────────────────── L
    cut 1        [────]                             reached by one stage … needed by the other three
    cut 2               [─────]
    cut 3                       [───]

Inside the windows a shortest path runs over *lower bounds* of stages (``bounds``). The stages on the path are solved
(``packing``) and the path is asked again, until it consists of solved stages. The least T that has such a path, and a
few above it, are what ``starts`` proposes to the search; the simulated step decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from vpipe.plan.bounds import Floats, Ints
from vpipe.plan.packing import Packer
from vpipe.plan.shortfall import overflows

_SHY = 1e-10
_EVEN = 1e-10
_TOPS = (1.002, 1.03, 1.12)
"""Cycle times that are tried, as multiples of the least; beyond them they double until there is a path."""
_ROUNDS, _MOST_ROUNDS = 3, 200
"""How often a path is asked again, each time with some of its stages solved, once one fits and until one fits."""
_MAX_CELLS = 3_000_000


@dataclass
class _Cells:
    """The candidate stages of one position: row = where it stops, column = how many layers it has."""

    first_start: int
    first_stop: int
    fewest: int
    start: Ints
    times: Floats
    solved: NDArray[np.bool_]
    links: Floats
    fills: Floats


class Cutter:
    """The partitions of a profile into one stage per rank."""

    def __init__(self, packer: Packer, over: Callable[[], bool] = lambda: False) -> None:
        self.over = over
        """Whether the time is used up: then what was found must do."""
        self.packer, self.stages = packer, packer.stages
        self.group_of = {group[0]: number for number, group in enumerate(packer.groups)}
        judge = packer.judge
        self.num_layers, self.num_stages = judge.profile.num_layers, len(self.stages)
        rate, lag = float(judge.per_byte.max(initial=0.0)), float(judge.lag.max(initial=0.0))
        self.links = rate * judge.cut_bytes
        self.links[[0, -1]] = 0.0
        self.fills = 2.0 * (self.links + lag)

    def proposals(self) -> Iterator[tuple[int, ...]]:
        """Cuts that are good by the closed form, the shortest cycle time first."""
        low, limit = self._least_cycle(), self._longest()
        found, top = 0, low
        tops = [low * factor for factor in _TOPS]
        while found < len(_TOPS) and top < limit and not self.over():
            top = min(limit, tops.pop(0) if tops else max(2.0 * top, limit / 1024))
            cells = self._cells(top)
            cuts = None if cells is None else self._solved_path(cells, top)
            if cuts is not None:
                found += 1
                yield tuple(cuts)
            if found and not tops:
                return

    def _solved_path(self, cells: list[_Cells], time: float) -> list[int] | None:
        fits = None
        for number in range(_MOST_ROUNDS):
            cuts = self._path(cells, time)
            if cuts is None:
                return fits
            if not self._solve(cells, cuts):
                return cuts
            fits = cuts if self._fits(cuts) else fits
            if (fits is not None and number >= _ROUNDS) or self.over():
                return fits
        return fits

    def _fits(self, cuts: list[int]) -> bool:
        return all(np.isfinite(self._time(index, *cell)) for index, cell in enumerate(pairwise(cuts)))

    def _windows(self, time: float) -> list[tuple[int, int]] | None:
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
            low.append(min(max(self.stages[index].earliest(low[-1], time), index), layers))
        low.reverse()
        low[0] = 0
        windows = list(zip(low, high, strict=True))
        return windows if all(a <= b for a, b in windows) else None

    def _least_cycle(self) -> float:
        """A lower bound of the cycle time: the least at which the windows leave room."""
        total = max(float(stage.base[-1]) for stage in self.stages)
        low, high = 0.0, max(total * 2 + max(stage.overhead for stage in self.stages), 1e-12)
        if self._windows(high) is None:
            return high
        least = 1e-6 * high  # where nothing takes time there is nothing to halve
        while high - low > 1e-4 * high and high > least:
            middle = (low + high) / 2
            low, high = (low, middle) if self._windows(middle) is not None else (middle, high)
        return high

    def _longest(self) -> float:
        """No stage takes longer than this, whatever it recomputes and swaps."""
        stages = self.stages
        forward = sum(stages[0].forward) * stages[0].facts.speed / min(stage.facts.speed for stage in stages)
        compute = max(float(stage.base[-1]) + stage.overhead for stage in stages) + forward
        bandwidth = stages[0].swap_bandwidth
        lane = 2.0 * sum(stages[0].saved) / bandwidth if bandwidth else 0.0
        return 2.0 * max(compute, lane, float(self.links.max()))

    def _cells(self, time: float) -> list[_Cells] | None:
        """The candidate stages at a cycle time, or ``None`` where there is no partition, or too many."""
        windows = self._windows(time)
        if windows is None or sum((high - low + 1) ** 2 for low, high in windows) > _MAX_CELLS:
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
            times[~inside | ~self._possible(index, start, stops)] = np.inf
            times[~solved] *= 1 + _SHY  # of two equal paths, the one that is solved
            places = self.links[stops], self.fills[stops]
            found.append(_Cells(start_low, stop_low, fewest, start - start_low, times, solved | ~inside, *places))
        return found

    def _possible(self, index: int, start: Ints, stops: Ints) -> NDArray[np.bool_]:
        """Which of these stages have some way to fit: bounds do not see all that have none, and near the least memory
        path after path would be solved in vain."""
        if self.packer.free:
            return np.ones(start.shape, bool)
        packer, first_stop = self.packer, int(stops[0])
        starts = range(int(start.min()), int(start.max()) + 1)
        ends = {"first": index == 0, "last": index == self.num_stages - 1}
        found = np.zeros(start.shape, bool)
        for begin, stop, short in overflows(
            packer.profile, packer.facts[index], packer.options, starts, int(stops[-1]), **ends, most=0.0
        ):
            if stop >= first_stop:
                row = start[stop - first_stop]
                inside = (row >= begin) & (row < stop)
                found[stop - first_stop, inside] = short[row[inside] - begin] <= 0
        return found

    def _path(self, cells: list[_Cells], time: float) -> list[int] | None:
        """The cuts with the least Σ (t_s + transfers) whose stages and links take at most ``time``."""
        sums = np.zeros(1)
        columns: list[Ints] = []
        even = _EVEN / max(time, 1e-300)
        for cell in cells:
            # Among equal sums the one with stages more alike: it idles less where the closed form sees no difference.
            through = np.where(cell.times > time, np.inf, cell.times)
            through += even * through * through
            through += sums[cell.start]
            column = through.argmin(axis=1)
            columns.append(column)
            sums = through[np.arange(len(column)), column] + cell.fills
            sums[cell.links > time] = np.inf
        if not np.isfinite(sums[-1]):
            return None
        cuts = [self.num_layers]
        for cell, column in zip(reversed(cells), reversed(columns), strict=True):
            cuts.append(cuts[-1] - cell.fewest - int(column[cuts[-1] - cell.first_stop]))
        return cuts[::-1]

    def _solve(self, cells: list[_Cells], cuts: list[int]) -> bool:
        """Solves the stages of a path, and those like them at other positions; whether there was one to solve."""
        new = False
        for index, cell in enumerate(cells):
            start, stop = cuts[index], cuts[index + 1]
            if not cell.solved[stop - cell.first_stop, stop - start - cell.fewest]:
                new = True
                time = self._time(index, start, stop)
                for other, stage in zip(cells, self.stages, strict=True):
                    if stage is self.stages[index]:
                        _write(other, start, stop, time)
        return new

    def _time(self, stage: int, start: int, stop: int) -> float:
        ways = self.packer.packings(self.group_of[stage], ((start, stop),))
        bounds = self.stages[stage]
        base = float(bounds.base[stop] - bounds.base[start]) + bounds.overhead
        return min((max(base + way.again[0], 2 * way.swap[0]) for way in ways), default=np.inf)


def _write(cells: _Cells, start: int, stop: int, time: float) -> None:
    """Puts a solved stage into the cells, if it is among them."""
    row, column = stop - cells.first_stop, stop - start - cells.fewest
    rows, columns = cells.times.shape
    # A cell whose start lies outside the window stands for no stage: it must stay infinite.
    if 0 <= row < rows and 0 <= column < columns and cells.start[row, column] == start - cells.first_start:
        cells.times[row, column] = time
        cells.solved[row, column] = True
