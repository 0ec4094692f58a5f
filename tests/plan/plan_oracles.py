"""Oracles of the planner: written for certainty, not for speed, and sharing only the memory model with it.

``brute_force`` tries every partition and every choice. ``milp`` states the same problem as a mixed-integer program for
HiGHS. ``random_problem`` makes the chains both are asked about.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from vpipe.plan.bounds import Options
from vpipe.plan.costs import LayerCost, Profile
from vpipe.plan.memory import Choice, StageFacts, num_actions, stage_memory, stage_time
from vpipe.plan.partition import Objective, Partition


@dataclass(frozen=True)
class Problem:
    profile: Profile
    stages: tuple[StageFacts, ...]
    objective: Objective
    options: Options


def random_problem(
    rng: random.Random, max_layers: int, max_stages: int, *, min_layers: int = 1, swap: float = 0.3
) -> Problem:
    """A chain with ties or without, light or heavy boundaries, equal or unequal ranks, loose or tight memory."""
    num_layers = rng.randint(min_layers, max_layers)
    num_stages = rng.randint(1, min(max_stages, num_layers))
    whole = rng.random() < 0.3
    heavy_cuts = rng.choice([0.05, 0.3, 1.0])

    def seconds() -> float:
        return float(rng.randint(0, 4)) if whole else rng.uniform(0.1, 4.0)

    def size(scale: float) -> int:
        return rng.randint(0, 4) * 1000 if whole else int(rng.uniform(0, 4000) * scale)

    layers = tuple(
        LayerCost(f"l{i}", seconds(), seconds(), seconds(), size(1), size(heavy_cuts), size(0.5), size(1))
        for i in range(num_layers)
    )
    profile = Profile(
        layers=layers,
        input_bytes=size(heavy_cuts),
        link_latency=rng.choice([0.0, 0.2]),
        link_bandwidth=rng.choice([None, 1000.0, 8000.0]),
        swap_bandwidth=rng.uniform(200.0, 4000.0) if rng.random() < swap else None,
        action_overhead=rng.choice([0.0, 0.05]),
    )
    num_units = rng.choice([1, 2, 4, 8])
    asynchronous = rng.random() < 0.3
    units = [num_stages - s if asynchronous else min(num_units, num_stages - s) for s in range(num_stages)]
    if rng.random() < 0.3:
        units = [num_units] * num_stages
    plain = [
        stage_memory(profile, 0, num_layers, [Choice.KEEP] * num_layers, StageFacts(n), first=True, last=True).total
        for n in units
    ]
    tight = rng.uniform(0.5, 2.0) / num_stages
    stages = tuple(
        StageFacts(
            units=n,
            versions=n if asynchronous else 1,
            memory=float("inf") if rng.random() < 0.05 else int(full * tight * rng.choice([1, 1, 1.3])) + 1,
            speed=rng.choice([1.0, 1.0, 1.5, 0.4]),
            waiting=rng.choice([1, 1, 1, 2, 3]),
        )
        for n, full in zip(units, plain, strict=True)
    )
    objective = Objective(0.0, float(num_units)) if asynchronous else Objective(1.0, float(num_units - 1))
    return Problem(profile, stages, objective, Options())


def value_of(problem: Problem, cuts: tuple[int, ...], times: list[float]) -> float:
    """The objective of a partition, straight from its definition."""
    inner = cuts[1:-1]
    fill = sum(times) + sum(problem.profile.fill_time(cut) for cut in inner)
    cycle = max([*times, *(problem.profile.link_time(cut) for cut in inner)])
    return problem.objective.fill * fill + problem.objective.rounds * cycle


def check(problem: Problem, partition: Partition) -> None:
    """A partition must be what it says: it fits, and its times and value follow from its choices."""
    count = len(problem.stages)
    assert partition.cuts[0] == 0
    assert partition.cuts[-1] == problem.profile.num_layers
    times = []
    for s, facts in enumerate(problem.stages):
        start, stop = partition.cuts[s], partition.cuts[s + 1]
        assert start < stop
        ends = {"first": s == 0, "last": s == count - 1}
        assert stage_memory(problem.profile, start, stop, partition.choices[s], facts, **ends).total <= facts.memory
        times.append(stage_time(problem.profile, start, stop, partition.choices[s], facts, **ends))
    assert close(sum(times), sum(partition.times))
    assert close(value_of(problem, partition.cuts, times), partition.value)
    assert partition.bound <= partition.value


def close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-7 * max(abs(a), abs(b), 1e-9)


def brute_force(problem: Problem) -> float | None:
    """The least objective over all partitions and all choices, ``None`` where nothing fits."""
    profile, count = problem.profile, len(problem.stages)
    kinds = [Choice.KEEP, Choice.RECOMPUTE] + ([Choice.SWAP] if profile.swap_bandwidth else [])
    known: dict[tuple[int, int, int], float | None] = {}

    def stage(s: int, start: int, stop: int) -> float | None:
        if (s, start, stop) not in known:
            ends = {"first": s == 0, "last": s == count - 1}
            facts = problem.stages[s]
            known[s, start, stop] = min(
                (
                    stage_time(profile, start, stop, choices, facts, **ends)
                    for choices in itertools.product(kinds, repeat=stop - start)
                    if stage_memory(profile, start, stop, choices, facts, **ends).total <= facts.memory
                ),
                default=None,
            )
        return known[s, start, stop]

    best = None
    for inner in itertools.combinations(range(1, profile.num_layers), count - 1):
        cuts = (0, *inner, profile.num_layers)
        times = [stage(s, cuts[s], cuts[s + 1]) for s in range(count)]
        good = [time for time in times if time is not None]
        if len(good) == count:
            value = value_of(problem, cuts, good)
            best = value if best is None else min(best, value)
    return best


def milp(problem: Problem, time_limit: float = 300.0) -> float | None:
    """The same optimum by HiGHS; ``None`` where nothing fits, and an assertion where HiGHS does not finish."""
    import highspy

    profile, stages = problem.profile, problem.stages
    layers, num_layers, count = profile.layers, profile.num_layers, len(problem.stages)
    cut = profile.cut_bytes
    model = highspy.Highs()
    model.silent()
    model.setOptionValue("time_limit", time_limit)
    model.setOptionValue("mip_rel_gap", 1e-9)
    model.setOptionValue("mip_abs_gap", 1e-9)
    model.setOptionValue("mip_feasibility_tolerance", 1e-9)
    model.setOptionValue("primal_feasibility_tolerance", 1e-9)
    unit = max([1.0, *(float(layer.saved_bytes) for layer in layers)])
    S, L = range(count), range(num_layers)

    def allowed(i: int, s: int) -> bool:
        return s <= i and count - 1 - s <= num_layers - 1 - i

    on = {(i, s): model.addBinary() for i in L for s in S if allowed(i, s)}
    again = {key: model.addBinary() for key in on}
    swapped = {key: model.addBinary() for key in on} if profile.swap_bandwidth else {}
    starts = {key: model.addVariable(0, 1) for key in on}
    cuts = {(i, s): model.addVariable(0, 1) for i in range(1, num_layers) for s in range(1, count)}
    times = [model.addVariable(0) for _ in S]
    cycle = model.addVariable(0)
    for i in L:
        model.addConstr(sum(on[i, s] for s in S if (i, s) in on) == 1)
        for s in S:
            if (i, s) not in on:
                continue
            model.addConstr(again[i, s] + (swapped[i, s] if swapped else 0) <= on[i, s])
            before = again.get((i - 1, s))
            model.addConstr(starts[i, s] >= again[i, s] - (before if before is not None else 0))
    for i in range(1, num_layers):
        for s in range(1, count):
            # Cut s lies before layer i: layer i-1 is left of it and layer i is not. Layers go to stages in order.
            left, right = (sum(on[j, t] for t in range(s) if (j, t) in on) for j in (i - 1, i))
            model.addConstr(cuts[i, s] == left - right)
    for s in range(1, count):
        model.addConstr(sum(cuts[i, s] for i in range(1, num_layers)) == 1)
    for s, facts in enumerate(stages):
        mine = [i for i in L if (i, s) in on]
        model.addConstr(sum(on[i, s] for i in mine) >= 1)
        overhead = profile.action_overhead * num_actions(first=s == 0, last=s == count - 1)
        model.addConstr(
            times[s]
            >= sum(
                layers[i].total / facts.speed * on[i, s] + layers[i].forward / facts.speed * again[i, s] for i in mine
            )
            + overhead
        )
        if swapped and profile.swap_bandwidth:
            model.addConstr(
                times[s] >= sum(2.0 * layers[i].saved_bytes / profile.swap_bandwidth * swapped[i, s] for i in mine)
            )
        model.addConstr(cycle >= times[s])
        if facts.memory < float("inf"):
            n = facts.units
            terms = []
            for i in mine:
                saved = layers[i].saved_bytes
                fixed = (facts.versions + 1) * layers[i].parameter_bytes + layers[i].optimizer_bytes + n * saved
                terms += [
                    fixed / unit * on[i, s],
                    (facts.recomputed - n) * saved / unit * again[i, s],
                    n * cut[i] / unit * starts[i, s],
                ]
                if swapped:
                    terms.append((facts.resident - n) * saved / unit * swapped[i, s])
            for side in (s, s + 1):
                if 0 < side < count:
                    terms += [2.0 * cut[i] / unit * cuts[i, side] for i in range(1, num_layers)]
            model.addConstr(sum(terms) <= facts.memory / unit)
    fill = sum(times[s] for s in S)
    for s in range(1, count):
        model.addConstr(cycle >= sum(profile.link_time(i) * cuts[i, s] for i in range(1, num_layers)))
        fill = fill + sum(profile.fill_time(i) * cuts[i, s] for i in range(1, num_layers))
    model.minimize(problem.objective.fill * fill + problem.objective.rounds * cycle)
    status = model.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return None
    assert status == highspy.HighsModelStatus.kOptimal, status
    return float(model.getInfo().objective_function_value)
