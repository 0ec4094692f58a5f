"""A lower bound of the simulated step: no layout that fits is quicker.

A step is the longest path through the program, so every path is a bound. Those that hold for every schedule:

    a unit       forwards and backwards of all layers, one after the other
    all ranks    the work of all, divided by their speeds
    a rank       comes to work, works without a pause, and its result goes on:

        it begins with its first forward, after the forwards of the stages before it
               or with its first backward, after all forwards and the backwards of the stages behind it
        it ends   with its last action
               or with its last backward, then come the backwards of the stages before it
               or with its last forward, then come the forwards behind it and all backwards

How good a cut can be by the last: a bisection over the step. For a given step, sums along the layers say how far each
stage can reach at most, with what memory makes it recompute at least (``bounds``); if the last stage does not reach
the end, no layout has this step. Swapping counts as free here: not every unit is swapped, and a swap hides behind work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from vpipe.plan.bounds import Options, StageBounds, range_table
from vpipe.plan.judge import Array, Judge
from vpipe.plan.limits import NO_LIMITS, Limits
from vpipe.schedule.action import Kind
from vpipe.schedule.semantics import INPUT_GRADIENT, LANE, Lane

_SHY = 1e-9
"""What the bound gives away, so that rounding cannot lift it above a step."""
_STEPS, _FINE = 24, 1e-6
"""How often the range of the bound is halved, and what is narrow enough."""
_PRICES, _PRICED = 4, 3
"""Prices per byte, and for how many of the paths."""
_CELLS = 1_000_000
"""Stages of all positions that are looked at one by one."""
_FREE = 1e200
"""Bandwidth of a swap lane that takes no time."""


def lower_bound(judge: Judge, options: Options, limits: Limits = NO_LIMITS, step: float = inf) -> float:
    """No layout that fits has a shorter step; some layout is known to have ``step``. Where the time ends, the bound is
    looser."""
    found = max(_unit(judge), _all_ranks(judge))
    if judge.pipe.stages_per_rank == 1 and not limits.over:
        found = max(found, _busiest_rank(judge, options, found, limits, step))
    else:
        found = max(found, _largest_layer(judge))
    return found * (1 - _SHY)


def _work(judge: Judge) -> Array:
    """Seconds of every layer for one unit."""
    work: Array = np.diff(judge.forward) + np.diff(judge.input_grad) + np.diff(judge.weight_grad)
    return work


def _hops(judge: Judge, way: int) -> Array:
    """Per stage the least that a message waits on its way to it (0: forwards, 1: backwards from it), summed from the
    first stage on."""
    inner = judge.cut_bytes[1:-1]
    least = float(inner.min()) if len(inner) else 0.0
    stages = judge.pipe.num_stages
    if judge.pipe.entry.blocking:
        return np.zeros(stages)
    if way == 0:
        steps = judge.lag[0][:-1] + least * judge.per_byte[0][:-1]
    else:
        steps = judge.lag[1][1:] + least * judge.per_byte[1][1:]
    return np.concatenate([[0.0], np.cumsum(steps)])


def _unit(judge: Judge) -> float:
    """One unit on its way there and back; asynchronous pipes have it hidden behind others."""
    if judge.pipe.asynchronous:
        return 0.0
    speed = float(judge.speed.max())
    there = judge.forward[-1] + judge.input_grad[-1]
    there += 0.0 if judge.pipe.split else judge.weight_grad[-1]
    return float(there / speed + 2 * judge.overhead.sum() + _hops(judge, 0)[-1] + _hops(judge, 1)[-1])


def _all_ranks(judge: Judge) -> float:
    """The ranks share the work, and those of later stages begin later."""
    pipe = judge.pipe
    program = pipe.program
    seconds = _work(judge).sum()
    speeds = [min(judge.speed[list(stages)]) for stages in program.placement.stages_of]
    if pipe.asynchronous:
        return float(pipe.num_microbatches * seconds / sum(speeds))
    begin = _begins(judge)
    # Σ speed · (step - begin) ≥ the work of all, overheads and updates aside
    late = sum(speed * begin[stages[0]] for speed, stages in zip(speeds, program.placement.stages_of, strict=True))
    return float((pipe.num_microbatches * pipe.width * seconds + late) / sum(speeds))


def _begins(judge: Judge) -> Array:
    """Per stage, when a rank whose first stage it is can begin: each stage before has a layer at least."""
    stages = judge.pipe.num_stages
    begin: Array = judge.forward[:stages] / judge.speed.max() + _hops(judge, 0)
    return begin


def _largest_layer(judge: Judge) -> float:
    """Some rank has the longest layer."""
    return float(_work(judge).max() / judge.speed.max() * min(judge.units))


def _busiest_rank(judge: Judge, options: Options, low: float, limits: Limits, step: float) -> float:
    """One stage per rank: the least step at which the stages reach the end."""
    reach = _Reach(judge, options)
    if (judge.profile.num_layers + 1) ** 2 * judge.pipe.num_stages <= _CELLS:
        return max(low, reach.least())
    total = judge.units.max() * (_work(judge).sum() * 2 + 2 * judge.forward[-1]) / judge.speed.min()
    high = max(low, float(total + judge.units.max() * 2 * judge.overhead.sum() + judge.update[-1] / judge.speed.min()))
    high += float(_hops(judge, 0)[-1] + _hops(judge, 1)[-1])
    high = max(low, min(high, step * (1 + _FINE)))
    if not reach.reaches(high):
        return low
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if reach.reaches(middle) else (middle, high)
        if high - low <= _FINE * high or limits.over:
            break
    return low


class _Reach:
    """How far the stages reach if the step takes no longer than given."""

    def __init__(self, judge: Judge, options: Options) -> None:
        self.judge = judge
        profile = judge.profile
        if profile.swap_bandwidth is not None:
            profile = replace(profile, swap_bandwidth=_FREE)
        ranges, stages = range_table(profile), judge.pipe.num_stages
        shared: dict[object, StageBounds] = {}
        self.bounds: list[StageBounds] = []
        self.rows: list[list[_Row]] = []
        for s, facts in enumerate(judge.facts):
            key = facts, s == 0, s == stages - 1
            if key not in shared:
                shared[key] = StageBounds(profile, facts, options, ranges, first=s == 0, last=s == stages - 1)
            self.bounds.append(shared[key])
            self.rows.append(list(_rows(judge, shared[key], s)))

    def least(self) -> float:
        """The least step of any partition by these paths: a shortest path over all stages, where they are few.

        A stage has its own bound of what it must recompute here, which is closer than prices along the layers.
        """
        layers = self.judge.profile.num_layers
        start, stop = (each.ravel() for each in np.indices((layers + 1, layers + 1)))
        proper = stop > start
        best = np.full(layers + 1, np.inf)
        best[0] = 0.0
        for stage, bounds in enumerate(self.bounds):
            need = np.full((layers + 1, layers + 1), np.inf)
            a, b = start[proper], stop[proper]
            times, _ = bounds.times(a, b)
            extra = times - (bounds.base[b] - bounds.base[a] + bounds.overhead)
            extra[~(extra > 1e-9 * times) | ~np.isfinite(times)] = 0.0
            if bounds.swap_bandwidth is not None:
                extra[:] = 0.0
            found = np.zeros(len(a))
            for way in _ways(self.judge, stage):
                row, before, limit = _line(self.judge, way, stage, bounds.facts.speed)
                found = np.maximum(found, row[b] - before[a] - limit + way.again * extra)
            need[a, b] = np.where(np.isfinite(times), found, np.inf)
            best = np.maximum(best[:, None], need).min(axis=0)
        return float(best[-1]) if np.isfinite(best[-1]) else 0.0

    def reaches(self, step: float) -> bool:
        """Whether the last stage can end with the last layer."""
        layers, stages = self.judge.profile.num_layers, self.judge.pipe.num_stages
        low, high = 0, 0
        for stage, rows in enumerate(self.rows):
            window = slice(low, high + 1)
            stop = np.full(high + 1 - low, layers)
            for row in rows:
                bar = row.start[window] + (row.limit + step if row.timed else row.limit)
                found = np.searchsorted(row.stop, bar + 1e-12 * np.abs(bar), side="right") - 1
                stop = np.minimum(stop, found)
            stop = stop[stop > np.arange(low, high + 1)]
            if not len(stop):
                return False
            low, high = low + 1, min(int(stop.max()), layers - (stages - 1 - stage))
            if high < low:
                return False
        return high >= layers


@dataclass(frozen=True)
class _Row:
    """A stage of layers a .. b-1 is possible only if ``stop[b] ≤ start[a] + limit (+ step)``."""

    stop: Array
    start: Array
    limit: float
    timed: bool = True


@dataclass(frozen=True)
class _Way:
    """How often a path passes a rank's forwards, input and weight gradients, and the stages before and behind it."""

    own: tuple[int, int, int]
    before: tuple[int, int]
    """Forwards and backwards."""
    behind: tuple[int, int]
    again: int
    """Backwards that the path comes to by way of their recompute, and not by a message."""
    update: bool = False


def _rows(judge: Judge, bounds: StageBounds, stage: int) -> Iterator[_Row]:
    memory = bounds.least + bounds.fixed
    yield _Row(memory, memory, bounds.facts.memory, timed=False)
    prices = [(price, sums) for price, weight, sums in bounds.prices if weight == 0.0]
    prices = prices[:: max(1, len(prices) // _PRICES)]
    for number, way in enumerate(_ways(judge, stage)):
        stop, start, limit = _line(judge, way, stage, bounds.facts.speed)
        yield _Row(_least_after(stop), start, limit)
        for price, sums in prices if number < _PRICED else []:
            # What must be freed is recomputed at least at this price, before the backwards of the path.
            extra = way.again * (sums + price * bounds.fixed)
            yield _Row(_least_after(stop + extra), start + extra, limit + way.again * price * bounds.facts.memory)


def _line(judge: Judge, way: _Way, stage: int, speed: float) -> tuple[Array, Array, float]:
    """The weight of a path as a function of where the stage stops, where it starts, and a constant."""
    sums = judge.forward, judge.input_grad, judge.weight_grad
    own = sum((count * each for count, each in zip(way.own, sums, strict=True)), np.zeros_like(judge.forward)) / speed
    if way.update:
        own = own + judge.update / speed
    fastest = judge.speed.max()
    back = judge.input_grad + (0.0 if judge.pipe.split else judge.weight_grad)
    before = (way.before[0] * judge.forward + way.before[1] * back) / fastest
    behind = (way.behind[0] * judge.forward + way.behind[1] * back) / fastest
    passed = judge.overhead[:stage].sum() * sum(way.before) + judge.overhead[stage + 1 :].sum() * sum(way.behind)
    passed += judge.overhead[stage] * (way.own[0] + way.own[1])
    there, home = _hops(judge, 0), _hops(judge, 1)
    hops = way.before[0] * there[stage] + way.before[1] * home[stage]
    hops += way.behind[0] * (there[-1] - there[stage]) + way.behind[1] * (home[-1] - home[stage])
    return own - behind, own - before, -float(behind[-1] + passed + hops)


def _ways(judge: Judge, stage: int) -> list[_Way]:
    """The paths through a rank, the three that memory weighs on first."""
    pipe = judge.pipe
    if pipe.asynchronous:
        units = int(judge.units[stage])
        return [_Way((units, units, units), (0, 0), (0, 0), units)]
    row = pipe.program.rows[pipe.program.placement.ranks_of[stage][0]]
    kinds = [action.kind for action in row if LANE[action.kind] is Lane.COMPUTE]
    backs = [index for index, kind in enumerate(kinds) if kind in INPUT_GRADIENT]
    last_forward = max(index for index, kind in enumerate(kinds) if kind is Kind.F)
    split = pipe.split

    def counted(low: int, high: int) -> tuple[int, int, int]:
        part = kinds[low : high + 1]
        whole, halves, rest = (part.count(kind) for kind in (Kind.B, Kind.I, Kind.W))
        return part.count(Kind.F), whole + halves, whole + rest

    end, all_backs = len(kinds) - 1, len(backs)
    early = counted(0, last_forward)
    found = [
        _Way(counted(0, backs[-1]), (1, 1), (0, 0), all_backs),
        _Way(counted(backs[0], backs[-1]), (1, 1), (1, 1), all_backs - 1),
        _Way(counted(0, end), (1, 0), (0, 0), all_backs, update=True),
        _Way(counted(backs[0], end), (1, 0), (1, 1), all_backs - 1, update=True),
        _Way(early, (1, 1), (1, 1), early[1]),
    ]
    # A path that comes by all forwards passes this stage's as well, one that leaves by all backwards its backward.
    found[1] = _more(found[1], forward=True)
    found[3] = _more(found[3], forward=True)
    found[4] = _more(found[4], backward=True, split=split)
    if backs[0] < last_forward:
        own = counted(backs[0], last_forward)
        way = _Way(own, (2, 2), (2, 2), own[1] - 1)
        found.append(_more(_more(_home(way), forward=True), backward=True, split=split))
    return found


def _home(way: _Way) -> _Way:
    """Two units pass: the first there and back to this stage, the last on from here and home."""
    return replace(way, before=(1, 1))


def _more(way: _Way, *, forward: bool = False, backward: bool = False, split: bool = False) -> _Way:
    f, i, w = way.own
    return replace(way, own=(f + forward, i + backward, w + (backward and not split)))


def _least_after(row: Array) -> Array:
    """The largest sums that only grow and are nowhere above the given ones."""
    found: Array = np.minimum.accumulate(row[::-1])[::-1]
    return found
