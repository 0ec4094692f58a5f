"""What must hold without an oracle: gaps, monotony, scaling, and bounds that stay bounds when the effort ends."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from plan_chains import large_problem
from plan_oracles import Problem, brute_force, check, close, random_problem

from vpipe.plan.bounds import Options
from vpipe.plan.costs import Profile
from vpipe.plan.memory import StageFacts
from vpipe.plan.partition import Objective, Partition, best_partition
from vpipe.plan.shortfall import Shortfall, shortfall


def solve(problem: Problem, effort: int = 500_000) -> Partition | Shortfall:
    return best_partition(problem.profile, problem.stages, problem.objective, problem.options, effort=effort)


def value(found: Partition | Shortfall) -> float:
    return found.value if isinstance(found, Partition) else float("inf")


SEEDS = range(200, 260)


def medium(seed: int) -> Problem:
    return random_problem(random.Random(seed), 20, 6, min_layers=4)


def test_more_memory_is_never_worse() -> None:
    for seed in SEEDS:
        problem = medium(seed)
        more = replace(problem, stages=tuple(replace(f, memory=f.memory * 1.2) for f in problem.stages))
        assert value(solve(more)) <= value(solve(problem)) * (1 + 1e-9), seed


def test_fewer_units_in_flight_are_never_worse() -> None:
    for seed in SEEDS:
        problem = medium(seed)
        fewer = replace(problem, stages=tuple(replace(f, units=max(1, f.units - 1)) for f in problem.stages))
        assert value(solve(fewer)) <= value(solve(problem)) * (1 + 1e-9), seed


def test_more_freedom_is_never_worse() -> None:
    for seed in SEEDS:
        problem = medium(seed)
        free = value(solve(problem))
        for options in (Options(recompute=False), Options(swap=False), Options(False, False)):
            assert free <= value(solve(replace(problem, options=options))) * (1 + 1e-9), seed


def test_one_more_stage_is_never_worse_where_cuts_cost_nothing() -> None:
    for seed in SEEDS:
        problem = medium(seed)
        layers = tuple(replace(layer, boundary_bytes=0) for layer in problem.profile.layers)
        profile = Profile(layers, swap_bandwidth=problem.profile.swap_bandwidth)
        if len(problem.stages) >= profile.num_layers:
            continue
        facts = StageFacts(units=4, memory=problem.stages[0].memory)
        few, more = (
            best_partition(profile, [facts] * count, Objective(0.0, 8.0))
            for count in (len(problem.stages), len(problem.stages) + 1)
        )
        assert value(more) <= value(few) * (1 + 1e-9), seed


def test_scaling_all_times_scales_the_answer() -> None:
    for seed in SEEDS:
        problem = medium(seed)
        p = problem.profile
        layers = tuple(
            replace(x, forward=3 * x.forward, input_grad=3 * x.input_grad, weight_grad=3 * x.weight_grad)
            for x in p.layers
        )
        slower = replace(
            p,
            layers=layers,
            link_latency=3 * p.link_latency,
            link_bandwidth=p.link_bandwidth and p.link_bandwidth / 3,
            swap_bandwidth=p.swap_bandwidth and p.swap_bandwidth / 3,
            action_overhead=3 * p.action_overhead,
        )
        before, after = solve(problem), solve(replace(problem, profile=slower))
        assert isinstance(before, Partition) == isinstance(after, Partition)
        if isinstance(before, Partition):
            assert close(3 * value(before), value(after)), seed


def test_scaling_all_bytes_changes_nothing() -> None:
    for seed in SEEDS:
        problem = medium(seed)
        p = problem.profile
        layers = tuple(
            replace(
                x,
                saved_bytes=7 * x.saved_bytes,
                boundary_bytes=7 * x.boundary_bytes,
                parameter_bytes=7 * x.parameter_bytes,
                optimizer_bytes=7 * x.optimizer_bytes,
            )
            for x in p.layers
        )
        larger = replace(
            p,
            layers=layers,
            input_bytes=7 * p.input_bytes,
            link_bandwidth=p.link_bandwidth and 7 * p.link_bandwidth,
            swap_bandwidth=p.swap_bandwidth and 7 * p.swap_bandwidth,
        )
        stages = tuple(replace(f, memory=7 * f.memory) for f in problem.stages)
        before, after = value(solve(problem)), value(solve(replace(problem, profile=larger, stages=stages)))
        assert before == after or close(before, after), seed


def test_a_bound_stays_a_bound_when_the_effort_ends() -> None:
    for seed in range(60):
        problem = random_problem(random.Random(seed), 6, 4)
        wanted = brute_force(problem)
        found = solve(problem, effort=1)
        if wanted is not None:
            assert isinstance(found, Partition), seed
            check(problem, found)
            assert found.bound <= wanted * (1 + 1e-8), seed
            assert found.value >= wanted * (1 - 1e-8), seed


def test_the_shortfall_is_exactly_what_is_missing() -> None:
    """With so many bytes more on every stage there is a plan, with one fewer there is none."""
    seen = 0
    for seed in range(300, 400):
        problem = random_problem(random.Random(seed), 6, 3)
        short = shortfall(problem.profile, problem.stages, problem.options)
        if short.missing <= 0 or any(f.memory == float("inf") for f in problem.stages):
            continue
        seen += 1
        for extra, fits in ((short.missing, True), (short.missing - 1, False)):
            stages = tuple(replace(f, memory=f.memory + extra) for f in problem.stages)
            assert (brute_force(replace(problem, stages=stages)) is not None) == fits, seed
    assert seen > 20


def test_layers_that_take_no_time_are_planned() -> None:
    profile = Profile(tuple(replace(x, forward=0.0, input_grad=0.0, weight_grad=0.0) for x in medium(1).profile.layers))
    found = best_partition(profile, [StageFacts(2)] * 3, Objective(1.0, 3.0))
    assert isinstance(found, Partition)
    assert found.value == 0
    assert found.exact


def _gaps(seeds: range) -> list[float]:
    gaps = []
    for seed in seeds:
        rng = random.Random(seed)
        num_layers = rng.choice([40, 60, 100, 160])
        profile, stages, objective = large_problem(seed, num_layers, rng.choice([4, 8, 12]))
        found = best_partition(profile, stages, objective)
        assert isinstance(found, Partition), seed
        check(Problem(profile, tuple(stages), objective, Options()), found)
        gaps.append(found.gap)
    return gaps


def test_20_larger_chains_are_within_a_percent() -> None:
    assert max(_gaps(range(20))) <= 0.01


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(4))
def test_400_larger_chains_are_within_a_percent(part: int) -> None:
    gaps = _gaps(range(1000 + part * 100, 1100 + part * 100))
    assert max(gaps) <= 0.01, sorted(gaps)[-5:]
