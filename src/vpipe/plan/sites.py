"""Where a stage runs, and what any layers would cost there: stated once, asked by all.

The prediction adds up the layers that a stage has, the judge those of hundreds of candidates, the bound those of every
stage that is possible. All ask a ``StageSite``: the profile as the stage's ranks pay for it (``Machine.on``), what the
schedule makes the stage hold, and its links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from vpipe.plan.costs import Profile
from vpipe.plan.machine import Machine
from vpipe.plan.memory import Choice, LayerBytes, MemoryTerms, StageFacts, stage_memory
from vpipe.plan.pipe import Pipe, stage_facts
from vpipe.schedule.timeline import StageCosts


@dataclass(frozen=True)
class StageLink:
    """To the ranks of a neighbouring stage: what a byte occupies it, and what a message waits beside."""

    per_byte: float
    latency: float


@dataclass(frozen=True)
class StageSite:
    """A stage of a schedule on its ranks."""

    profile: Profile
    """As these ranks pay for it."""
    facts: StageFacts
    first: bool
    last: bool
    ahead: StageLink
    back: StageLink
    reduce: tuple[float, float] = (0.0, 0.0)
    """Seconds of a reduction over the replicas, and for each byte of weights."""

    @property
    def overhead(self) -> float:
        """The runtime's own time of a forward, and of a backward: the action, and a message on each side that has a
        neighbour."""
        return self.profile.action_overhead * num_actions(first=self.first, last=self.last) / 2

    @cached_property
    def layer_bytes(self) -> LayerBytes:
        """What every layer would add to the stage, by what becomes of it."""
        return LayerBytes.of(self.profile, self.facts)

    def memory(self, start: int, stop: int, choices: Sequence[Choice]) -> MemoryTerms:
        """The bytes of layers ``start .. stop-1``."""
        return stage_memory(self.profile, start, stop, choices, self.facts, first=self.first, last=self.last)

    def recompute(self, start: int, choices: Sequence[Choice]) -> float:
        """Seconds of a unit's ``R``."""
        layers = self.profile.layers
        return sum(layers[start + i].forward for i, choice in enumerate(choices) if choice is Choice.RECOMPUTE)

    def swap(self, start: int, choices: Sequence[Choice]) -> float:
        """Seconds of a unit's ``OUT``, and as many of its ``IN``."""
        layers, bandwidth = self.profile.layers, self.profile.swap_bandwidth
        size = sum(layers[start + i].saved_bytes for i, choice in enumerate(choices) if choice is Choice.SWAP)
        if size and bandwidth is None:
            raise ValueError("a layer is swapped, but the profile has no swap bandwidth")
        return size / bandwidth if bandwidth else 0.0

    def costs(self, start: int, stop: int, choices: Sequence[Choice]) -> StageCosts:
        """What the simulator is told of the stage."""
        layers = self.profile.layers[start:stop]
        return StageCosts(
            forward=sum(layer.forward for layer in layers) + self.overhead,
            input_grad=sum(layer.input_grad for layer in layers) + self.overhead,
            weight_grad=sum(layer.weight_grad for layer in layers),
            recompute=self.recompute(start, choices),
            swap=self.swap(start, choices),
            reduce=self.reduce[0] + self.reduce[1] * sum(layer.parameter_bytes for layer in layers),
            step=sum(layer.update for layer in layers),
            transfer=self.profile.cut_bytes[stop] * self.ahead.per_byte,
            transfer_back=self.profile.back_bytes[start] * self.back.per_byte,
            latency=self.ahead.latency,
            latency_back=self.back.latency,
        )


def num_actions(*, first: bool, last: bool) -> int:
    """Actions of one unit at a stage: ``F``, ``B``, and a send and a receive on each side that has a neighbour."""
    return 2 + 2 * (not first) + 2 * (not last)


def unit_time(costs: StageCosts) -> float:
    """Seconds of one unit: the longer of the compute lane and the swap lane, which run side by side."""
    return max(costs.forward + costs.input_grad + costs.weight_grad + costs.recompute, 2 * costs.swap)


def stage_sites(profile: Profile, pipe: Pipe, machine: Machine) -> list[StageSite]:
    """Every stage of a schedule on the ranks of a machine; the profile as the schedule charges it."""
    profile = pipe.charged(profile)
    ranks, last = pipe.program.placement.ranks_of, pipe.num_stages - 1
    found = []
    all_facts = stage_facts(pipe.program, machine, messages=pipe.messages if profile.on_device else ())
    for s, (facts, own) in enumerate(zip(all_facts, machine.on(profile, ranks[: last + 1]), strict=True)):
        ahead, back = (
            StageLink(machine.seconds_per_byte(profile, ranks[s], to), machine.lag(profile, ranks[s], to))
            for to in (ranks[min(s + 1, last)], ranks[max(s - 1, 0)])
        )
        once, more = (machine.reduce_time(profile, ranks[s], size) for size in (0.0, 1e9))
        found.append(StageSite(own, facts, s == 0, s == last, ahead, back, (once, (more - once) / 1e9)))
    return found
