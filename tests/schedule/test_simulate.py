"""The clock, against a second way to compute it; memory and weights over time; what is refused.

The golden values of every schedule are in test_golden.
"""

from __future__ import annotations

import random
import time

import pytest

from vpipe.errors import UserError
from vpipe.schedule.action import Action, Kind
from vpipe.schedule.authors.authoring import Entry
from vpipe.schedule.catalog import build, entries
from vpipe.schedule.choose import rank
from vpipe.schedule.lower import lower
from vpipe.schedule.program import Program, from_csv
from vpipe.schedule.simulate import simulate
from vpipe.schedule.timeline import Costs, StageCosts, uniform


def longest_path(program: Program, costs: Costs) -> dict[Action, float]:
    """When each action ends, by asking for its needs until nothing changes. Slow, and shares no code with timeline."""
    price = {
        Kind.F: lambda cost: cost.forward,
        Kind.B: lambda cost: cost.input_grad + cost.weight_grad,
        Kind.I: lambda cost: cost.input_grad,
        Kind.W: lambda cost: cost.weight_grad,
    }
    end: dict[Action, float] = {}
    changed = True
    while changed:
        changed = False
        for here, row in enumerate(program.rows):
            now = 0.0
            for action in (each for each in row if each.kind is not Kind.STEP):
                stage, kind, k = action
                others = {Kind.F: [stage - 1], Kind.W: []}.get(kind, [stage + 1])
                for other in (other for other in others if 0 <= other < program.num_stages):
                    latency = costs.latency * (program.placement.rank(other, k) != here)
                    kinds = [Kind.F] if kind is Kind.F else [Kind.B, Kind.I]
                    now = max([now, *(end[a] + latency for a in (Action(other, x, k) for x in kinds) if a in end)])
                now += price[kind](costs.stages[stage]) + costs.overhead
                changed |= end.get(action) != now
                end[action] = now
    return end


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_the_clock_on_random_costs(entry: Entry) -> None:
    dice = random.Random(entry.name)
    for p, m in ((2, 3), (4 if entry.two_ways else 3, 7), (4, 8)):
        program = entry.build(p, m)
        stages = tuple(StageCosts(dice.random(), dice.random(), dice.random()) for _ in range(program.num_stages))
        costs = Costs(stages, latency=dice.choice([0.0, 0.3, 2.0]), overhead=dice.choice([0.0, 0.1]))
        expected = longest_path(program, costs)
        simulation = simulate(program, costs)
        found = {span.action: span.end for row in simulation.spans for span in row}
        for action, end in expected.items():
            # STEP costs only the overhead here, which the second way leaves out; no F follows it in a flushed program
            assert entry.mode == "asp" or found[action] == pytest.approx(end), action


def test_links_carry_one_message_at_a_time() -> None:
    program = from_csv("0F0,0F1\n1F0,1F1\n")
    times = {"forward": 1.0, "input_grad": 1.0, "weight_grad": 1.0}
    spans = simulate(program, uniform(program.placement, **times, transfer=3.0)).spans[1]
    assert [(span.begin, span.end) for span in spans] == [(4.0, 5.0), (7.0, 8.0)]
    spans = simulate(program, uniform(program.placement, **times, latency=3.0)).spans[1]
    assert [(span.begin, span.end) for span in spans] == [(4.0, 5.0), (5.0, 6.0)]


def test_a_late_receive_exposes_the_transfer() -> None:
    early = from_csv("0F0,0SEND_F0\n1RECV_F0,1F1,1F0\n")
    late = from_csv("0F0,0SEND_F0\n1F1,1RECV_F0,1F0\n")
    costs = Costs((StageCosts(1, 1, 1, transfer=5.0), StageCosts(4, 1, 1)))
    assert [simulate(each, costs).makespan for each in (early, late)] == [10.0, 13.0]


def test_blocking_is_slower_where_messages_take_time() -> None:
    program = build("gpipe", 4, 8)
    costs = uniform(program.placement, latency=1.0)
    assert simulate(program, costs, blocking=True).makespan > simulate(program, costs).makespan
    assert simulate(program, blocking=True).makespan == simulate(program).makespan == 33
    assert simulate(program, costs, blocking=True).ideal == 24, "waiting for a message is not work"


def test_recompute_and_swap_hold_less() -> None:
    program = build("1f1b", 4, 8)
    stage = StageCosts(1, 1, 1, recompute=1.0, swap=0.1, activations=1.0, kept=0.125)
    costs = Costs((stage,) * 4)
    plain = simulate(program, costs)
    recomputed = simulate(lower(program, recompute_stages=range(4)), costs)
    swapped = simulate(lower(program, swap_stages=range(4)), costs)
    assert plain.peak_activations == [4, 3, 2, 1]
    assert recomputed.peak_activations == [1.375, 1.25, 1.125, 1]
    assert recomputed.makespan == 41, "8 more for 8 microbatches; the ramps hide theirs"
    assert swapped.makespan == 33
    assert swapped.peak_activations[0] < 4


def test_memory_over_time() -> None:
    at, held = simulate(build("1f1b", 2, 3)).memory(0)
    assert list(zip(at.tolist(), held.tolist(), strict=True)) == [(0, 1), (1, 2), (6, 1), (6, 2), (9, 1), (12, 0)]


def test_uneven_stages() -> None:
    program = build("gpipe", 3, 6)
    assert simulate(program, uniform(program.placement, scale=[1, 2, 1])).ideal == 36


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward": -1.0}, "--forward is -1.0"),
        ({"latency": float("nan")}, "--latency is nan"),
        ({"transfer": float("inf")}, "--transfer is inf"),
        ({"scale": [1.0]}, "--scale has 1 factors, but the program has 2 stages"),
        ({"scale": [1.0, -1.0]}, "--scale is -1.0 for stage 1"),
    ],
)
def test_bad_costs_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        uniform(build("1f1b", 2, 2).placement, **options)  # type: ignore[arg-type]


def test_costs_of_another_model_are_refused() -> None:
    with pytest.raises(UserError, match="costs are given for 3 stages, but the program has 2"):
        simulate(build("1f1b", 2, 2), Costs((StageCosts(1, 1, 1),) * 3))


def test_a_deadlock_is_an_error_not_a_number() -> None:
    program = from_csv("0RECV_B0,0B0,0F0,0SEND_F0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    with pytest.raises(UserError, match="deadlocks at 0B0"):
        simulate(program)


def test_the_ranking_turns_over_on_slow_links() -> None:
    """semantics.md, p = 4, m = 16: at latency F interleaved falls from among the first to among the last."""
    fast, slow = ({each.name: each.time for each in rank(4, 16, {"latency": latency})} for latency in (0.0, 1.0))
    golden = {
        "1f1b": (57, 85),
        "eager-1f1b": (57, 63),
        "zb-v": (49.5, 65.5),
        "looped-bfs v=2": (52.5, 58.5),
        "interleaved v=4": (50.25, 114.75),
    }
    assert {name: (fast[name], slow[name]) for name in golden} == golden
    assert fast["interleaved v=4"] < fast["eager-1f1b"]
    assert slow["interleaved v=4"] > slow["eager-1f1b"]


@pytest.mark.parametrize("factor", [1, 2, 10])
def test_the_bubble_is_the_idle_share_of_all_ranks(factor: int) -> None:
    """One minus the busiest rank's share rewarded imbalance: a stage ten times slower gave 2.4 %."""
    program = build("1f1b", 4, 8)
    found = simulate(program, uniform(program.placement, scale=[1, 1, factor, 1]))
    work = [24 * each for each in (1, 1, factor, 1)]
    assert found.bubble == pytest.approx(1 - sum(work) / (4 * found.makespan))
    assert found.utilisation == pytest.approx([each / found.makespan for each in work])


def test_asynchronous_schedules_are_ranked_by_their_steady_state() -> None:
    found = {each.name: each for each in rank(4, 8)}
    assert found["pipedream"].time == pytest.approx(24)
    assert found["pipedream-2bw"].bubble == pytest.approx(0)
    assert (found["pipedream"].weight_versions, found["pipedream-2bw"].weight_versions) == (4, 2)


def test_what_does_not_fit_comes_last_and_what_cannot_be_built_says_why() -> None:
    found = rank(6, 4, memory=4.0)
    assert [each.fits for each in found if not each.refused] == sorted(
        (each.fits for each in found if not each.refused), reverse=True
    )
    assert any("pipedream-2bw" in each.name and "at least 5" in each.refused for each in found)


def test_time_per_action_does_not_grow() -> None:
    """Ten times the microbatches take ten times as long. The figures are in benchmarks/simulate_speed."""

    def seconds_per_action(m: int) -> float:
        begin = time.process_time()
        simulation = simulate(lower(build("1f1b", 16, m)))
        simulation.summary()
        return (time.process_time() - begin) / len(simulation.program)

    seconds_per_action(100)
    few, many = (min(seconds_per_action(m) for _ in range(3)) for m in (100, 1000))
    assert many < 2.5 * few
