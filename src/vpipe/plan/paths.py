"""Paths through a step that every schedule has. A step is the longest path of its program, so each bounds it.

a unit       forwards and backwards of all layers, one after the other
all ranks    the work of all, divided among them
a rank       comes to work, works without a pause, and its result goes on:

    it begins with its first forward, after the forwards of the stages before it
           or with its first backward, after all forwards and the backwards of the stages behind it
    it ends   with its last action
           or with its last backward, then come the backwards of the stages before it
           or with its last forward, then come the forwards behind it and all backwards

a swap lane  after the first forward all units out and in again, one after the other, then the last backward
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from vpipe.plan.judge import Array, Judge
from vpipe.schedule.action import Kind
from vpipe.schedule.lower import swap
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import INPUT_GRADIENT, LANE, Lane


@dataclass(frozen=True)
class StagePath:
    """How often a path passes a rank's forwards, input and weight gradients, and the stages before and behind it."""

    own: tuple[int, int, int]
    before: tuple[int, int]
    """Forwards and backwards."""
    behind: tuple[int, int]
    again: int
    """Backwards that the path comes to by way of their recompute, and not by a message."""
    update: bool = False
    lane: int = 0
    """Swaps, out and in alike."""


class Paths:
    """The weights of paths for one schedule on one machine."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        own = [judge.forward, judge.input_grad, judge.weight_grad]
        self.own = own
        self.work: Array = own[0] + own[1] + own[2]
        # Which stage a layer is passed in is not known: it counts as where it is quickest.
        self.fastest = [_prefix(np.diff(each, axis=1).min(axis=0)) for each in own]
        self.there, self.home = self._hops(0), self._hops(1)

    def _hops(self, way: int) -> Array:
        """Per stage the least that a message waits on its way to it (0: forwards, 1: backwards from it), summed from
        the first stage on."""
        judge = self.judge
        inner = (judge.back_bytes if way else judge.cut_bytes)[1:-1]
        least = float(inner.min()) if len(inner) else 0.0
        if judge.pipe.entry.blocking:
            return np.zeros(judge.pipe.num_stages)
        part = slice(1, None) if way else slice(None, -1)
        return _prefix(judge.lag[way][part] + least * judge.per_byte[way][part])

    def unit(self) -> float:
        """One unit on its way there and back; asynchronous pipes have it hidden behind others."""
        if self.judge.pipe.asynchronous:
            return 0.0
        there = sum(each[-1] for each in self.fastest[: 2 if self.judge.pipe.split else 3])
        return float(there + 2 * self.judge.overhead.sum() + self.there[-1] + self.home[-1])

    def all_ranks(self) -> float:
        """The ranks share the work, and those of later stages begin later; overheads and updates aside."""
        pipe = self.judge.pipe
        quickest = np.diff(sum(self.fastest, np.zeros_like(self.work[0])))
        # A second of a rank is worth so many of the quickest, at most.
        own = np.diff(self.work, axis=1)
        worth = np.where(own > 0, quickest / np.where(own > 0, own, 1.0), 0.0).max(axis=1)
        ranks = pipe.program.placement.stages_of
        rates = [max(worth[list(stages)]) for stages in ranks]
        if not sum(rates):
            return 0.0
        if pipe.asynchronous:
            return float(pipe.num_microbatches * quickest.sum() / sum(rates))
        begin = self.fastest[0][: pipe.num_stages] + self.there  # each stage before has a layer at least
        late = sum(rate * begin[stages[0]] for rate, stages in zip(rates, ranks, strict=True))
        return float((pipe.num_microbatches * pipe.width * quickest.sum() + late) / sum(rates))

    def largest_layer(self) -> float:
        """Some rank has the longest layer."""
        return float(np.diff(self.work, axis=1).min(axis=0).max() * min(self.judge.units))

    def line(self, way: StagePath, stage: int) -> tuple[Array, Array, float]:
        """The weight of a path as a function of where the stage stops, less one of where it starts, and a constant."""
        judge = self.judge
        own = sum((count * each[stage] for count, each in zip(way.own, self.own, strict=True)), np.zeros(1))
        if way.update:
            own = own + judge.update[stage]
        forward = self.fastest[0]
        back = self.fastest[1] + (0.0 if judge.pipe.split else self.fastest[2])
        before = way.before[0] * forward + way.before[1] * back
        behind = way.behind[0] * forward + way.behind[1] * back
        passed = judge.overhead[:stage].sum() * sum(way.before) + judge.overhead[stage + 1 :].sum() * sum(way.behind)
        passed += judge.overhead[stage] * (way.own[0] + way.own[1])
        hops = way.before[0] * self.there[stage] + way.before[1] * self.home[stage]
        hops += way.behind[0] * (self.there[-1] - self.there[stage])
        hops += way.behind[1] * (self.home[-1] - self.home[stage])
        return own - behind, own - before, float(behind[-1] + passed + hops)

    def ways(self, stage: int) -> list[StagePath]:
        """The paths through a stage's rank, the three that memory weighs on first; of a rank with several stages, or
        between two drains, just the work of the stage."""
        pipe = self.judge.pipe
        if pipe.asynchronous or pipe.stages_per_rank > 1:
            units = int(self.judge.units[stage])
            return [StagePath((units, units, units), (0, 0), (0, 0), units)]
        row = pipe.program.rows[pipe.program.placement.rank(stage, 0)]
        kinds = [action.kind for action in row if LANE[action.kind] is Lane.COMPUTE]
        backs = [index for index, kind in enumerate(kinds) if kind in INPUT_GRADIENT]
        last_forward = max(index for index, kind in enumerate(kinds) if kind is Kind.F)
        split, all_backs = pipe.split, len(backs)
        early = _counted(kinds[: last_forward + 1])
        found = [
            StagePath(_counted(kinds[: backs[-1] + 1]), (1, 1), (0, 0), all_backs),
            StagePath(_counted(kinds[backs[0] : backs[-1] + 1]), (1, 1), (1, 1), all_backs - 1),
            StagePath(_counted(kinds), (1, 0), (0, 0), all_backs, update=True),
            StagePath(_counted(kinds[backs[0] :]), (1, 0), (1, 1), all_backs - 1, update=True),
            StagePath(early, (1, 1), (1, 1), early[1]),
        ]
        # A path that comes by all forwards passes this stage's as well, one that leaves by all backwards its backward.
        found[1] = _more(found[1], forward=True)
        found[3] = _more(found[3], forward=True)
        found[4] = _more(found[4], backward=True, split=split)
        if backs[0] < last_forward:
            # Two units pass: the first there and back to this stage, the last on from here and home.
            own = _counted(kinds[backs[0] : last_forward + 1])
            way = StagePath(own, (1, 1), (2, 2), own[1] - 1)
            found.append(_more(_more(way, forward=True), backward=True, split=split))
        return found

    @cached_property
    def _swapped(self) -> Program:
        return swap(self.judge.pipe.program, range(self.judge.pipe.num_stages))

    def lanes(self, stage: int) -> list[StagePath]:
        """The path by way of a rank's swap lane, if all of its units are swapped that can be."""
        pipe = self.judge.pipe
        if pipe.asynchronous or pipe.stages_per_rank > 1:
            return []
        row = self._swapped.rows[pipe.program.placement.ranks_of[stage][0]]
        swapped = sum(action.kind is Kind.IN for action in row)
        own = (1, 1, 0 if pipe.split else 1)
        return [StagePath(own, (1, 1), (0, 0), 1, lane=2 * swapped)] if swapped else []


def _counted(kinds: Sequence[Kind]) -> tuple[int, int, int]:
    whole, halves, rest = (kinds.count(kind) for kind in (Kind.B, Kind.I, Kind.W))
    return kinds.count(Kind.F), whole + halves, whole + rest


def _more(way: StagePath, *, forward: bool = False, backward: bool = False, split: bool = False) -> StagePath:
    f, i, w = way.own
    return replace(way, own=(f + forward, i + backward, w + (backward and not split)))


def _prefix(values: Array) -> Array:
    return np.concatenate([[0.0], np.cumsum(values)])
