"""Where a search begins: cuts balanced by time, by memory, or by both, and the partition that overflows least.

Where several stages share a rank's memory no formula says whether anything fits: cuts are moved until the rank that
overflows most no longer does.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from math import comb, inf

import numpy as np

from vpipe.plan.judge import Array, Judge
from vpipe.plan.limits import Limits
from vpipe.plan.memory import Options
from vpipe.plan.packing import Packer
from vpipe.plan.search import moves_of
from vpipe.plan.shortfall import proportional, shortfall

Cuts = tuple[int, ...]

_MIXES = (1.0, 0.75, 0.5, 0.25, 0.0)
_FEWER = 2
_FEW = 3_000
"""Partitions that are all tried before it is said that nothing fits."""


def starts(judge: Judge, packer: Packer, options: Options, limits: Limits) -> list[Cuts]:
    """Cuts to begin with; none where nothing fits, as far as was found."""
    mixed = list(dict.fromkeys(_balanced(judge, mix) for mix in _MIXES))
    if judge.pipe.stages_per_rank == 1:
        fitting = [cuts for cuts in mixed if packer.overflow(cuts)[0] <= 0]
        if fitting:
            return fitting[:_FEWER]  # the bound has better ones
        short = shortfall(judge.profile, packer.facts, options)  # also after the time: what fits is to be found
        return [short.cuts] if short.missing <= 0 else []
    found = [cuts for cuts in (_eased(packer, cuts, limits) for cuts in mixed) if packer.overflow(cuts)[0] <= 0]
    if not found and not limits.over:
        best = min(_all_cuts(judge), key=lambda cuts: packer.overflow(cuts)[0], default=None)
        found = [best] if best is not None and packer.overflow(best)[0] <= 0 else []
    return found


def least_overflow(judge: Judge, packer: Packer, limits: Limits) -> tuple[float, int, bool]:
    """The bytes that the worst rank lacks in the best partition found, its group, and whether all were tried."""
    few = [] if limits.over else list(_all_cuts(judge))
    tried = few or [_eased(packer, _balanced(judge, mix), limits) for mix in _MIXES]
    missing, group = min(packer.overflow(cuts) for cuts in tried)
    return missing, group, bool(few)


def _all_cuts(judge: Judge) -> Iterator[Cuts]:
    """Every partition, where there are few."""
    layers, stages = judge.profile.num_layers, judge.pipe.num_stages
    if comb(layers - 1, stages - 1) <= _FEW:
        for inner in combinations(range(1, layers), stages - 1):
            yield (0, *inner, layers)


def _balanced(judge: Judge, mix: float) -> Cuts:
    """Cuts at equal parts of the work (mix 1), of the bytes (mix 0), or of both."""
    work = judge.forward + judge.input_grad + judge.weight_grad
    units = max(site.facts.units for site in judge.sites)
    sizes = [2 * x.parameter_bytes + x.optimizer_bytes + units * x.saved_bytes for x in judge.profile.layers]
    bytes_ = np.concatenate([[0.0], np.cumsum(np.array(sizes, dtype=np.float64))])
    line: Array = mix * work[0] / max(float(work[0][-1]), 1e-300) + (1 - mix) * bytes_ / max(float(bytes_[-1]), 1e-300)
    quick = 1 / np.maximum(work[:, -1], 1e-300)  # where everything takes longer, a stage has less of it
    share = np.cumsum(quick) / quick.sum() * line[-1]
    return proportional(line.tolist(), share.tolist())


def _eased(packer: Packer, cuts: Cuts, limits: Limits) -> Cuts:
    """The cuts after moving them while that makes the worst rank overflow less, and there is time."""
    now = packer.overflow(cuts)[0]
    while now > 0 and not limits.over:
        better = min(((packer.overflow(moved)[0], moved) for moved in moves_of(cuts)), default=(inf, cuts))
        if better[0] >= now:
            break
        now, cuts = better
    return cuts
