"""Larger chains for gap and speed: shared by the tests and, in the same shape, by the benchmarks."""

from __future__ import annotations

import random
from dataclasses import replace

from vpipe.plan.bounds import Options
from vpipe.plan.costs import LayerCost, Profile
from vpipe.plan.memory import Choice, StageFacts, stage_memory
from vpipe.plan.partition import Objective
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


def large_problem(seed: int, num_layers: int, num_stages: int) -> tuple[Profile, list[StageFacts], Objective]:
    """A chain under 1F1B or PipeDream, with memory between what is just enough and what keeps everything."""
    profile = large_chain(seed, num_layers)
    rng = random.Random(seed + 1)
    asynchronous = rng.random() < 0.3
    num_units = num_stages * rng.randint(1, 4)
    facts = [
        StageFacts(
            units=num_stages - s if asynchronous else min(num_units, num_stages - s),
            versions=num_stages - s if asynchronous else 1,
            memory=1.0,
            speed=rng.choice([1.0, 1.0, 0.8]),
            waiting=1 if asynchronous else rng.choice([1, 1, 2, 3]),
        )
        for s in range(num_stages)
    ]
    least = shortfall(profile, facts, Options()).missing + 1
    most = max(_kept(profile, fact, s, num_stages) for s, fact in enumerate(facts))
    cap = least + rng.uniform(0.05, 1.0) * max(most - least, 0.2 * least)
    objective = Objective(0.0, num_units) if asynchronous else Objective(1.0, num_units - 1)
    return profile, [replace(fact, memory=cap) for fact in facts], objective


def _kept(profile: Profile, fact: StageFacts, stage: int, num_stages: int) -> int:
    start, stop = (profile.num_layers * s // num_stages for s in (stage, stage + 1))
    kept = [Choice.KEEP] * (stop - start)
    return stage_memory(profile, start, stop, kept, fact, first=stage == 0, last=stage == num_stages - 1).total
