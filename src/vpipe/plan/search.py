"""The search for the best layout, judged by the simulated step.

It begins with cuts that are balanced by time and by memory (``starts``), and with those that the bound likes best
(``floor``). From the best of them the search moves cuts, alone or several in a row, while that makes the step shorter.
It knows beforehand which moves are in vain: the longest path of the layout at hand weighs, after a move, no more than
the step after the move.

Where a model has few partitions all of them are looked at, with every choice of what to keep. The bound rules most of
them out; if none of the rest is shorter, the layout is proven to be the best.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, product
from math import comb, prod

import numpy as np

from vpipe.plan.floor import Floor
from vpipe.plan.judge import Array, Candidate, Judge
from vpipe.plan.layout import PlannedLayout
from vpipe.plan.limits import Limits
from vpipe.plan.memory import Choice
from vpipe.plan.packing import Packer, Packing

SLACK = 1e-9
"""Steps closer than this are equal: the sums of thousands of floats are no better."""
_NODES, _NODES_EACH, _MOST_NODES = 100_000, 400, 3_300_000
"""Effort 1: nodes of the graph that are passed, and how often the whole graph besides; in all no more than a few
seconds take."""
_PRICING = 8
"""Nodes that take as long as pricing one layer."""
_CHUNK = 1_000_000
_ALL_RUNS = 24
"""Up to so many stages every run of cuts is moved, beyond only short ones."""
_FEW_CUTS, _FEW_LAYOUTS = 6_000, 20_000
"""Partitions that are all looked at, and layouts."""

Cuts = tuple[int, ...]
CutsAndPackings = tuple[Cuts, tuple[Packing, ...]]
"""Cuts, and what the stages of each group do."""


@dataclass(frozen=True)
class Found:
    """A layout that fits, its step by the judge, and whether all others were looked at."""

    layout: PlannedLayout
    step: float
    proven: bool = False


class Search:
    """One schedule on one machine."""

    def __init__(self, judge: Judge, packer: Packer, limits: Limits) -> None:
        self.judge, self.packer, self.limits = judge, packer, limits
        self.floor = Floor(judge, packer.options, limits=Limits(deadline=0.0))
        self.known: dict[Cuts, float] = {}
        """The step of cuts that fit, every group with the packer's own packing."""
        self.budget = int(limits.effort * min(_NODES + _NODES_EACH * judge.num_nodes, _MOST_NODES))
        self.synchronous = not judge.pipe.asynchronous
        self.best: tuple[float, CutsAndPackings] | None = None
        self._left = 0.0

    def run(self, starts: Iterable[Cuts]) -> Found | None:
        """The best layout found from the given cuts; ``None`` where none of them fits."""
        self._evaluate(starts)
        if self.best is None:
            return None
        self.floor = Floor(self.judge, self.packer.options, self.best[0], self.limits)
        self._evaluate(self.floor.proposals())
        for _, cuts in sorted((step, cuts) for cuts, step in self.known.items())[:3]:
            self._descend(cuts)
        proven = self._look_at_all()
        step, layout = self.best
        return Found(self._layout(*layout), step, proven)

    def _layout(self, cuts: Cuts, packings: Sequence[Packing]) -> PlannedLayout:
        choices: list[tuple[Choice, ...]] = [()] * self.judge.pipe.num_stages
        for group, packing in zip(self.packer.groups, packings, strict=True):
            for stage, chosen in zip(group, packing.choices, strict=True):
                choices[stage] = chosen
        return PlannedLayout(cuts, tuple(choices))

    # ── what cuts cost ────────────────────────────────────────────────────────────────────────────────────────────

    def _cells(self, cuts: Cuts) -> list[tuple[tuple[int, int], ...]]:
        """Per group, where its stages begin and end."""
        return [tuple((cuts[stage], cuts[stage + 1]) for stage in group) for group in self.packer.groups]

    def _packings(self, cuts: Cuts) -> tuple[Packing, ...] | None:
        """What every group does; ``None`` where one does not fit."""
        packings = []
        for group, cells in enumerate(self._cells(cuts)):
            packing = self.packer.packing(group, cells)
            if packing is None:
                return None
            packings.append(packing)
        return tuple(packings)

    def _candidate(self, cuts: Cuts, packings: Sequence[Packing]) -> Candidate:
        again, swap = [0.0] * self.judge.pipe.num_stages, [0.0] * self.judge.pipe.num_stages
        for group, packing in zip(self.packer.groups, packings, strict=True):
            for stage, a, s in zip(group, packing.again, packing.swap, strict=True):
                again[stage], swap[stage] = a, s
        return Candidate(cuts, tuple(again), tuple(swap))

    def _evaluate(self, tried: Iterable[Cuts]) -> list[tuple[float, Cuts]]:
        """The steps of those cuts that fit."""
        tried = list(dict.fromkeys(tried))
        packed = [(cuts, packings) for cuts in tried if cuts not in self.known and (packings := self._packings(cuts))]
        self._offer(packed)
        return [(self.known[cuts], cuts) for cuts in tried if cuts in self.known]

    def _offer(self, layouts: Sequence[CutsAndPackings], *, known: bool = True) -> None:
        """Judge layouts, and keep the best; ``known``: their packings are the packer's own."""
        steps = self.judge.steps([self._candidate(*layout) for layout in layouts]).tolist()
        for layout, step in zip(layouts, steps, strict=True):
            if known:
                self.known[layout[0]] = step
            if self.best is None or step < self.best[0] * (1 - SLACK):
                self.best = step, layout

    @property
    def _spent(self) -> bool:
        return self.judge.work + _PRICING * self.packer.work > self.budget or self.limits.over

    # ── moving ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _descend(self, cuts: Cuts) -> None:
        """Moves on while some move makes the step shorter."""
        step = self.known[cuts]
        chunk = max(16, min(256, _CHUNK // self.judge.num_nodes))
        moved: Cuts | None = cuts
        while moved is not None:
            cuts, moved = moved, None
            promising = self._promising(cuts, step)
            while moved is None and not self._spent and (some := list(islice(promising, chunk))):
                value, best = min(self._evaluate(some), default=(step, cuts))
                if value < step * (1 - SLACK):
                    step, moved = value, best

    def _promising(self, cuts: Cuts, step: float) -> Iterator[Cuts]:
        """Moves that may be shorter, the most promising first."""
        moves = list(dict.fromkeys(moves_of(cuts)))
        packings = self._packings(cuts)
        if not moves or packings is None:
            return
        floors, least = self._at_least(moves)
        if self.synchronous:
            candidate = self._candidate(cuts, packings)
            floors = np.maximum(floors, self.judge.weights(self.judge.path(candidate), least))
        for index in np.argsort(floors, kind="stable").tolist():
            if floors[index] >= step * (1 - SLACK):
                return
            yield moves[index]

    def _at_least(self, cuts: Sequence[Cuts]) -> tuple[Array, list[Candidate]]:
        """What layouts with these cuts take at least, and candidates that recompute as little as they must."""
        floors, again = self.floor.of(np.array(cuts, np.int64))
        least = [Candidate(each, tuple(row)) for each, row in zip(cuts, again.tolist(), strict=True)]
        return np.maximum(floors, self.judge.busiest(self.judge.prices(least)[0])), least

    # ── all of them ───────────────────────────────────────────────────────────────────────────────────────────────

    def _look_at_all(self) -> bool:
        """Whether every layout was looked at, or ruled out by a path."""
        layers, stages = self.judge.profile.num_layers, self.judge.pipe.num_stages
        if comb(layers - 1, stages - 1) > _FEW_CUTS * min(self.limits.effort, 10.0) or self.limits.over:
            return False
        cuts = [(0, *inner, layers) for inner in combinations(range(1, layers), stages - 1)]
        self._left = _FEW_LAYOUTS * min(self.limits.effort, 10.0)
        for some in _chunks(self._all(cuts, self._at_least(cuts)[0]), 256):
            self._offer(some, known=False)
        return self._left >= 0 and self.judge.exact

    def _all(self, cuts: list[Cuts], floors: Array) -> Iterator[CutsAndPackings]:
        """Every layout that is not ruled out; ``_left`` becomes negative where there are too many."""
        for index in np.argsort(floors, kind="stable").tolist():
            if self.best is not None and floors[index] >= self.best[0] * (1 - SLACK):
                return
            ways = self._every(cuts[index])
            self._left = -1 if ways is None or self.limits.over else self._left - prod(map(len, ways))
            if ways is None or self._left < 0:
                return
            for chosen in product(*ways):
                yield cuts[index], chosen

    def _every(self, cuts: Cuts) -> list[list[Packing]] | None:
        ways = []
        for group, cells in enumerate(self._cells(cuts)):
            every = self.packer.every(group, cells)
            if every is None:
                return None
            ways.append(every)
        return ways


def moves_of(cuts: Cuts) -> Iterator[Cuts]:
    """Every run of inner cuts shifted by a layer or two, single cuts also further, where no stage is left empty."""
    inner = len(cuts) - 1
    longest = inner if inner <= _ALL_RUNS else 6
    for first in range(1, inner):
        for last in range(first, min(inner, first + longest)):
            for by in (-1, 1, -2, 2) if last > first else (-1, 1, -2, 2, -3, 3, -5, 5):
                low, high = cuts[first] + by, cuts[last] + by
                if low > cuts[first - 1] and high < cuts[last + 1]:
                    yield (*cuts[:first], *(cut + by for cut in cuts[first : last + 1]), *cuts[last + 1 :])


def _chunks(items: Iterable[CutsAndPackings], size: int) -> Iterator[list[CutsAndPackings]]:
    iterator = iter(items)
    while some := list(islice(iterator, size)):
        yield some
