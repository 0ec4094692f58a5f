"""Larger chains for gap and speed: shared by the tests and, in the same shape, by the benchmarks."""

from __future__ import annotations

import random
from dataclasses import replace

from vpipe.plan.costs import LayerCost, Profile
from vpipe.plan.memory import Options
from vpipe.plan.pipe import Pipe, stage_facts
from vpipe.plan.predict import Machine
from vpipe.plan.shortfall import shortfall

MIB = 1 << 20


def large_chain(seed: int, num_layers: int, *, alike: float = 0.3, swap: float = 0.3) -> Profile:
    """Layers of a few milliseconds and megabytes: alike as in a transformer, or each of its own size."""
    rng = random.Random(seed)
    same = rng.random() < alike

    def layer(index: int) -> LayerCost:
        forward = 1e-3 * rng.uniform(0.5, 2.0)
        return LayerCost(
            f"layer{index}",
            forward,
            forward * rng.uniform(0.8, 1.2),
            forward * rng.uniform(0.5, 1.0),
            int(rng.uniform(1, 8) * MIB),
            int(rng.uniform(0.2, 1) * MIB),
            int(rng.uniform(0, 8) * MIB),
            int(rng.uniform(0, 16) * MIB),
        )

    first = layer(0)
    layers = [replace(first, name=f"layer{i}") if same else layer(i) for i in range(num_layers)]
    return Profile(
        tuple(layers),
        input_bytes=MIB // 4,
        link_latency=2e-4,
        link_bandwidth=2e9,
        swap_bandwidth=rng.uniform(2e9, 8e9) if rng.random() < swap else None,
    )


def cap_of(profile: Profile, schedule: str, num_ranks: int, num_microbatches: int, room: float) -> float:
    """A cap between what is just enough (0) and what keeps everything (1)."""
    pipe = Pipe.of(schedule, num_ranks, num_microbatches)
    facts = stage_facts(pipe.program, Machine.of(num_ranks, 1.0))
    least, most = (shortfall(profile, facts, options).missing + 1 for options in (Options(), Options(False, False)))
    return least + room * (most - least)
