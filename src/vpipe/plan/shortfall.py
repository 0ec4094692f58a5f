"""By how much memory is short when nothing fits.

"Does not fit" helps nobody; "stage 2 is short by 1.2 GiB" does. The answer is the partition whose worst stage
overflows least, every stage choosing what needs the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vpipe.plan.bounds import Floats, Options
from vpipe.plan.costs import Profile
from vpipe.plan.memory import StageFacts, lasting_bytes


@dataclass(frozen=True)
class Shortfall:
    """The stage that overflows most in the partition that overflows least; ``missing`` is zero or less if all fit."""

    stage: int
    missing: float
    cuts: tuple[int, ...]


def shortfall(profile: Profile, stages: Sequence[StageFacts], options: Options) -> Shortfall:
    """The least overflow of any partition into ``len(stages)`` stages."""
    count, layers = len(stages), profile.num_layers
    worst = np.full(layers + 1, np.inf)
    worst[0] = -np.inf
    origins = []
    for index, facts in enumerate(stages):
        worst, origin = _stage(profile, facts, options, worst, first=index == 0, last=index == count - 1)
        origins.append(origin)
    cuts = [layers]
    for origin in reversed(origins):
        cuts.append(int(origin[cuts[-1]]))
    cuts.reverse()
    overflow = [
        _overflow(profile, facts, options, cuts[s], cuts[s + 1], first=s == 0, last=s == count - 1)
        for s, facts in enumerate(stages)
    ]
    stage = int(np.argmax(overflow))
    return Shortfall(stage, overflow[stage], tuple(cuts))


def _stage(
    profile: Profile,
    facts: StageFacts,
    options: Options,
    before: Floats,
    *,
    first: bool,
    last: bool,
    stop: int | None = None,
) -> tuple[Floats, Floats]:
    """One more stage: the least worst overflow of every prefix (up to ``stop``), and where its last stage starts."""
    layers = profile.num_layers
    after = np.full(layers + 1, np.inf)
    origin = np.zeros(layers + 1)
    cut = np.array(profile.cut_bytes, dtype=np.float64)
    ends = np.zeros_like(cut) if first else 2.0 * cut
    # Entry a of each array belongs to the stage that starts at layer a and grows to the right.
    recomputed, other, fixed = np.full(layers, np.inf), np.zeros(layers), np.zeros(layers)
    keep = _keep_units(profile, facts, options)
    recompute = options.recompute and facts.units > facts.recomputed
    possible = np.flatnonzero(before < np.inf)
    begin = int(possible[0]) if len(possible) else layers
    for index in range(begin, layers if stop is None else stop):
        layer = profile.layers[index]
        live = slice(begin, index + 1)
        fixed[live] += lasting_bytes(layer, facts)
        least = np.minimum(recomputed[live], other[live])
        if recompute:
            start = facts.units * cut[index]
            recomputed[live] = facts.recomputed * layer.saved_bytes + np.minimum(recomputed[live], other[live] + start)
        other[live] = least + keep * layer.saved_bytes
        need = (
            np.minimum(recomputed[live], other[live])
            + fixed[live]
            - facts.memory
            + (0.0 if last else 2.0 * cut[index + 1])
            + layer.workspace_bytes
        )
        worst = np.maximum(before[live], need + ends[live])
        best = int(np.argmin(worst))
        origin[index + 1], after[index + 1] = begin + best, worst[best]
    return after, origin


def _overflow(
    profile: Profile, facts: StageFacts, options: Options, start: int, stop: int, *, first: bool, last: bool
) -> float:
    alone = np.full(profile.num_layers + 1, np.inf)
    alone[start] = -np.inf
    return float(_stage(profile, facts, options, alone, first=first, last=last, stop=stop)[0][stop])


def _keep_units(profile: Profile, facts: StageFacts, options: Options) -> int:
    swaps = options.swap and profile.swap_bandwidth is not None
    return facts.resident if swaps else facts.units
