"""A lower bound of the simulated step: no layout that fits is quicker. And the cuts that it would like best.

Every path is a bound (``paths``), and what a path weighs depends on where one stage starts and stops. So every possible
stage of a position has a least step, and the bound of all partitions is a shortest path over stages: the least of the
largest. Memory adds to it what a stage must recompute (``growth``).

**Swapping.** A stage may swap instead of recomputing, which takes the swap lane. Bytes go out and in at one bandwidth,
so a second of the lane frees as much whichever layer it is: κ = bandwidth × the units that are then not there. At a
price p per byte a stage that swaps σ seconds one way recomputes at least e(p) - p·κ·σ, and two paths say

    step ≥ C + a·(e - pκσ)            along the compute lane, which recomputes a times
    step ≥ S + b·(e - pκσ) + c·σ      along the swap lane, which swaps c times

Their mean with weights 1-μ and μ is a bound too, and there is a μ at which σ falls out of it: however much is swapped,
the step is no shorter.

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
from vpipe.plan.memory import Options, lasting_bytes
from vpipe.plan.paths import Paths, StagePath

Ints = NDArray[np.int64]
Cuts = tuple[int, ...]

_SHY = 1e-9
"""What the bound gives away, so that rounding cannot lift it above a step."""
_PRICES = 6
_LOOSE = (1.002, 1.03, 1.12)
"""How far above the bound the proposed cuts may be."""
_EVEN = 1e-3
_MOST_CELLS = 4_000_000
"""Stages of all positions: a table of more is not made."""


@dataclass(frozen=True)
class StageTable:
    """All stages of one position, ``[stop, start]``, counted from the first of each."""

    first_start: int
    first_stop: int
    need: Array
    """No layout with this stage has a shorter step; infinite where it does not fit, or cannot be in a better one."""
    again: Array
    """Seconds that it recomputes at least; nothing where it may swap."""

    def at(self, start: Ints, stop: Ints) -> tuple[Array, Array]:
        """Both, of some stages; those that are not in the table cannot be in a better layout."""
        row, column = stop - self.first_stop, start - self.first_start
        inside = (row >= 0) & (row < self.need.shape[0]) & (column >= 0) & (column < self.need.shape[1])
        row, column = np.where(inside, row, 0), np.where(inside, column, 0)
        if not self.need.size:
            return np.full(len(start), inf), np.zeros(len(start))
        return np.where(inside, self.need[row, column], inf), np.where(inside, self.again[row, column], 0.0)


class Floor:
    """The bound of all layouts that fit, of which one is known to take ``step``."""

    def __init__(self, judge: Judge, options: Options, step: float = inf, limits: Limits = NO_LIMITS) -> None:
        self.judge, self.options, self.limits = judge, options, limits
        self.paths = Paths(judge)
        self.step = step * (1 + 1e-6)
        self.tables: list[StageTable] = []
        """One of each stage; none after the time, or where they would be too large."""
        found = max(self.paths.unit(), self.paths.all_ranks())
        if limits.over or not self._make_tables():
            self.tables = []
            found = max(found, self.paths.largest_layer())
        else:
            least = self._worst[-1][-1]
            found = max(found, min(least, step))
        self.bound = float(found) * (1 - _SHY)

    def of(self, cuts: Ints) -> tuple[Array, Array]:
        """Lower bounds of the steps of all layouts with these cuts (rows), and what each stage recomputes at least."""
        need, again = np.zeros(len(cuts)), np.zeros((len(cuts), self.judge.pipe.num_stages))
        for stage, table in enumerate(self.tables):
            least, again[:, stage] = table.at(cuts[:, stage], cuts[:, stage + 1])
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
        self._worst = [worst]
        cells = 0
        for stage, growth in enumerate(growths):
            possible = np.flatnonzero(worst < inf)
            possible = possible[possible >= lowest[stage]]
            starts = range(int(possible[0]), int(possible[-1]) + 1) if len(possible) else range(0)
            stops = range(max(lowest[stage + 1], starts.start + 1), layers - (stages - 1 - stage) + 1)
            table = self._table(stage, growth, starts, stops)
            cells += table.need.size * (1 + len(growth.prices))
            if cells > _MOST_CELLS:
                return False
            worst = np.full(layers + 1, inf)
            if table.need.size:
                before = self._worst[-1][starts.start : starts.stop]
                ends = slice(table.first_stop, table.first_stop + len(table.need))
                worst[ends] = np.maximum(before, table.need).min(axis=1)
            self.tables.append(table)
            self._worst.append(worst)
        return True

    def _growth(self, stage: int) -> Growth:
        site = self.judge.sites[stage]
        facts = site.facts
        prices: tuple[float, ...] = ()
        if facts.memory < inf and self.options.recompute and facts.units > facts.recomputed:
            saved = np.array([layer.saved_bytes for layer in site.profile.layers], dtype=np.float64)
            forward = np.array([layer.forward for layer in site.profile.layers])
            cut = np.array(site.profile.cut_bytes[:-1], dtype=np.float64)
            # At these prices a layer is recomputed as gladly as it is kept, in a run or as a run of its own.
            found: list[float] = []
            for freed in (
                (facts.units - facts.recomputed) * saved,
                (facts.units - facts.recomputed) * saved - facts.units * cut,
            ):
                some = (freed > 0) & (forward > 0)
                if some.any():
                    found += np.quantile(forward[some] / freed[some], np.linspace(0, 1, _PRICES)).tolist()
            prices = tuple(sorted(set(found)))
        longest = self.step / max(float(self.judge.units[stage]), 1.0)
        return Growth(site.profile, facts, self.options, site.first, site.last, prices, longest)

    def _lowest(self, growths: Sequence[Growth]) -> list[int]:
        """Per stage the first layer at which it may start, if all stages from it on are to reach the end."""
        layers = self.judge.profile.num_layers
        found = [layers]
        for stage in reversed(range(len(growths))):
            growth, facts = growths[stage], growths[stage].facts
            units = min(facts.recomputed if self.options.recompute else facts.units, growth.kept_units)
            sizes = [lasting_bytes(x, facts) + units * x.saved_bytes for x in growth.profile.layers]
            lines = [
                (np.concatenate([[0.0], np.cumsum(sizes)]), facts.memory),
                (self.paths.work[stage], growth.longest),
            ]
            stop = found[-1]
            bars = ((line, line[stop] - most - 1e-9 * (line[stop] + min(most, line[stop]))) for line, most in lines)
            found.append(max(stage, *(int(np.searchsorted(line, bar)) for line, bar in bars)))
        return found[::-1]

    def _table(self, stage: int, growth: Growth, starts: range, stops: range) -> StageTable:
        shape = len(stops), len(starts)
        short = np.full(shape, inf)
        priced = np.full((len(growth.prices), *shape), -inf)
        for begin, end, lacks, again in growth.ends(starts, stops.stop - 1, 0.0):
            if end >= stops.start:
                columns = slice(begin - starts.start, begin - starts.start + len(lacks))
                short[end - stops.start, columns] = lacks
                priced[:, end - stops.start, columns] = again
        need = np.zeros(shape)
        again = np.maximum(priced.max(axis=0, initial=0.0), 0.0)
        weights = [(way, self._weights(way, stage, starts, stops)) for way in self.paths.ways(stage)]
        for _, path in weights:
            np.maximum(need, path, out=need)
        if not growth.swaps:
            for way, path in weights:
                np.maximum(need, path + way.again * again, out=need)
        else:
            again[:] = 0.0
            lanes = [(way, self._weights(way, stage, starts, stops)) for way in self.paths.lanes(stage)]
            self._mixed(growth, priced, weights[:3], lanes, need)
        need[(short > 0) | (need > self.step)] = inf
        return StageTable(starts.start, stops.start, need, again)

    def _weights(self, way: StagePath, stage: int, starts: range, stops: range) -> Array:
        stop, start, constant = self.paths.line(way, stage)
        weights: Array = stop[stops.start : stops.stop, None] - start[None, starts.start : starts.stop] + constant
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
        facts, bandwidth = growth.facts, growth.profile.swap_bandwidth or 0.0
        freed = (facts.units - facts.resident) * bandwidth
        for price, least in zip(growth.prices, priced, strict=True):
            spared = price * freed  # seconds of recomputing for one of swapping
            for way, path in compute:
                if not spared:
                    np.maximum(need, path + way.again * least, out=need)
                for lane, beside in lanes if spared else ():
                    rest = lane.lane - lane.again * spared
                    if rest > 0:
                        mu = way.again * spared / (rest + way.again * spared)
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
            rows, columns = table.need.shape
            starts = slice(table.first_start, table.first_start + columns)
            ends = slice(table.first_stop, table.first_stop + rows)
            work = self.paths.work[stage]
            time = work[ends, None] - work[None, starts] + table.again
            hops = (
                2 * self.judge.per_byte[0][stage] * self.judge.cut_bytes[ends] if stage + 1 < len(self.tables) else 0.0
            )
            cost = (
                np.where(table.need <= most, time + _EVEN * time * time / max(most, 1e-300), inf) + sums[None, starts]
            )
            after, origin = np.full(layers + 1, inf), np.zeros(layers + 1, np.int64)
            if cost.size:
                column = cost.argmin(axis=1)
                after[ends] = cost[np.arange(rows), column] + hops
                origin[ends] = column + table.first_start
            sums = after
            origins.append(origin)
        if not np.isfinite(sums[-1]):
            return None
        cuts = [layers]
        for origin in reversed(origins):
            cuts.append(int(origin[cuts[-1]]))
        return tuple(reversed(cuts))


def lower_bound(judge: Judge, options: Options, limits: Limits = NO_LIMITS, step: float = inf) -> float:
    """No layout that fits has a shorter step; some layout is known to have ``step``. Where the time ends, the bound is
    looser."""
    return Floor(judge, options, step, limits).bound
