"""The memory model, term by term, against numbers counted by hand."""

from __future__ import annotations

import pytest

from vpipe.plan.costs import LayerCost, Profile
from vpipe.plan.memory import Choice, MemoryTerms, StageFacts, stage_memory, stage_time

K, R, S = Choice.KEEP, Choice.RECOMPUTE, Choice.SWAP

#            saved   cut after   parameters  optimizer
#   layer 0   100       10          1000        2000
#   layer 1   200       20          1000        2000
#   layer 2   300       30          1000        2000
#   layer 3   400       40          1000        2000
PROFILE = Profile(
    tuple(LayerCost(f"l{i}", 1.0, 2.0, 3.0, 100 * (i + 1), 10 * (i + 1), 1000, 2000) for i in range(4)),
    input_bytes=5,
    swap_bandwidth=100.0,
    action_overhead=0.1,
)


def memory(
    choices: list[Choice], units: int = 3, versions: int = 1, *, first: bool = False, last: bool = False
) -> MemoryTerms:
    return stage_memory(PROFILE, 0, 4, choices, StageFacts(units, versions), first=first, last=last)


def test_all_kept() -> None:
    assert memory([K, K, K, K]) == MemoryTerms(
        weights=4000, gradients=4000, optimizer=8000, kept=3 * 1000, buffers=2 * (5 + 40)
    )


def test_versions_multiply_the_weights_only() -> None:
    plain, stashed = memory([K, K, K, K]), memory([K, K, K, K], versions=4)
    assert stashed.weights == 4 * plain.weights
    assert stashed.total - plain.total == 3 * 4000


def test_a_run_of_recomputed_layers_keeps_one_input() -> None:
    #  K [R R] K: the run starts at layer 1, whose input is the cut of 10 bytes
    terms = memory([K, R, R, K])
    assert (terms.kept, terms.segment_inputs, terms.recomputed) == (3 * 500, 3 * 10, 500)
    #  [R] K [R] K: two runs, inputs of 5 and 20 bytes
    terms = memory([R, K, R, K])
    assert (terms.kept, terms.segment_inputs, terms.recomputed) == (3 * 600, 3 * 25, 400)


def test_two_units_of_a_swapped_layer_are_resident() -> None:
    assert memory([K, K, K, S]).swapped == 2 * 400
    assert memory([K, K, K, S], units=1).swapped == 400


def test_units_whose_weight_gradient_waits_are_not_let_go() -> None:
    facts = StageFacts(units=4, waiting=2)
    terms = stage_memory(PROFILE, 0, 4, [R, K, K, S], facts, first=True, last=True)
    once = stage_memory(PROFILE, 0, 4, [R, K, K, S], StageFacts(units=4), first=True, last=True)
    assert (terms.recomputed, terms.swapped) == (2 * once.recomputed, 3 * 400)


def test_the_ends_of_the_pipe_have_no_buffers() -> None:
    assert memory([K, K, K, K], first=True, last=True).buffers == 0
    assert memory([K, K, K, K], last=True).buffers == 2 * 5


def test_time_is_the_longer_lane() -> None:
    facts = StageFacts(3, speed=2.0)
    ends = {"first": True, "last": False}
    assert stage_time(PROFILE, 0, 4, [K] * 4, facts, **ends) == pytest.approx(24 / 2 + 0.4)
    assert stage_time(PROFILE, 0, 4, [K, R, R, K], facts, **ends) == pytest.approx(26 / 2 + 0.4)
    assert stage_time(PROFILE, 0, 4, [K, K, K, S], facts, **ends) == pytest.approx(24 / 2 + 0.4)
    assert stage_time(PROFILE, 0, 4, [S, S, S, S], facts, **ends) == pytest.approx(2 * 1000 / 100.0)
