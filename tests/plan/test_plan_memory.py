"""The memory model, term by term, against numbers counted by hand."""

from __future__ import annotations

import pytest

from vpipe.plan.costs import LayerCost, Profile
from vpipe.plan.machine import Machine
from vpipe.plan.memory import Choice, MemoryTerms, StageFacts, stage_memory
from vpipe.plan.pipe import Pipe, stage_facts
from vpipe.plan.sites import StageLink, StageSite, unit_time
from vpipe.schedule.action import Action, Kind
from vpipe.schedule.lower import swap
from vpipe.schedule.program import Program

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
    (slow,) = Machine.of(1, None, 2.0).on(PROFILE, [[0]])
    link = StageLink(0.0, 0.0)
    site = StageSite(slow, StageFacts(3), True, False, link, link)

    def time(choices: list[Choice]) -> float:
        return unit_time(site.costs(0, 4, choices))

    assert time([K] * 4) == pytest.approx(24 / 2 + 0.4)
    assert time([K, R, R, K]) == pytest.approx(26 / 2 + 0.4)
    assert time([K, K, K, S]) == pytest.approx(24 / 2 + 0.4)
    assert time([S, S, S, S]) == pytest.approx(2 * 1000 / 100.0)


def in_memory(program: Program) -> list[int]:
    """Per stage, the most units on the device where every stage swaps: the lane takes one move after the other, an OUT
    waits for the OUT before it, a backward for its own IN. Whatever else is on its way may be anywhere on it."""
    most = [1] * program.num_stages
    for row in swap(program, range(program.num_stages)).rows:
        here = [0] * program.num_stages
        queue: list[Action] = []

        def arrive(moves: list[Action], here: list[int] = here) -> None:
            for stage, kind, _ in moves:
                here[stage] += 1 if kind is Kind.IN else -1

        for action in row:
            stage, kind, microbatch = action
            own = Action(stage, Kind.IN, microbatch)
            waited = [i for i, each in enumerate(queue) if each == own or (kind is each.kind is Kind.OUT)]
            if waited and kind in (Kind.OUT, Kind.B, Kind.I):
                arrive(queue[: waited[-1] + 1])
                del queue[: waited[-1] + 1]
            if kind in (Kind.OUT, Kind.IN):
                queue.append(action)
                continue
            here[stage] += kind is Kind.F
            most = list(map(max, most, here))
            for number in range(len(queue)):
                now = list(here)
                arrive(queue[: number + 1], now)
                most = list(map(max, most, now))
            here[stage] -= kind in (Kind.B, Kind.W)
    return most


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "pipedream"])
def test_no_more_units_of_a_swapped_layer_are_in_memory_than_are_counted(name: str) -> None:
    for ranks, microbatches in ((2, 4), (2, 8), (4, 8), (4, 16)):
        program = Pipe.of(name, ranks, microbatches).program
        counted = [facts.resident for facts in stage_facts(program, Machine.of(program.num_ranks, None))]
        seen = in_memory(program)
        assert all(a >= b for a, b in zip(counted, seen, strict=True)), (ranks, counted, seen)
        assert name == "zb-v" or counted == seen
