"""Figures of a page: of equal programs only, of the executed order, and of what was asked of the planner."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
from observe_runs import MakeRun

from vpipe.observe.bubbles import CAUSES
from vpipe.observe.diagnosis import verdict
from vpipe.observe.measured import Measured, from_simulation
from vpipe.observe.memory import memory_table
from vpipe.observe.payload import payload, recorded
from vpipe.observe.timelines import timelines
from vpipe.observe.trend import trend
from vpipe.rundir.facts import RunFacts, RunStage
from vpipe.rundir.reader import RunDirectory, open_run
from vpipe.rundir.recorder import run_ahead
from vpipe.runtime.job import Record
from vpipe.schedule.action import parse
from vpipe.schedule.catalog import build
from vpipe.schedule.lower import lower
from vpipe.schedule.program import to_csv
from vpipe.schedule.simulate import simulate
from vpipe.schedule.timeline import Costs, StageCosts, uniform

MS = 1e-3


def measured(schedule: str, ranks: int, units: int, times: Sequence[float], numbers: Sequence[int]) -> list[Measured]:
    """Steps that take exactly what a simulation says; ``times`` of a stage's forward, I and W, in milliseconds."""
    program = lower(build(schedule, ranks, units))
    costs = Costs(tuple(StageCosts(time * MS, time * MS, time * MS) for time in times))
    step = from_simulation(simulate(program, costs))
    return [replace(step, step=number) for number in numbers]


def test_an_asynchronous_run_compares_equal_programs_only() -> None:
    """Its last chain is shorter: laid beside the simulation of the others it was "−26 %"."""
    steps = measured("pipedream", 3, 12, [1, 2, 1], range(4)) + measured("pipedream", 3, 5, [1, 2, 1], [4])
    told = timelines(steps)
    assert told["prediction"]["units"] == 12
    assert told["prediction"]["error"] == pytest.approx(0, abs=1e-3)
    assert [told["programs"][step["program"]]["units"] for step in told["steps"]] == [12, 12, 12, 12, 5]
    for step in told["steps"]:
        program = told["programs"][step["program"]]
        assert program["simulated"]["span"] == pytest.approx(step["span"], rel=1e-3), "each beside its own simulation"
        assert [len(row) for row in program["rows"]] == [len(times) // 3 for times in step["ranks"]]


def run_of(program: Any, layers: Sequence[int], tmp_path: Path, schedule: str) -> RunDirectory:
    names = iter(range(sum(layers)))
    held = [tuple(f"block {next(names)}" for _ in range(count)) for count in layers]
    stages = tuple(RunStage(layers=each, weight_bytes=8) for each in held)
    facts = RunFacts(program=to_csv(program), schedule=schedule, num_microbatches=8, stages=stages)
    return RunDirectory(tmp_path, facts)


def test_the_verdict_names_the_slow_rank_and_a_cut_that_is_as_quick_as_it_says(tmp_path: Path) -> None:
    """Stages of 1 and 3 equal layers; 2 and 2 would be best, and the simulator, asked directly, agrees."""
    steps = measured("1f1b", 2, 8, [1, 3], range(4))
    found = verdict(run_of(steps[0].program, [1, 3], tmp_path, "1f1b"), steps)
    assert found is not None
    assert found["cause"] == "imbalance"
    assert "rank 1 sets the pace: stage 1 works 1.50 times as long as the mean" in found["says"]
    assert "Rank 0 waits" in found["says"]
    assert "--scheduler" in found["remedy"]["command"]
    program = build(found["remedy"]["command"].split()[-1], 2, 8)
    even = Costs(tuple(StageCosts(*[4 * MS / program.num_stages] * 3) for _ in range(program.num_stages)))
    gain = steps[0].span * 1e-9 / simulate(program, even).makespan
    assert found["remedy"]["gain"] == pytest.approx(gain, rel=0.02)
    hungry = verdict(
        run_of(steps[0].program, [1, 3], tmp_path, "1f1b"), [replace(step, lead=20 * step.span) for step in steps]
    )
    assert hungry is not None
    assert (hungry["cause"], hungry["remedy"]) == ("data", None), "another schedule does not read sooner"
    assert "dataset.num_workers" in hungry["says"]


def test_nothing_is_recommended_where_nothing_is_gained(tmp_path: Path) -> None:
    steps = measured("zb-v", 2, 60, [1, 1, 1, 1], range(3))
    found = verdict(run_of(steps[0].program, [1, 1, 1, 1], tmp_path, "zb-v"), steps)
    assert found is not None
    assert found["remedy"] is None
    assert "little to gain" in found["says"]
    assert verdict(run_of(steps[0].program, [1, 1, 1, 1], tmp_path, "zb-v"), []) is None


def test_predicted_memory_is_that_of_the_executed_order(make_run: MakeRun) -> None:
    """The plan was made for 1f1b, which holds 4 3 2 1 microbatches; gpipe holds eight."""
    path = make_run("gpipe", 4, 8)
    terms = {"weights": 100, "gradients": 100, "optimizer": 200, "buffers": 7, "segment_inputs": 0, "recomputed": 0}
    rows = [terms | {"kept": 10 * held, "swapped": 0, "total": 407 + 10 * held} for held in (4, 3, 2, 1)]
    plan = {"schedule": "1f1b", "num_ranks": 4, "num_microbatches": 8, "stages_per_rank": 1, "stage_memory": rows}
    (path / "plan.json").write_text(json.dumps(plan))
    found = memory_table(open_run(path), [])["stages"]
    assert [row["predicted"]["kept"] for row in found] == [80] * 4
    assert [row["predicted"]["total"] for row in found] == [407 + 80] * 4
    assert [row["in_flight"] for row in found] == [8] * 4


def test_measured_memory_is_tensors_and_not_the_interpreter(make_run: MakeRun) -> None:
    run = open_run(make_run("1f1b", 2, 4))
    held = {"rss": 300 * 2**20, "weights": 1000, "versions": 3, "optimizer": 2000, "in_step": 500}
    steps = [SimpleNamespace(program=run.program, memory=[held, held])]
    found = memory_table(run, steps)["ranks"]  # type: ignore[arg-type]
    assert [row["tensors"] for row in found] == [3000 + 2000 + 500] * 2


def test_who_becomes_slow_is_a_straggler_and_who_always_was_is_not(make_run: MakeRun) -> None:
    path = make_run("1f1b", 4, 4)
    for rank in range(4):
        lines = []
        for step in range(60):
            busy = (3 if rank == 0 else 1) * (2 if rank == 2 and step >= 45 else 1) * (1 + 0.02 * (step % 3))
            line = {"step": step, "iteration": step, "busy": int(busy * 1e6), "waited": 10, "memory": {"rss": step}}
            lines.append(json.dumps(line) + "\n")
        (path / "events" / f"rank{rank}.steps.jsonl").write_text("".join(lines))
    found = trend(open_run(path), 2**20)
    assert list(found["stragglers"]) == ["2"]
    assert "2.0" in found["stragglers"]["2"] or "1.9" in found["stragglers"]["2"]
    assert len(found["busy"]) == 4
    assert found["process"][1][-1] == 59


def test_the_lead_of_a_host_is_shown_where_there_is_a_device(make_run: MakeRun) -> None:
    """The most nanoseconds between handing an action over and the device's beginning it."""
    action = parse("0F0")
    there = [Record(action, 500, 500, 900, enqueued=200), Record(action, 900, 900, 990, enqueued=250)]
    assert run_ahead(there) == 650
    assert run_ahead([Record(action, 500, 500, 900, enqueued=700)]) == 0
    assert run_ahead([Record(action, 500, 500, 900)]) is None
    for lead, shown in ((650, [[6.5e-07]] * 2), (None, None)):
        path = make_run("1f1b", 2, 4)
        for rank in range(2):
            line = {"step": 0, "busy": 5, "waited": 1, "ahead": lead}
            (path / "events" / f"rank{rank}.steps.jsonl").write_text(json.dumps(line) + "\n")
        assert trend(open_run(path), 2000)["ahead"] == shown


def test_a_short_look_reads_the_end_of_the_files(make_run: MakeRun) -> None:
    path = make_run("1f1b", 2, 4)
    for rank in range(2):
        text = "".join(json.dumps({"step": n, "busy": 5, "waited": 1}) + "\n" for n in range(1000))
        (path / "events" / f"rank{rank}.steps.jsonl").write_text(text)
    steps = trend(open_run(path), 2000)["iterations"]
    assert steps[-1] == 999
    assert steps[0] > 900


def test_the_bubble_of_page_and_simulator_is_one() -> None:
    program = lower(build("1f1b", 4, 8))
    simulation = simulate(program, uniform(program.placement, scale=[1, 1, 10, 1]))
    told = timelines([from_simulation(simulation)])
    assert told["prediction"]["measured_bubble"] == pytest.approx(simulation.bubble)
    assert simulation.bubble > 0.6, "the busiest rank hid this: 2.4 %"


@pytest.mark.parametrize(("cores", "part"), [(1, 5), (1, 50), (2, 5), (None, 5)])
def test_more_ranks_than_cores_are_told_first_and_no_schedule_is_advised(
    cores: int | None, part: int, tmp_path: Path
) -> None:
    """Four ranks on two cores: "messages cost 43 %", and another schedule was advised."""
    steps = [
        replace(
            step, ranks=tuple(tuple(e._replace(stalled=(e.end - e.ready) // part) for e in row) for row in step.ranks)
        )
        for step in measured("1f1b", 2, 8, [1, 3], range(4))
    ]
    run = run_of(steps[0].program, [1, 3], tmp_path, "1f1b")
    found = verdict(replace(run, facts=replace(run.facts, cores=cores)), steps)
    assert found is not None
    share = timelines(steps)["prediction"]["shares"][-1][1 + CAUSES.index("cores")]
    if (cores, part) == (1, 5):
        assert (found["cause"], found["remedy"]) == ("cores", None)
        assert found["says"].startswith(f"More ranks than cores: 2 ranks on 1 cores wait {share:.0%} of their time")
    else:
        assert found["cause"] == "imbalance"
        assert found["remedy"] is not None


def test_verdict_table_and_tile_print_one_figure(make_run: MakeRun) -> None:
    path = make_run("1f1b", 4, 8, steps=9)
    told = payload(open_run(path), recorded(open_run(path)))
    prediction, verdict_of = told["prediction"], told["verdict"]
    busy, *causes = prediction["shares"][-1]
    assert prediction["measured_bubble"] == pytest.approx(1 - busy) == verdict_of["bubble"]
    assert max(causes) == causes[CAUSES.index(verdict_of["cause"])]
    assert f"{max(causes):.0%}" in verdict_of["says"] or verdict_of["cause"] == "imbalance"
    seconds = {line["iteration"]: line["seconds"] for line in open_run(path).metrics() if line["kind"] == "train"}
    assert prediction["iteration_seconds"] == median(list(seconds.values())[1:])
    assert "iterations" not in prediction


def test_a_rank_that_waits_for_the_first_unit_has_not_begun_its_step() -> None:
    """Its first receive began while rank 0 still read the batch: steps were told as longer than their iterations."""
    step = measured("1f1b", 2, 8, [1, 1], [0])[0]
    late = 5 * round(MS * 1e9)
    rows = tuple(tuple(e._replace(begin=e.begin and e.begin + late, ready=e.ready + late, end=e.end + late) for e in row)
                 for row in step.ranks)  # fmt: skip
    assert replace(step, ranks=rows).took == step.took
    assert timelines([replace(step, ranks=rows)])["prediction"]["measured_seconds"] == pytest.approx(step.took * 1e-9)
