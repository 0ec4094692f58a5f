"""How long a forward pass takes when the devices are shared ideally: why strict order is worth having.

Every microbatch is a thread that walks through the stages; each stage is a device. A device serves those who wait with
the smallest key of the policy, all of them at once and in equal parts (an ideal GPU with one stream per microbatch).
The model has no overhead and no memory limit: it shows the effect of the order alone.

    p=4, m=8, t=1       stage 0 is done with all     last stage is done with all
    none (fair)         at 8, all together           at 32
    first-hp            0 at 1, the rest at 8        at 29
    fifo (strict)       one after the other          at 11 = m + p - 1
"""

from __future__ import annotations

from collections import defaultdict

from vpipe.compat.priorities.order import Policy
from vpipe.schedule.action import Action, Kind

_EPSILON = 1e-12


def makespan(policy: Policy, num_stages: int, num_microbatches: int, time: float = 1.0) -> float:
    """When the last microbatch leaves the last stage, each needing ``time`` of a whole device on each stage."""
    stage = dict.fromkeys(range(num_microbatches), 0)
    left = dict.fromkeys(range(num_microbatches), time)
    now = 0.0
    while stage:
        shares = _shares(policy, stage)
        step = min(left[microbatch] / share for microbatch, share in shares.items())
        now += step
        for microbatch, share in shares.items():
            left[microbatch] -= share * step
            if left[microbatch] <= _EPSILON * time:
                stage[microbatch] += 1
                left[microbatch] = time
                if stage[microbatch] == num_stages:
                    del stage[microbatch]
    return now


def _shares(policy: Policy, stage_of: dict[int, int]) -> dict[int, float]:
    """Microbatch → its part of the device it is at; those who must wait are left out."""
    waiting: defaultdict[int, list[tuple[tuple[int, ...], int]]] = defaultdict(list)
    for microbatch, stage in stage_of.items():
        waiting[stage].append((policy(Action(stage, Kind.F, microbatch)), microbatch))
    shares = {}
    for keys in waiting.values():
        first = min(key for key, _ in keys)
        served = [microbatch for key, microbatch in keys if key == first]
        shares.update(dict.fromkeys(served, 1 / len(served)))
    return shares
