"""A lower bound of the simulated step: no layout that fits is quicker. And the cuts that it would like best.

Every path is a bound (``paths``), and what a path weighs depends on where one stage starts and stops. So every possible
stage of a position has a least step, and the bound of all partitions is a shortest path over stages: the least of the
largest. Memory adds to it what a stage must recompute (``growth``).

**Swapping.** A stage may swap instead of recomputing, which takes the swap lane. With ρ seconds recomputed and σ
swapped one way, two paths say

    step ≥ C + a·ρ            along the compute lane, which recomputes a times
    step ≥ S + b·ρ + c·σ      along the swap lane, which swaps c times

and memory says ρ + l·σ ≥ e for a price and a worth l of the swap lane (``growth``). The mean of the two paths with
weights 1-μ and μ is a bound too, and there is a μ at which it weighs ρ and σ as 1 : l. So it is at least the mean of C
and S and so many e: however much is swapped, the step is no shorter.

The cuts that the bound likes, and cuts that are even and nearly as good, are where the search begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from vpipe.plan.growth import Growth
from vpipe.plan.judge import Array, Judge
from vpipe.plan.limits import NO_LIMITS, Limits
from vpipe.plan.memory import Options
from vpipe.plan.paths import Paths, StagePath
from vpipe.plan.sites import StageSite

Ints = NDArray[np.int64]
Cuts = tuple[int, ...]

_SHY = 1e-9
"""What the bound gives away, so that rounding cannot lift it above a step."""
_PRICES, _SCARCE = 4, 3
"""Prices per byte, where it is between keeping and recomputing, and between swapping and recomputing."""
_MANY = 600
"""Few layers have more prices: so many, divided by the layers."""
_WORTH = (0.2, 0.6)
"""What a second of the swap lane is worth there, in parts of what recomputing the same bytes takes."""
_LOOSE = (1.002, 1.03, 1.12)
"""How far above the bound the proposed cuts may be."""
_EVEN = 1e-3
_FEW_CELLS, _MOST_CELLS = 1_000_000, 15_000_000
"""Stages of all positions, times prices: few are looked at in one go, and a table of too many is not made."""
_WIDER = 1.1
"""From one limit of large tables to the next."""


@dataclass(frozen=True)
class StageTable:
    """All stages of one position, ``[stop, length]``: the first stop is ``first_stop``, the first length one layer."""

    first_stop: int
    starts: Ints
    """Where each of them starts; nowhere (0) where ``need`` is infinite."""
    need: Array
    """No layout with this stage has a shorter step; infinite where it does not fit or does not exist."""
    again: Array
    """Seconds that it recomputes at least; nothing where it may swap."""

    @property
    def stops(self) -> slice:
        return slice(self.first_stop, self.first_stop + len(self.need))

    def at(self, start: Ints, stop: Ints, beyond: float) -> tuple[Array, Array]:
        """Both, of some stages; a layout with one that is not in the table takes at least ``beyond``."""
        row, column = stop - self.first_stop, stop - start - 1
        inside = (row >= 0) & (row < self.need.shape[0]) & (column >= 0) & (column < self.need.shape[1])
        row, column = np.where(inside, row, 0), np.where(inside, column, 0)
        if not self.need.size:
            return np.full(len(start), beyond), np.zeros(len(start))
        # A stage that the window leaves out may fit all the same: it is not known here, and costs ``beyond``.
        inside &= self.starts[row, column] == start
        return np.where(inside, self.need[row, column], beyond), np.where(inside, self.again[row, column], 0.0)

    def through(self, before: Array, cost: Array) -> tuple[Array, Ints]:
        """For every layer the least of ``before`` where a stage starts and its ``cost``, and where it starts then."""
        after, origin = np.full(len(before), inf), np.zeros(len(before), np.int64)
        if cost.size:
            column = cost.argmin(axis=1)
            rows = np.arange(len(cost))
            after[self.stops], origin[self.stops] = cost[rows, column], self.starts[rows, column]
        return after, origin


class Floor:
    """The bound of all layouts that fit, of which one is known to take ``step``."""

    def __init__(self, judge: Judge, options: Options, step: float = inf, limits: Limits = NO_LIMITS) -> None:
        self.judge, self.options, self.limits = judge, options, limits
        self.paths = Paths(judge)
        self.tables: list[StageTable] = []
        """One of each stage; none after the time, or where they would be too large."""
        found = max(self.paths.unit(), self.paths.all_ranks(), self.paths.largest_layer())
        self._prices = [_prices(site, options) for site in judge.sites]
        self._bytes = [_least_bytes(site, options) for site in judge.sites]
        few = judge.profile.num_layers**2 * judge.pipe.num_stages <= _FEW_CELLS
        high = step * (1 + 1e-6)
        self.limit = high if few else max(found, high / _WIDER)
        """Stages that need a longer step are not passed. Large tables have a lower one than the known step: where it
        leaves no way to the last layer no layout is quicker than it, and where it leaves too many it is lowered."""
        while not limits.over:
            if self._make_tables():
                least = float(self._worst[-1])
                found = max(found, min(least, self.limit, step))
                if least < inf or self.limit >= high:
                    break
                self.limit = min(high, self.limit * _WIDER**0.5)
            else:
                high = self.limit / _WIDER**0.25
                self.limit /= _WIDER
            if self.limit <= found:
                break
        self.bound = found * (1 - _SHY)

    def of(self, cuts: Ints) -> tuple[Array, Array]:
        """Lower bounds of the steps of all layouts with these cuts (rows), and what each stage recomputes at least."""
        need, again = np.zeros(len(cuts)), np.zeros((len(cuts), self.judge.pipe.num_stages))
        for stage, table in enumerate(self.tables):
            least, again[:, stage] = table.at(cuts[:, stage], cuts[:, stage + 1], self.limit)
            np.maximum(need, least, out=need)
        return need, again

    def proposals(self) -> Iterator[Cuts]:
        """Cuts whose stages are near the bound and as even as that allows."""
        for loose in _LOOSE if self.tables else ():
            cuts = self._evenest(self.bound * loose)
            if cuts is not None:
                yield cuts

    # ── the tables ────────────────────────────────────────────────────────────────────────────────────────────────

    def _make_tables(self) -> bool:
        """Stage by stage, as far as the stages before reach; whether there was room for them."""
        layers, stages = self.judge.profile.num_layers, self.judge.pipe.num_stages
        growths = [self._growth(stage) for stage in range(stages)]
        lowest = self._lowest(growths)
        worst = np.full(layers + 1, inf)
        worst[0] = 0.0
        tables: list[StageTable] = []
        cells = 0
        for stage, growth in enumerate(growths):
            possible = np.flatnonzero(worst < inf)
            possible = possible[possible >= lowest[stage]]
            starts = range(int(possible[0]), int(possible[-1]) + 1) if len(possible) else range(0)
            reach = self._reach(stage, growth, np.arange(starts.start, starts.stop))
            highest = min(layers - (stages - 1 - stage), int(reach.max(initial=0)))
            stops = range(max(lowest[stage + 1], starts.start + 1), highest + 1)
            longest = int((reach - np.arange(starts.start, starts.stop)).max(initial=0))
            cells += longest * len(stops) * (1 + len(growth.prices))
            if cells > _MOST_CELLS:
                return False
            table = self._table(stage, growth, starts, stops, longest)
            passed = np.where(table.need <= self.limit, np.maximum(worst[table.starts], table.need), inf)
            worst, _ = table.through(worst, passed)
            tables.append(table)
        self.tables, self._worst = tables, worst
        return True

    def _growth(self, stage: int) -> Growth:
        site = self.judge.sites[stage]
        longest = self.limit / max(float(self.judge.units[stage]), 1.0)
        return Growth(site.profile, site.facts, self.options, site.first, site.last, self._prices[stage], longest)

    def _lowest(self, growths: Sequence[Growth]) -> list[int]:
        """Per stage the first layer at which it may start, if all stages from it on are to reach the end."""
        found = [self.judge.profile.num_layers]
        for stage in reversed(range(len(growths))):
            stop, places = found[-1], [stage]
            for line, most in self._lines(stage, growths[stage]):
                if most < inf:
                    places.append(int(np.searchsorted(line, line[stop] - most - 1e-9 * line[stop])))
            found.append(max(places))
        return found[::-1]

    def _reach(self, stage: int, growth: Growth, starts: Ints) -> Ints:
        """No stage that starts at one of these layers stops after this one."""
        found = np.full(len(starts), self.judge.profile.num_layers)
        for line, most in self._lines(stage, growth):
            ends = np.searchsorted(line, line[starts] + most + 1e-9 * line[-1], side="right") - 1
            found = np.minimum(found, ends)
        return found

    def _lines(self, stage: int, growth: Growth) -> list[tuple[Array, float]]:
        """Sums along the layers, and what a stage may have of each: bytes at least, and seconds of work."""
        return [(self.paths.work[stage], growth.longest), (self._bytes[stage], growth.facts.memory)]

    def _table(self, stage: int, growth: Growth, starts: range, stops: range, longest: int) -> StageTable:
        shape = len(stops), longest
        begin = np.arange(stops.start, stops.stop)[:, None] - np.arange(1, longest + 1)[None, :]
        short = np.full(shape, inf)
        priced = np.full((len(growth.prices), *shape), -inf)
        for first, end, lacks, again in growth.ends(starts, stops.stop - 1, 0.0):
            if end >= stops.start:
                # From the shortest stage to the longest; what is longer than any stage can be is left out.
                columns = slice(end - first - len(lacks), min(end - first, longest))
                count = columns.stop - columns.start
                if count > 0:
                    short[end - stops.start, columns] = lacks[::-1][:count]
                    priced[:, end - stops.start, columns] = again[:, ::-1][:, :count]
        begin = np.where(short < inf, begin, 0)
        need = np.zeros(shape)
        again = np.maximum(priced.max(axis=0, initial=0.0), 0.0)
        weights = [(way, self._weights(way, stage, begin, stops)) for way in self.paths.ways(stage)]
        for _, path in weights:
            np.maximum(need, path, out=need)
        if not growth.swaps:
            for way, path in weights:
                np.maximum(need, path + way.again * again, out=need)
        else:
            again[:] = 0.0
            lanes = [(way, self._weights(way, stage, begin, stops)) for way in self.paths.lanes(stage)]
            self._mixed(growth, priced, weights[:3], lanes, need)
        need[short > 0] = inf
        return StageTable(stops.start, begin, need, again)

    def _weights(self, way: StagePath, stage: int, begin: Ints, stops: range) -> Array:
        stop, start, constant = self.paths.line(way, stage)
        weights: Array = stop[stops.start : stops.stop, None] - start[begin] + constant
        return weights

    @staticmethod
    def _mixed(
        growth: Growth,
        priced: Array,
        compute: list[tuple[StagePath, Array]],
        lanes: list[tuple[StagePath, Array]],
        need: Array,
    ) -> None:
        """What holds however much is swapped."""
        for (_, worth), least in zip(growth.prices, priced, strict=True):
            for way, path in compute:
                if not worth:
                    np.maximum(need, path + way.again * least, out=need)
                for lane, beside in lanes if worth else ():
                    rest = lane.lane - lane.again * worth
                    if rest > 0:
                        mu = way.again * worth / (rest + way.again * worth)
                        count = (1 - mu) * way.again + mu * lane.again
                        np.maximum(need, (1 - mu) * path + mu * beside + count * least, out=need)

    # ── the cuts ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _evenest(self, most: float) -> Cuts | None:
        """Of the partitions whose stages need no more than ``most``, one whose stages are short and alike."""
        layers = self.judge.profile.num_layers
        sums = np.full(layers + 1, inf)
        sums[0] = 0.0
        origins = []
        for stage, table in enumerate(self.tables):
            work = self.paths.work[stage]
            time = work[table.stops, None] - work[table.starts] + table.again
            there_and_back = self.judge.cut_bytes + self.judge.back_bytes
            hops = self.judge.per_byte[0][stage] * there_and_back[table.stops]  # none behind the last stage
            cost = time + _EVEN * time * time / max(most, 1e-300) + sums[table.starts] + hops[:, None]
            sums, origin = table.through(sums, np.where(table.need <= most, cost, inf))
            origins.append(origin)
        if not np.isfinite(sums[-1]):
            return None
        cuts = [layers]
        for origin in reversed(origins):
            cuts.append(int(origin[cuts[-1]]))
        return tuple(reversed(cuts))


def _prices(site: StageSite, options: Options) -> tuple[tuple[float, float], ...]:
    """Prices per byte at which a layer is recomputed as gladly as it is kept or swapped."""
    facts, layers, bandwidth = site.facts, site.profile.layers, site.profile.swap_bandwidth
    if facts.memory == inf or not options.recompute or not facts.recomputing_helps:
        return ()
    held = site.layer_bytes
    saved = np.array([layer.saved_bytes for layer in layers], dtype=np.float64)
    forward = np.array([layer.forward for layer in layers])
    swaps = options.swap and bandwidth is not None
    gone = held.kept - held.recomputed
    found = [
        (price, price * (facts.units - facts.resident) * (bandwidth or 0.0) if swaps else inf)
        for freed in (gone, gone - held.run)  # in a run, and as a run of its own
        for price in _quantiles(forward, freed, max(_PRICES, min(4 * _PRICES, _MANY // len(layers))))
    ]
    if swaps and bandwidth is not None:
        # Where memory is scarce nothing is kept, and it is between swapping and recomputing.
        for worth in [0.0, *(share * each * bandwidth for each in _quantiles(forward, saved, 1) for share in _WORTH)]:
            dearer = forward - worth / bandwidth * saved
            found += [(price, worth) for price in _quantiles(dearer, held.swapped - held.recomputed, _SCARCE)]
    return tuple(dict.fromkeys(found))


def _least_bytes(site: StageSite, options: Options) -> Array:
    """Along the layers, what a stage needs at least: sums, without what its ends need."""
    held = site.layer_bytes
    swaps = options.swap and site.profile.swap_bandwidth is not None
    least = held.recomputed if options.recompute else held.swapped if swaps else held.kept
    return np.concatenate([[0.0], np.cumsum(held.lasting + least)])


def _quantiles(seconds: Array, sizes: Array, count: int) -> list[float]:
    some = (sizes > 0) & (seconds > 0)
    if not some.any():
        return []
    places = np.linspace(0, 1, count) if count > 1 else [0.5]
    found: list[float] = np.quantile(seconds[some] / sizes[some], places).tolist()
    return found
