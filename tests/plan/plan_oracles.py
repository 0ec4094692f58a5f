"""The oracle of the planner: every partition and every choice, each simulated on its own.

Written for certainty, not for speed. It asks the simulator and the count of bytes, which is what a plan is about, and
nothing of the search, its bounds or its batched evaluation.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

from vpipe.errors import UserError
from vpipe.plan.costs import LayerCost, Profile
from vpipe.plan.layout import PlannedLayout
from vpipe.plan.memory import Choice, Options
from vpipe.plan.planner import Plan, plan
from vpipe.plan.predict import Machine, Pipe, predict
from vpipe.schedule.catalog import entries

SCHEDULES = tuple(entry.name for entry in entries() if entry.name != "zb-auto" and not entry.two_ways)


@dataclass(frozen=True)
class Problem:
    profile: Profile
    schedule: str
    num_ranks: int
    num_microbatches: int
    memory: float | None = None
    speed: tuple[float, ...] = ()
    options: Options = field(default_factory=Options)

    @property
    def pipe(self) -> Pipe:
        return Pipe.of(self.schedule, self.num_ranks, self.num_microbatches)

    @property
    def machine(self) -> Machine:
        return Machine.of(self.num_ranks, self.memory, self.speed or 1.0)

    def plan(self) -> Plan | None:
        """What the planner says; ``None``: nothing fits."""
        try:
            return plan(
                self.profile,
                self.num_ranks,
                num_microbatches=self.num_microbatches,
                memory=self.memory,
                schedule=self.schedule,
                speed=self.speed or 1.0,
                recompute=self.options.recompute,
                swap=self.options.swap,
            )
        except UserError as error:
            assert error.exit_code == 1, error
            return None


def random_profile(rng: random.Random, num_layers: int, *, swap: float = 0.0) -> Profile:
    """A chain with ties or without, light or heavy boundaries, with updates, links and overheads or without."""
    whole = rng.random() < 0.3
    heavy_cuts = rng.choice([0.05, 0.3, 1.0])

    def seconds() -> float:
        return float(rng.randint(0, 4)) if whole else rng.uniform(0.1, 4.0)

    def size(scale: float) -> int:
        return rng.randint(0, 4) * 1000 if whole else int(rng.uniform(0, 4000) * scale)

    updates = rng.choice([0.0, 1.0])
    layers = tuple(
        LayerCost(
            *(f"l{i}", seconds(), seconds(), seconds(), size(1), size(heavy_cuts), size(0.5), size(1)),
            update=updates * rng.random(),
        )
        for i in range(num_layers)
    )
    moments = random.Random(repr(layers))
    layers = tuple(
        replace(layer, deferred_bytes=moments.randint(0, 500), workspace_bytes=moments.choice([0, 0, 800, 3000]))
        for layer in layers
    )
    return Profile(
        layers=layers,
        input_bytes=size(heavy_cuts),
        link_latency=rng.choice([0.0, 0.2]),
        link_bandwidth=rng.choice([None, 1000.0, 8000.0]),
        swap_bandwidth=rng.uniform(200.0, 4000.0) if rng.random() < swap else None,
        action_overhead=rng.choice([0.0, 0.05]),
    )


def random_problem(seed: int, schedule: str | None = None, *, capped: bool, most_layers: int = 5) -> Problem | None:
    """A small question; ``None`` where the drawn schedule has no program for the drawn numbers."""
    rng = random.Random(f"{seed} {schedule}")
    name = schedule or rng.choice(SCHEDULES)
    num_ranks, num_microbatches = rng.choice([2, 2, 3]), rng.choice([1, 2, 4, 6])
    try:
        stages = Pipe.of(name, num_ranks, num_microbatches).program.num_stages
    except UserError:
        return None
    if stages > most_layers:
        return None
    profile = random_profile(rng, rng.randint(stages, most_layers), swap=0.4 * capped)
    speed = tuple(rng.choice([1.0, 1.0, 0.5]) for _ in range(num_ranks))
    problem = Problem(profile, name, num_ranks, num_microbatches, None, speed)
    if not capped:
        return problem
    free = problem.plan()
    assert free is not None
    return replace(problem, memory=max(1.0, float(int(max(free.prediction.rank_memory) * rng.uniform(0.75, 1.0)))))


def brute_force(problem: Problem) -> float | None:
    """The shortest simulated step of any layout that fits; ``None`` where none does."""
    profile, pipe, machine = problem.profile, problem.pipe, problem.machine
    kinds = [Choice.KEEP]
    if problem.memory is not None:
        kinds += [Choice.RECOMPUTE] if problem.options.recompute else []
        kinds += [Choice.SWAP] if problem.options.swap and profile.swap_bandwidth else []
    best = None
    for inner in itertools.combinations(range(1, profile.num_layers), pipe.num_stages - 1):
        cuts = (0, *inner, profile.num_layers)
        for chosen in itertools.product(kinds, repeat=profile.num_layers):
            choices = tuple(chosen[a:b] for a, b in itertools.pairwise(cuts))
            found = predict(profile, PlannedLayout(cuts, choices), pipe, machine)
            fits = all(size <= cap for size, cap in zip(found.rank_memory, machine.memory, strict=True))
            if fits and (best is None or found.step_time < best):
                best = found.step_time
    return best
