"""Lower bounds for every possible stage at once.

A partition of 1,000 layers has half a million possible stages; solving a knapsack for each would take minutes. Prices
turn the knapsack of a stage into a sum over its layers, so one prefix sum per price bounds all of them:

    time(a, b) ≥ (1-w)·base(a, b) + G[b] - G[a] - price·room(a, b)      for any price ≥ 0 and lane weight 0 ≤ w < 1

Where all layers are alike a count says more: to free so many bytes takes at least so many layers, and each costs at
least the cheapest forward. Both bounds hold; the larger is used.

The prices tried are those at which some layer is indifferent between keeping and recomputing. Without the buffers at
the two ends these bounds only grow with the stage, so how far a stage can reach is a binary search.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vpipe.plan.costs import Profile
from vpipe.plan.knapsack import Knapsack
from vpipe.plan.memory import StageFacts, lasting_bytes, num_actions

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_NUM_PRICES = 16
_NUM_REACH_PRICES = 4
"""Prices that the windows use: they need not be tight."""
_LANE_WEIGHTS = (0.0, 0.25)
_SLACK = 1e-9


@dataclass(frozen=True)
class Options:
    """What a plan may use besides keeping."""

    recompute: bool = True
    swap: bool = True


class StageBounds:
    """The costs of one stage as functions of where it starts and stops."""

    def __init__(
        self, profile: Profile, facts: StageFacts, options: Options, ranges: RangeTable, *, first: bool, last: bool
    ) -> None:
        layers = profile.layers
        self.facts, self.units = facts, facts.units
        self.overhead = profile.action_overhead * num_actions(first=first, last=last)
        self.swap_bandwidth = profile.swap_bandwidth if options.swap else None
        self.recompute = options.recompute
        self.saved = [float(layer.saved_bytes) for layer in layers]
        self.cut = [float(size) for size in profile.cut_bytes]
        self.forward = [layer.forward / facts.speed for layer in layers]
        cut = np.array(self.cut)
        self.before = np.zeros_like(cut) if first else 2.0 * cut
        self.after = np.zeros_like(cut) if last else 2.0 * cut
        self.after[1:] += [float(layer.workspace_bytes) for layer in layers]
        self.base = _prefix([layer.total / facts.speed for layer in layers])
        weights = [lasting_bytes(layer, facts) for layer in layers]
        self.fixed = _prefix([float(size) for size in weights])
        saved = np.array(self.saved)
        self.kept = _prefix(facts.units * saved)
        self.least = _prefix(saved * min(self._least_units(), facts.units))
        self._table = ranges
        self.prices = [] if facts.memory == float("inf") else self._make_prices(saved)
        # Each row may only grow along the layers; a stage a..b fits if row[b] - row[a] <= limit.
        self._rows: list[tuple[list[float], float, float]] = [
            (self.base.tolist(), 1.0, -self.overhead),
            ((self.least + self.fixed).tolist(), 0.0, facts.memory),
        ]
        for price, weight, sums in self.prices[:: max(1, len(self.prices) // _NUM_REACH_PRICES)]:
            row = ((1 - weight) * self.base + sums + price * self.fixed).tolist()
            self._rows.append((row, 1.0, price * facts.memory - (1 - weight) * self.overhead))

    def _least_units(self) -> int:
        if self.recompute:
            return self.facts.recomputed
        return self.units if self.swap_bandwidth is None else self.facts.resident

    def _make_prices(self, saved: Floats) -> list[tuple[float, float, Floats]]:
        """(price per byte, weight of the swap lane, prefix sums of the priced layers)."""
        forward = np.array(self.forward)
        some = saved > 0
        again, resident = self.facts.recomputed, self.facts.resident
        if not self.recompute or self.units <= again or not some.any():
            return []
        slopes = forward[some] / ((self.units - again) * saved[some])
        if self.swap_bandwidth is None or self.units <= resident:
            pairs = [(slope, 0.0) for slope in _quantiles(slopes, _NUM_PRICES)]
            lane = np.full_like(saved, np.inf)
        else:
            lane = 2.0 * saved / self.swap_bandwidth
            levers = _quantiles(slopes, _NUM_PRICES // 2) * self.swap_bandwidth * (self.units - resident) / 2
            pairs = []
            # Indifferent between all three; and, where nothing is kept, between recomputing and swapping.
            for slope, lever in zip(_quantiles(slopes, _NUM_PRICES // 2), levers, strict=True):
                pairs.append((slope / (1 + lever), lever / (1 + lever)))
            for weight in _LANE_WEIGHTS:
                rates = ((1 - weight) * forward[some] - weight * lane[some]) / saved[some]
                pairs += [(rate, weight) for rate in _quantiles(rates, _NUM_PRICES // 2)]
        found = []
        for price, weight in pairs:
            if price > 0:
                layer = np.minimum(price * self.units * saved, (1 - weight) * forward + price * again * saved)
                if np.isfinite(lane).all():
                    layer = np.minimum(layer, weight * lane + price * resident * saved)
                found.append((float(price), float(weight), _prefix(layer)))
        return found

    def times(self, start: Ints, stop: Ints) -> tuple[Floats, NDArray[np.bool_]]:
        """A lower bound of the time of each stage (infinite where it cannot fit), and whether it is the time itself."""
        room = self.facts.memory - (self.fixed[stop] - self.fixed[start] + self.before[start] + self.after[stop])
        base = self.base[stop] - self.base[start] + self.overhead
        need = self.kept[stop] - self.kept[start] - room
        whole = need <= 0  # bytes are whole numbers, so sums of them are exact
        bound = base.copy()
        for price, weight, sums in self.prices:
            np.maximum(bound, (1 - weight) * base + (sums[stop] - sums[start]) - price * room, out=bound)
        if self.prices and not whole.all():
            some = ~whole
            bound[some] = np.maximum(bound[some], self._counted(start[some], stop[some], base[some], need[some]))
        bound[self.least[stop] - self.least[start] > room * (1 + _SLACK)] = np.inf
        return np.where(whole, base, bound), whole

    def _counted(self, start: Ints, stop: Ints, base: Floats, need: Floats) -> Floats:
        """The bound by counting layers: k recomputed and j swapped must free ``need`` bytes."""
        forward, saved, largest, cut = self._table.least(start, stop)
        forward = forward / self.facts.speed
        frees = (self.units - self.facts.recomputed) * -largest
        num_layers = (stop - start).astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            if self.swap_bandwidth is None or self.units <= self.facts.resident:
                # Something is recomputed, so some segment keeps an input.
                count = np.ceil((need + self.units * cut) / frees * (1 - _SLACK))
                counted: Floats = np.where(np.isfinite(count), base + count * forward, base)
                return counted
            lane, unloads = 2.0 * saved / self.swap_bandwidth, (self.units - self.facts.resident) * -largest

            def swap_time(recomputed: Floats) -> Floats:
                left = np.maximum(need - recomputed * frees, 0.0)
                swapped: Floats = np.ceil(left / unloads * (1 - _SLACK)) * lane
                return np.nan_to_num(swapped, nan=0.0, posinf=0.0)

            # The more are recomputed, the longer the compute lane and the shorter the swap lane: find where they cross.
            low, high = np.zeros_like(base), num_layers
            for _ in range(int(num_layers.max()).bit_length() + 1):
                middle = np.floor((low + high) / 2)
                over = base + middle * forward >= swap_time(middle)
                low, high = np.where(over, low, np.minimum(middle + 1, high)), np.where(over, middle, high)
            fewer = np.maximum(high - 1, 0.0)
            crossing: Floats = np.minimum(
                np.maximum(base + high * forward, swap_time(high)), np.maximum(base + fewer * forward, swap_time(fewer))
            )
            return crossing

    def furthest(self, start: int, time: float) -> int:
        """No stage that starts here and takes at most ``time`` stops after this."""
        return min(
            bisect_right(row, row[start] + (factor * time + limit) + _slack(row[start], factor * time + limit)) - 1
            for row, factor, limit in self._rows
        )

    def earliest(self, stop: int, time: float) -> int:
        """No stage that stops here and takes at most ``time`` starts before this."""
        return max(
            bisect_left(row, row[stop] - (factor * time + limit) - _slack(row[stop], factor * time + limit))
            for row, factor, limit in self._rows
        )

    def longest_run(self, stops: Ints, first_start: int, time: float) -> int:
        """No stage that stops at one of ``stops`` and takes at most ``time`` has more layers than this."""
        ends = self.base[stops]
        earliest = np.searchsorted(self.base, ends - time + self.overhead - _SLACK * (ends + time))
        return int((stops - np.maximum(earliest, first_start)).max())

    def knapsack(self, start: int, stop: int, hint: float = 0.0) -> Knapsack:
        """The stage itself."""
        room = self.facts.memory - float(self.fixed[stop] - self.fixed[start] + self.before[start] + self.after[stop])
        return Knapsack(
            self.saved[start:stop],
            self.cut[start:stop],
            self.forward[start:stop],
            units=self.units,
            recomputed=self.facts.recomputed,
            resident=self.facts.resident,
            capacity=room,
            base=float(self.base[stop] - self.base[start]) + self.overhead,
            swap_bandwidth=self.swap_bandwidth,
            recompute=self.recompute,
            hint=hint,
        )


def _slack(a: float, b: float) -> float:
    """Enough to cover the rounding of a sum or difference; windows may be too wide, never too narrow."""
    return _SLACK * (abs(a) + abs(b))


def _quantiles(values: Floats, count: int) -> Floats:
    return np.unique(np.quantile(values, np.linspace(0, 1, count)))


def _prefix(values: list[float] | Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])


def range_table(profile: Profile) -> RangeTable:
    """Of forward seconds, saved bytes, their negative, and cut bytes: what ``StageBounds`` counts with."""
    layers = profile.layers
    saved = [float(layer.saved_bytes) for layer in layers]
    rows = [[layer.forward for layer in layers], saved, [-size for size in saved], list(profile.cut_bytes[:-1])]
    return RangeTable(np.array(rows, dtype=np.float64))


class RangeTable:
    """The least of any run of columns, for each row, in two look-ups (a sparse table)."""

    def __init__(self, rows: Floats) -> None:
        self._levels = [rows]
        width = 1
        while 2 * width <= rows.shape[1]:
            level = self._levels[-1]
            self._levels.append(np.minimum(level[:, :-width], level[:, width:]))
            width *= 2
        self._stack = np.full((len(self._levels), *rows.shape), np.inf)
        for index, level in enumerate(self._levels):
            self._stack[index, :, : level.shape[1]] = level

    def least(self, start: Ints, stop: Ints) -> Floats:
        """``least[row, i]`` over columns ``start[i] .. stop[i]-1``."""
        level = np.frexp((stop - start).astype(np.float64))[1] - 1
        left = self._stack[level, :, start]
        right = self._stack[level, :, stop - (1 << level)]
        return np.minimum(left, right).T
