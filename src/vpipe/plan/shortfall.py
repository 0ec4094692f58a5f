"""By how much memory is short when nothing fits.

"Does not fit" helps nobody; "stage 2 is short by 1.2 GiB" does. The answer is the partition whose worst stage
overflows least, every stage choosing what needs the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

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
    layers, last = profile.num_layers, len(stages) - 1
    ends = [{"first": s == 0, "last": s == last} for s in range(len(stages))]
    most = max(_of(profile, stages, options, ends, _even(profile, stages))) + 1.0
    worst = np.full(layers + 1, np.inf)
    worst[0] = -np.inf
    origins = []
    for facts, which in zip(stages, ends, strict=True):
        worst, origin = _stage(profile, facts, options, worst, most, **which)
        origins.append(origin)
    cuts = [layers]
    for origin in reversed(origins):
        cuts.append(int(origin[cuts[-1]]))
    cuts.reverse()
    overflow = _of(profile, stages, options, ends, cuts)
    stage = int(np.argmax(overflow))
    return Shortfall(stage, overflow[stage], tuple(cuts))


def _even(profile: Profile, stages: Sequence[StageFacts]) -> tuple[int, ...]:
    """Some partition, stages about equally large: what overflows more than it need not be looked at."""
    facts = stages[0]
    sizes = [lasting_bytes(layer, facts) + facts.resident * layer.saved_bytes for layer in profile.layers]
    line = [0.0, *accumulate(float(size) for size in sizes)]
    return proportional(line, [line[-1] * (s + 1) / len(stages) for s in range(len(stages))])


def _of(
    profile: Profile,
    stages: Sequence[StageFacts],
    options: Options,
    ends: Sequence[dict[str, bool]],
    cuts: Sequence[int],
) -> list[float]:
    """The overflow of every stage of a partition."""
    found = []
    for facts, which, (start, stop) in zip(stages, ends, pairwise(cuts), strict=True):
        *_, (_, _, need) = overflows(profile, facts, options, range(start, start + 1), stop, **which)
        found.append(float(need[0]))
    return found


def _stage(
    profile: Profile, facts: StageFacts, options: Options, before: Floats, most: float, *, first: bool, last: bool
) -> tuple[Floats, Floats]:
    """One more stage: the least worst overflow of every prefix, and where its last stage starts."""
    layers = profile.num_layers
    after = np.full(layers + 1, np.inf)
    origin = np.zeros(layers + 1)
    possible = np.flatnonzero(before < np.inf)
    starts = range(int(possible[0]), int(possible[-1]) + 1) if len(possible) else range(0)
    for begin, end, need in overflows(profile, facts, options, starts, layers, first=first, last=last, most=most):
        worst = np.maximum(before[begin : begin + len(need)], need)
        best = int(np.argmin(worst))
        origin[end], after[end] = begin + best, worst[best]
    return after, origin


def overflows(
    profile: Profile,
    facts: StageFacts,
    options: Options,
    starts: range,
    stop: int,
    *,
    first: bool,
    last: bool,
    most: float = np.inf,
) -> Iterator[tuple[int, int, Floats]]:
    """(begin, end, bytes): for every end up to ``stop``, what stages from ``begin`` or a later layer on lack at least.

    Stages that start in ``starts`` are looked at, as long as they do not lack more than ``most``: a stage that grows
    needs no less.
    """
    cut = np.array(profile.cut_bytes, dtype=np.float64)
    ends = np.zeros_like(cut) if first else 2.0 * cut
    # Entry a of each array belongs to the stage that starts at layer a and grows to the right.
    layers = profile.num_layers
    recomputed, other, fixed = np.full(layers, np.inf), np.zeros(layers), np.zeros(layers)
    keep = _keep_units(profile, facts, options)
    recompute = options.recompute and facts.units > facts.recomputed
    begin = starts.start
    for index in range(starts.start, stop):
        layer = profile.layers[index]
        live = slice(begin, min(index + 1, starts.stop))
        fixed[live] += lasting_bytes(layer, facts)
        least = np.minimum(recomputed[live], other[live])
        if recompute:
            start = facts.units * cut[index]
            recomputed[live] = facts.recomputed * layer.saved_bytes + np.minimum(recomputed[live], other[live] + start)
        other[live] = least + keep * layer.saved_bytes
        held = np.minimum(recomputed[live], other[live]) + fixed[live] - facts.memory
        gone = int(np.argmax(held <= most)) if (held <= most).any() else len(held)
        begin += gone
        if begin >= starts.stop:
            return
        if gone < len(held):
            edge = layer.workspace_bytes + (0.0 if last else 2.0 * cut[index + 1])
            yield begin, index + 1, held[gone:] + edge + ends[begin : live.stop]


def _keep_units(profile: Profile, facts: StageFacts, options: Options) -> int:
    swaps = options.swap and profile.swap_bandwidth is not None
    return facts.resident if swaps else facts.units


def proportional(line: Sequence[float], shares: Sequence[float]) -> tuple[int, ...]:
    """The cuts, ends included, that lie nearest to the ``shares`` of ``line``, which grows along the layers; every
    part has a layer."""
    layers, parts = len(line) - 1, len(shares)
    cuts = [0]
    for part, share in enumerate(shares[:-1]):
        nearest = min(range(layers + 1), key=lambda cut: abs(line[cut] - share))
        cuts.append(min(max(nearest, cuts[-1] + 1), layers - (parts - 1 - part)))
    return (*cuts, layers)
