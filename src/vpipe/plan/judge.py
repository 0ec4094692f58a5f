"""The judge of a search: the simulated step of many candidates at once.

A candidate is where the model is cut and what every stage recomputes and swaps. For one program its step is a longest
path whose weights are sums over layers (``schedule.graph``), so a table of prefix sums gives the weights of hundreds of
candidates, and one pass their steps. What a plan prints is ``predict``'s own number; the two agree to the last digits.

    structure   which stages have an ``R``, which an ``OUT`` and ``IN``: another program, another graph

Large programs take long to lay out. Beyond a few structures the judge uses one that has all of them: an ``R`` of no
length changes only how early a receive is posted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vpipe.plan.costs import Profile
from vpipe.plan.machine import Machine
from vpipe.plan.pipe import Pipe
from vpipe.plan.sites import stage_sites
from vpipe.schedule.action import Kind
from vpipe.schedule.flat import CODE, KINDS
from vpipe.schedule.graph import PricedPath, ProgramGraph
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import PRICE

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
StageChoices = tuple[frozenset[int], frozenset[int]]
"""Stages that recompute, stages that swap."""

PLAIN: StageChoices = (frozenset(), frozenset())
_SMALL, _LAID_OUT = 300, (60_000, 1_500)
"""Nodes of all structures that are laid out exactly, where one has few and where it has many."""


@dataclass(frozen=True)
class Candidate:
    """Where to cut, and per stage the seconds that a unit recomputes and that a swap takes one way."""

    cuts: tuple[int, ...]
    again: tuple[float, ...] = ()
    swap: tuple[float, ...] = ()

    @property
    def structure(self) -> StageChoices:
        again, swap = (frozenset(s for s, time in enumerate(times) if time > 0) for times in (self.again, self.swap))
        return again, swap


class Judge:
    """Steps of candidates for one profile, schedule and machine."""

    def __init__(self, profile: Profile, pipe: Pipe, machine: Machine) -> None:
        self.profile, self.pipe, self.machine = pipe.charged(profile), pipe, machine
        self.sites = stage_sites(profile, pipe, machine)
        sums = {id(site.profile): _sums(site.profile) for site in self.sites}
        self.forward, self.input_grad, self.weight_grad, self.update, self.parameters = np.stack(
            [sums[id(site.profile)] for site in self.sites], axis=1
        )
        """``[stage, layer]``: what the layers before this one cost where the stage runs."""
        self.cut_bytes = np.array(self.profile.cut_bytes, dtype=np.float64)
        self.back_bytes = np.array(self.profile.back_bytes, dtype=np.float64)
        self.overhead = np.array([site.overhead for site in self.sites])
        links = [[site.ahead for site in self.sites], [site.back for site in self.sites]]
        self.per_byte = np.array([[link.per_byte for link in way] for way in links])
        self.lag = np.array([[link.latency for link in way] for way in links])
        self.reduce = np.array([site.reduce for site in self.sites]).T
        stages = pipe.num_stages
        self.units = np.array(pipe.units, dtype=np.float64)
        self.held = np.zeros((pipe.program.num_ranks, stages))
        for rank, mine in enumerate(pipe.program.placement.stages_of):
            self.held[rank, list(mine)] = 1.0
        self.work = 0
        """Nodes passed: what the effort of a search is counted in."""
        self.exact = True
        """Whether every candidate was judged by its own structure."""
        self._batches: dict[StageChoices, list[ProgramGraph]] = {}
        self._programs: list[Program] | None = None

    @property
    def num_nodes(self) -> int:
        """Of the plain graph."""
        return sum(batch.size for batch in self._laid_out(PLAIN))

    def steps(self, candidates: Sequence[Candidate]) -> Array:
        """The step of each candidate."""
        found = np.zeros(len(candidates))
        groups: dict[StageChoices, list[int]] = defaultdict(list)
        for index, candidate in enumerate(candidates):
            groups[candidate.structure].append(index)
        for structure, members in groups.items():
            found[members] = self._steps(structure, [candidates[index] for index in members])
        return found

    def path(self, candidate: Candidate) -> PricedPath:
        """The longest path of one candidate: the weight it has for another is a lower bound of that one's step."""
        batch = self._laid_out(candidate.structure)[0]
        price, hop = self.prices([candidate])
        return batch.path(batch.table(price, hop, self.lag), self.lag)

    def weights(self, path: PricedPath, candidates: Sequence[Candidate]) -> Array:
        """What a path weighs for each candidate."""
        price, hop = self.prices(candidates)
        weights: Array = path.weights(self._laid_out(PLAIN)[0].table(price, hop, self.lag))
        return weights

    def busiest(self, price: Array) -> Array:
        """What the busiest rank computes in a step, updates aside."""
        kinds = [CODE[kind] for kind in (Kind.F, Kind.I, Kind.W, Kind.R)]
        work: Array = (self.held @ (self.units[:, None] * price[kinds].sum(axis=0))).max(axis=0)
        return work

    def prices(self, candidates: Sequence[Candidate]) -> tuple[Array, Array]:
        """``price[kind, stage, candidate]`` and ``hop[direction, stage, candidate]`` in seconds."""
        cuts = np.array([candidate.cuts for candidate in candidates], np.int64)
        stages = self.pipe.num_stages

        each = np.arange(stages)

        def summed(prefix: Array) -> Array:
            found: Array = (prefix[each, cuts[:, 1:]] - prefix[each, cuts[:, :-1]]).T
            return found

        overhead, nothing = self.overhead[:, None], (0.0,) * stages
        parts = {
            "forward": summed(self.forward) + overhead,
            "input_grad": summed(self.input_grad) + overhead,
            "weight_grad": summed(self.weight_grad),
            "step": summed(self.update),
            "reduce": self.reduce[0][:, None] + self.reduce[1][:, None] * summed(self.parameters),
            "recompute": np.array([candidate.again or nothing for candidate in candidates]).T,
            "swap": np.array([candidate.swap or nothing for candidate in candidates]).T,
        }
        price = np.zeros((len(KINDS), stages, len(candidates)))
        for kind in KINDS:
            price[CODE[kind]] = sum(parts[part] for part in PRICE[kind])
        sides = self.cut_bytes[cuts[:, 1:]].T, self.back_bytes[cuts[:, :-1]].T
        hop = np.stack([side * per_byte[:, None] for side, per_byte in zip(sides, self.per_byte, strict=True)])
        return price, hop

    def _steps(self, structure: StageChoices, candidates: Sequence[Candidate]) -> Array:
        price, hop = self.prices(candidates)
        spans = []
        for batch in self._laid_out(structure):
            self.work += batch.size * len(candidates)
            spans.append(batch.makespans(batch.table(price, hop, self.lag), self.lag))
        return spans[0] if len(spans) == 1 else np.maximum(spans[1] - spans[0], self.busiest(price))

    def _laid_out(self, structure: StageChoices) -> list[ProgramGraph]:
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
                ProgramGraph(self.pipe.lowered(program, *structure), blocking=self.pipe.entry.blocking)
                for program in self._programs
            ]
        return self._batches[structure]


def _sums(profile: Profile) -> Array:
    """What the layers before each layer add up to: forward, both gradients, update, bytes of weights."""
    names = ("forward", "input_grad", "weight_grad", "update", "parameter_bytes")
    table = np.array([[getattr(layer, name) for layer in profile.layers] for name in names], dtype=np.float64)
    return np.concatenate([np.zeros((len(names), 1)), np.cumsum(table, axis=1)], axis=1)
