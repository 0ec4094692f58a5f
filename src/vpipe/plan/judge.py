"""The judge of a search: the simulated step of many candidates at once.

A candidate is where the model is cut and what every stage recomputes and swaps. For one program its step is a longest
path whose weights are sums over layers (``schedule.batch``), so a table of prefix sums gives the weights of hundreds of
candidates, and one pass their steps. What a plan prints is ``predict``'s own number; the two agree to the last digits.

    structure   which stages have an ``R``, which an ``OUT`` and ``IN``: another program, another graph

Large programs take long to lay out. Beyond a few structures the judge uses one that has all of them: an ``R`` of no
length changes only how early a receive is posted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vpipe.plan.costs import Profile
from vpipe.plan.machine import Machine
from vpipe.plan.memory import num_actions
from vpipe.plan.pipe import Pipe, stage_facts
from vpipe.schedule.action import Kind
from vpipe.schedule.batch import Path, ProgramGraph
from vpipe.schedule.flat import CODE, KINDS
from vpipe.schedule.lower import lower
from vpipe.schedule.program import Program

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Structure = tuple[frozenset[int], frozenset[int]]
"""Stages that recompute, stages that swap."""

PLAIN: Structure = (frozenset(), frozenset())
_SMALL, _LAID_OUT = 300, (60_000, 2_500)
"""Nodes of all structures that are laid out exactly, where one has few and where it has many."""


@dataclass(frozen=True)
class Candidate:
    """Where to cut, and per stage the seconds that a unit recomputes and that a swap takes one way."""

    cuts: tuple[int, ...]
    again: tuple[float, ...] = ()
    swap: tuple[float, ...] = ()

    @property
    def structure(self) -> Structure:
        again, swap = (frozenset(s for s, time in enumerate(times) if time > 0) for times in (self.again, self.swap))
        return again, swap


class Judge:
    """Steps of candidates for one profile, schedule and machine."""

    def __init__(self, profile: Profile, pipe: Pipe, machine: Machine) -> None:
        self.profile, self.pipe, self.machine = pipe.charged(profile), pipe, machine
        layers, stages = self.profile.layers, pipe.num_stages
        self.facts = stage_facts(pipe.program, machine)
        self.speed = np.array([fact.speed for fact in self.facts])
        self.forward, self.input_grad, self.weight_grad, self.update, self.parameters = (
            _prefix([getattr(layer, name) for layer in layers])
            for name in ("forward", "input_grad", "weight_grad", "update", "parameter_bytes")
        )
        self.cut_bytes = np.array(self.profile.cut_bytes, dtype=np.float64)
        last = stages - 1
        actions = [num_actions(first=s == 0, last=s == last) / 2 for s in range(stages)]
        self.overhead = self.profile.action_overhead * np.array(actions)
        ranks = pipe.program.placement.ranks_of
        ways = [[(ranks[s], ranks[min(s + 1, last)]) for s in range(stages)]]
        ways.append([(ranks[s], ranks[max(s - 1, 0)]) for s in range(stages)])
        self.per_byte = np.array([[machine.seconds_per_byte(self.profile, *pair) for pair in way] for way in ways])
        self.lag = np.array([[machine.lag(self.profile, *pair) for pair in way] for way in ways])
        once = [machine.reduce_time(self.profile, ranks[s], 0.0) for s in range(stages)]
        more = [machine.reduce_time(self.profile, ranks[s], 1e9) for s in range(stages)]
        self.reduce = np.array(once), (np.array(more) - np.array(once)) / 1e9
        self.units = np.array(pipe.units, dtype=np.float64)
        self.held = np.zeros((pipe.program.num_ranks, stages))
        for rank, mine in enumerate(pipe.program.placement.stages_of):
            self.held[rank, list(mine)] = 1.0
        self.work = 0
        """Nodes passed: what the effort of a search is counted in."""
        self.exact = True
        """Whether every candidate was judged by its own structure."""
        self._batches: dict[Structure, list[ProgramGraph]] = {}
        self._programs: list[Program] | None = None

    @property
    def num_nodes(self) -> int:
        """Of the plain graph."""
        return sum(batch.size for batch in self._laid_out(PLAIN))

    def steps(self, candidates: Sequence[Candidate]) -> Array:
        """The step of each candidate."""
        found = np.zeros(len(candidates))
        groups: dict[Structure, list[int]] = defaultdict(list)
        for index, candidate in enumerate(candidates):
            groups[candidate.structure].append(index)
        for structure, members in groups.items():
            found[members] = self._steps(structure, [candidates[index] for index in members])
        return found

    def path(self, candidate: Candidate, structure: Structure | None = None) -> Path:
        """The longest path of one candidate: the weight it has for another is a lower bound of that one's step."""
        batch = self._laid_out(candidate.structure if structure is None else structure)[0]
        price, hop = self.prices([candidate])
        return batch.path(batch.table(price, hop, self.lag), self.lag)

    def weights(self, paths: Iterable[Path], candidates: Sequence[Candidate]) -> Array:
        """The most that one of the paths weighs for each candidate."""
        batch = self._laid_out(PLAIN)[0]
        most = np.zeros(len(candidates))
        if not candidates:
            return most
        price, hop = self.prices(candidates)
        table = batch.table(price, hop, self.lag)
        for path in paths:
            np.maximum(most, path.weights(table), out=most)
        return most

    def busiest(self, price: Array) -> Array:
        """What the busiest rank computes in a step, updates aside."""
        kinds = [CODE[kind] for kind in (Kind.F, Kind.I, Kind.W, Kind.R)]
        work: Array = (self.held @ (self.units[:, None] * price[kinds].sum(axis=0))).max(axis=0)
        return work

    def prices(self, candidates: Sequence[Candidate]) -> tuple[Array, Array]:
        """``price[kind, stage, candidate]`` and ``hop[direction, stage, candidate]`` in seconds."""
        cuts = np.array([candidate.cuts for candidate in candidates], np.int64)
        stages = self.pipe.num_stages

        def summed(prefix: Array) -> Array:
            found: Array = (prefix[cuts[:, 1:]] - prefix[cuts[:, :-1]]).T
            return found

        price = np.zeros((len(KINDS), stages, len(candidates)))
        speed, overhead = self.speed[:, None], self.overhead[:, None]
        price[CODE[Kind.F]] = summed(self.forward) / speed + overhead
        price[CODE[Kind.I]] = summed(self.input_grad) / speed + overhead
        price[CODE[Kind.W]] = summed(self.weight_grad) / speed
        price[CODE[Kind.B]] = price[CODE[Kind.I]] + price[CODE[Kind.W]]
        price[CODE[Kind.STEP]] = summed(self.update) / speed
        price[CODE[Kind.REDUCE]] = self.reduce[0][:, None] + self.reduce[1][:, None] * summed(self.parameters)
        if any(candidate.again for candidate in candidates):
            price[CODE[Kind.R]] = np.array([candidate.again or (0.0,) * stages for candidate in candidates]).T
        if any(candidate.swap for candidate in candidates):
            swap = np.array([candidate.swap or (0.0,) * stages for candidate in candidates]).T
            price[CODE[Kind.OUT]] = price[CODE[Kind.IN]] = swap
        sides = self.cut_bytes[cuts[:, 1:]].T, self.cut_bytes[cuts[:, :-1]].T
        hop = np.stack([side * per_byte[:, None] for side, per_byte in zip(sides, self.per_byte, strict=True)])
        return price, hop

    def _steps(self, structure: Structure, candidates: Sequence[Candidate]) -> Array:
        price, hop = self.prices(candidates)
        spans = []
        for batch in self._laid_out(structure):
            self.work += batch.size * len(candidates)
            spans.append(batch.makespans(batch.table(price, hop, self.lag), self.lag))
        return spans[0] if len(spans) == 1 else np.maximum(spans[1] - spans[0], self.busiest(price))

    def _laid_out(self, structure: Structure) -> list[ProgramGraph]:
        """The graph of a structure; of an asynchronous schedule also that of one batch more."""
        if structure not in self._batches and structure != PLAIN:
            size = sum(batch.size for batch in self._laid_out(PLAIN))
            if size * (len(self._batches) + 1) > _LAID_OUT[size > _SMALL]:
                self.exact = False
                everywhere = frozenset(range(self.pipe.num_stages))
                structure = (everywhere if structure[0] else frozenset(), everywhere if structure[1] else frozenset())
        if structure not in self._batches:
            if self._programs is None:
                count, pipe = self.pipe.num_batches, self.pipe
                self._programs = [pipe.program, *([pipe.batches(count + 1)] if pipe.asynchronous else [])]
            self._batches[structure] = [
                ProgramGraph(
                    lower(program, recompute_stages=structure[0], swap_stages=structure[1]),
                    blocking=self.pipe.entry.blocking,
                )
                for program in self._programs
            ]
        return self._batches[structure]


def _prefix(values: Sequence[float]) -> Array:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
