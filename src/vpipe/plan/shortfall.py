"""By how much memory is short when nothing fits.

"Stage 2 is short by 1.2 GiB" helps where "does not fit" does not. The answer is the partition whose worst stage
overflows least, every stage choosing what needs the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from vpipe.plan.costs import Profile
from vpipe.plan.growth import Growth
from vpipe.plan.memory import LayerBytes, Options, StageFacts


@dataclass(frozen=True)
class Shortfall:
    """The stage that overflows most in the partition that overflows least; ``missing`` is zero or less if all fit."""

    stage: int
    missing: float
    cuts: tuple[int, ...]


def shortfall(profile: Profile, stages: Sequence[StageFacts], options: Options) -> Shortfall:
    """The least overflow of any partition into ``len(stages)`` stages."""
    layers, last = profile.num_layers, len(stages) - 1
    growths = [Growth(profile, facts, options, s == 0, s == last) for s, facts in enumerate(stages)]
    # What overflows more than some partition need not be looked at: here stages are about equally large.
    most = max(_of(growths, _even(profile, stages))) + 1.0
    worst = np.full(layers + 1, np.inf)
    worst[0] = -np.inf
    origins = []
    for growth in growths:
        possible = np.flatnonzero(worst < np.inf)
        starts = range(int(possible[0]), int(possible[-1]) + 1) if len(possible) else range(0)
        after, origin = np.full(layers + 1, np.inf), np.zeros(layers + 1, np.int64)
        for begin, end, short, _ in growth.ends(starts, layers, most):
            value = np.maximum(worst[begin : begin + len(short)], short)
            best = int(np.argmin(value))
            origin[end], after[end] = begin + best, value[best]
        worst = after
        origins.append(origin)
    cuts = [layers]
    for origin in reversed(origins):
        cuts.append(int(origin[cuts[-1]]))
    cuts.reverse()
    overflow = _of(growths, cuts)
    stage = int(np.argmax(overflow))
    return Shortfall(stage, overflow[stage], tuple(cuts))


def _even(profile: Profile, stages: Sequence[StageFacts]) -> tuple[int, ...]:
    held = LayerBytes.of(profile, stages[0])
    line = [0.0, *accumulate((held.lasting + held.swapped).tolist())]
    return proportional(line, [line[-1] * (s + 1) / len(stages) for s in range(len(stages))])


def _of(growths: Sequence[Growth], cuts: Sequence[int]) -> list[float]:
    """The overflow of every stage of a partition."""
    found = []
    for growth, (start, stop) in zip(growths, pairwise(cuts), strict=True):
        *_, (_, _, short, _) = growth.ends(range(start, start + 1), stop)
        found.append(float(short[0]))
    return found


def proportional(line: Sequence[float], shares: Sequence[float]) -> tuple[int, ...]:
    """The cuts, ends included, that lie nearest to the ``shares`` of ``line``, which grows along the layers; every
    part has a layer."""
    layers, parts = len(line) - 1, len(shares)
    cuts = [0]
    for part, share in enumerate(shares[:-1]):
        nearest = min(range(layers + 1), key=lambda cut: abs(line[cut] - share))
        cuts.append(min(max(nearest, cuts[-1] + 1), layers - (parts - 1 - part)))
    return (*cuts, layers)
