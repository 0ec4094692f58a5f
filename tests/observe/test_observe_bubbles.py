"""Idle time by cause: the parts sum to the whole, and known pipelines get the cause they are known for."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_rows import rows_of

from vpipe.observe.bubbles import CAUSES, attribute
from vpipe.observe.calibrate import calibrate
from vpipe.observe.measured import Measured, from_simulation
from vpipe.observe.payload import recorded
from vpipe.rundir.reader import Event, open_run
from vpipe.schedule.catalog import build
from vpipe.schedule.simulate import simulate
from vpipe.schedule.timeline import Costs, StageCosts, uniform

SCHEDULES = ["gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-v", "hanayo", "pipedream", "pipedream-2bw"]


def simulated(schedule: str, ranks: int, microbatches: int, costs: Costs | None = None, **times: float) -> Measured:
    program = build(schedule, ranks, microbatches)
    return from_simulation(simulate(program, costs or uniform(program.placement, **times)), scale=1e6)


def check_sums(step: Measured) -> None:
    found = attribute(step)
    for rank, parts in enumerate(found.parts):
        assert set(parts) == set(CAUSES)
        assert all(part >= 0 for part in parts.values())
        assert sum(parts.values()) == found.idle[rank] == step.span + step.lead - found.busy[rank]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_even_stages_and_free_links_leave_only_the_schedules_own_bubble(schedule: str) -> None:
    step = simulated(schedule, 4, 8)
    found = attribute(step)
    check_sums(step)
    assert found.total("imbalance") <= 4
    assert found.total("communication") == found.total("data") == found.total("overhead") == 0
    assert found.total("warmup_drain") == sum(found.idle) - found.total("imbalance")


def test_1f1b_idles_three_microbatches_on_every_rank() -> None:
    """p = 4, F = I = W = 1: every rank idles (p - 1) T = 9."""
    assert attribute(simulated("1f1b", 4, 8)).idle == (9_000_000,) * 4


def test_a_slow_stage_is_imbalance_on_the_others() -> None:
    costs = Costs(tuple(StageCosts(1, 1, 1) if stage != 2 else StageCosts(2, 2, 2) for stage in range(4)))
    found = attribute(simulated("1f1b", 4, 16, costs))
    assert found.parts[2]["imbalance"] == 0
    for rank in (0, 1, 3):
        assert found.parts[rank]["imbalance"] > 0.3 * found.window
    assert found.total("communication") == 0


def test_a_slow_link_is_communication_on_every_rank_that_feels_it() -> None:
    free, slow = simulated("1f1b", 4, 8), simulated("1f1b", 4, 8, latency=0.5)
    found = attribute(slow)
    assert slow.span > free.span
    assert all(part["communication"] > 0 for part in found.parts)
    assert found.total("imbalance") == 0
    for part, idle in zip(found.parts, attribute(free).idle, strict=True):
        assert part["warmup_drain"] == idle  # the schedule's own bubble is what it was


def test_late_inputs_are_data() -> None:
    """The first forward waits 5 ms for its batch; so does, through it, the rank behind."""
    step = simulated("gpipe", 2, 2)
    late = tuple(
        tuple(Event(e.action, e.begin and e.begin + 5_000_000, e.ready + 5_000_000, e.end + 5_000_000) for e in row)
        for row in step.ranks
    )
    found = attribute(Measured(step.planned, late))
    assert [part["data"] for part in found.parts] == [5_000_000, 5_000_000]


def test_the_time_between_two_steps_is_data() -> None:
    step = simulated("gpipe", 2, 2)
    found = attribute(Measured(step.planned, step.ranks, lead=7))
    assert [part["data"] for part in found.parts] == [7, 7]
    assert found.window == step.span + 7


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 5),
    st.integers(1, 10),
    st.lists(st.floats(0, 5), min_size=30, max_size=30),
    st.floats(0, 3),
    st.floats(0, 1),
)
def test_parts_sum_to_the_idle_time(
    schedule: str, ranks: int, microbatches: int, times: list[float], latency: float, overhead: float
) -> None:
    microbatches *= ranks if schedule in ("interleaved", "pipedream-2bw") else 1
    program = build(schedule, ranks, microbatches)
    stages = tuple(
        StageCosts(times[3 * s % 30], times[(3 * s + 1) % 30], times[(3 * s + 2) % 30], step=0.1)
        for s in range(program.num_stages)
    )
    check_sums(from_simulation(simulate(program, Costs(stages, latency=latency, overhead=overhead)), scale=1e6))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.randoms(use_true_random=False), st.integers(0, 50))
def test_parts_sum_for_any_clock(ranks: int, microbatches: int, dice: object, lead: int) -> None:
    """Measured times obey no rule but that a rank does one thing after the other; clocks may be wrong."""
    program, rows = rows_of("1f1b", ranks, microbatches, dice)
    check_sums(Measured(program, rows, lead=lead))


def test_parts_sum_on_a_recorded_run(make_run: object, tmp_path: Path) -> None:
    run = open_run(make_run("zb-h1", 4, 8, steps=4))  # type: ignore[operator]
    steps = recorded(run)
    assert len(steps) == 4
    assert steps[1].lead == 2_000_000
    for step in steps:
        check_sums(step)


def test_calibration_returns_the_costs_that_made_the_timeline() -> None:
    program = build("1f1b", 3, 6)
    costs = Costs((StageCosts(1, 1, 1), StageCosts(2, 3, 3), StageCosts(1, 2, 2)), latency=0.25)
    step = from_simulation(simulate(program, costs))
    found = calibrate([step])
    assert [round(stage.forward, 6) for stage in found.stages] == [1, 2, 1]
    assert [round(stage.input_grad + stage.weight_grad, 6) for stage in found.stages] == [2, 6, 4]
    assert found.latency == pytest.approx(0.25)
    assert simulate(program, found).makespan == pytest.approx(simulate(program, costs).makespan)


def test_overhead_of_a_simulation_is_overhead_not_work() -> None:
    found = attribute(simulated("1f1b", 2, 4, overhead=0.25))
    assert found.busy == attribute(simulated("1f1b", 2, 4)).busy
    assert all(part["overhead"] > 0 for part in found.parts)


def test_what_waits_for_a_core_is_told_so_on_every_rank_that_waits_for_it() -> None:
    """Rank 0's first forward took 1 ms, and for 5 ms more the machine ran something else; then rank 1 was late."""
    step = simulated("gpipe", 2, 2)

    def moved(rank: int, index: int, event: Event) -> Event:
        shift = (5_000_000 if rank or index else 0) + (2_000_000 if rank else 0)
        stalled, late = 5_000_000 * (rank == index == 0), 2_000_000 * (rank == 1 and index == 0)
        begin = event.begin and event.begin + shift - late
        ready = event.ready + (shift if rank or index else 0)
        end = event.end + shift + stalled
        return event._replace(begin=begin, ready=ready, end=end, late=late, stalled=stalled)

    rows = tuple(tuple(moved(rank, i, e) for i, e in enumerate(row)) for rank, row in enumerate(step.ranks))
    crowded = Measured(step.planned, rows)
    check_sums(crowded)
    found = attribute(crowded)
    assert found.parts[0]["cores"] >= 5_000_000
    assert found.parts[1]["cores"] >= 7_000_000
    assert sum(found.busy) == sum(attribute(step).busy), "it is no work"
    assert found.total("communication") == 0
    assert calibrate([crowded]).stages[0].forward == pytest.approx(calibrate([step]).stages[0].forward)
