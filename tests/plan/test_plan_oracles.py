"""The planner's answers against oracles that share nothing with it but the memory model."""

from __future__ import annotations

import random

import pytest
from plan_oracles import brute_force, check, close, milp, random_problem

from vpipe.plan.partition import Partition, best_partition
from vpipe.plan.shortfall import Shortfall


def _against_brute_force(seeds: range, max_layers: int, max_stages: int) -> int:
    """How many of the problems had a plan; the others must be recognised as too large for memory."""
    fitting = 0
    for seed in seeds:
        problem = random_problem(random.Random(seed), max_layers, max_stages)
        found = best_partition(problem.profile, problem.stages, problem.objective, problem.options)
        wanted = brute_force(problem)
        if wanted is None:
            assert isinstance(found, Shortfall), seed
            assert found.missing > 0, seed
            continue
        fitting += 1
        assert isinstance(found, Partition), seed
        check(problem, found)
        assert close(found.value, wanted), (seed, found.value, wanted)
        assert found.exact, seed
    return fitting


def test_300_small_chains_equal_brute_force() -> None:
    assert _against_brute_force(range(300), 6, 4) > 150


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_2400_small_chains_equal_brute_force(part: int) -> None:
    first = 10_000 + part * 600
    assert _against_brute_force(range(first, first + 600), 7, 4) > 300


def _against_milp(seeds: range, max_layers: int, max_stages: int, min_layers: int) -> None:
    pytest.importorskip("highspy", reason="the MILP oracle needs highspy (extra: test)")
    for seed in seeds:
        problem = random_problem(random.Random(seed), max_layers, max_stages, min_layers=min_layers)
        found = best_partition(problem.profile, problem.stages, problem.objective, problem.options, effort=10_000_000)
        wanted = milp(problem)
        if wanted is None:
            assert isinstance(found, Shortfall), seed
            continue
        assert isinstance(found, Partition), seed
        check(problem, found)
        assert close(found.value, wanted), (seed, found.value, wanted)
        assert found.exact, seed


def test_chains_of_12_layers_equal_the_milp() -> None:
    _against_milp(range(1000, 1015), 12, 4, 6)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_chains_of_up_to_48_layers_and_8_stages_equal_the_milp() -> None:
    _against_milp(range(1000, 1014), 48, 8, 24)
