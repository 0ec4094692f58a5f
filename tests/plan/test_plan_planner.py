"""Whole plans: what a user asks for and what comes back."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from vpipe.compat.plan_file import to_vpipe
from vpipe.errors import UserError
from vpipe.layer import even_partition
from vpipe.plan.costs import LayerCost, Profile
from vpipe.plan.layout import PlannedLayout, layout_from_json, to_ratio
from vpipe.plan.memory import Choice
from vpipe.plan.planner import plan
from vpipe.plan.predict import Machine, Pipe, predict, stage_facts
from vpipe.schedule.semantics import units_in_flight

K, R, S = Choice.KEEP, Choice.RECOMPUTE, Choice.SWAP
MIB = 1 << 20


def transformer(num_blocks: int = 24, **machine: float) -> Profile:
    """An embedding, equal blocks, and a head that costs as much as a block and a half."""
    block = LayerCost("block", 10e-3, 10e-3, 10e-3, 48 * MIB, 4 * MIB, 28 * MIB, 56 * MIB)
    embedding = LayerCost("embedding", 2e-3, 0.0, 2e-3, 4 * MIB, 4 * MIB, 120 * MIB, 240 * MIB)
    head = LayerCost("head", 15e-3, 15e-3, 15e-3, 100 * MIB, 0, 120 * MIB, 240 * MIB)
    layers = (embedding, *(replace(block, name=f"block{i}") for i in range(num_blocks)), head)
    return Profile(layers, input_bytes=8192, microbatch_rows=8, **machine)  # type: ignore[arg-type]


def test_the_schedule_says_how_many_units_are_in_flight() -> None:
    assert units_in_flight(Pipe.of("1f1b", 4, 8).program) == [4, 3, 2, 1]
    assert units_in_flight(Pipe.of("1f1b", 4, 2).program) == [2, 2, 2, 1]
    assert units_in_flight(Pipe.of("gpipe", 4, 8).program) == [8, 8, 8, 8]
    machine = Machine.of(4, None)
    assert [(f.waiting, f.deferred) for f in stage_facts(Pipe.of("1f1b", 4, 8).program, machine)] == [(1, 0)] * 4
    assert [(f.units, f.versions) for f in stage_facts(Pipe.of("pipedream", 4, 8).program, machine)] == [
        (4, 4),
        (3, 3),
        (2, 2),
        (1, 1),
    ]
    assert [f.waiting for f in stage_facts(Pipe.of("zb-h1", 4, 8).program, machine)] == [1, 2, 3, 4]
    assert [f.versions for f in stage_facts(Pipe.of("pipedream-2bw", 4, 8).program, machine)] == [2, 2, 2, 2]


def test_asynchronous_plans_rediscover_the_pattern_of_vpipe() -> None:
    """Fewer units in flight further down: the recompute ratio falls with the stage, and the first stages hold less."""
    block = LayerCost("block", 10e-3, 10e-3, 10e-3, 48 * MIB, 4 * MIB, 2 * MIB, 4 * MIB)
    profile = Profile((block,) * 97)  # BERT-48 has 97 blocks, planned for 8 ranks
    found = plan(profile, 8, num_microbatches=32, memory="2.2GiB", schedule="pipedream")
    ratios = [choices.count(R) / len(choices) for choices in found.layout.choices]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > 0.6
    assert ratios[-1] == 0
    assert found.layout.counts[0] < found.layout.counts[-1]
    assert found.gap < 0.05


def test_equal_stages_take_what_the_formula_says_and_the_bound_proves_it() -> None:
    equal = plan(Profile((LayerCost("block", 1.0, 1.0, 1.0, 10, 1),) * 8), 4, num_microbatches=8)
    assert equal.step_time == 6.0 * (8 + 3)
    assert equal.exact


def test_the_plan_beats_equal_layer_counts() -> None:
    profile = transformer(10)
    found = plan(profile, 4, num_microbatches=8)
    even = predict(profile, PlannedLayout.of_counts(even_partition(12, 4)), Pipe.of("1f1b", 4, 8), Machine.of(4, None))
    assert found.step_time < even.step_time


def test_asynchronous_step_time_is_the_cycle() -> None:
    found = plan(transformer(), 4, num_microbatches=8, schedule="pipedream")
    assert found.step_time == pytest.approx(8 * max(found.prediction.stage_times))
    times = found.prediction.stage_times
    assert found.prediction.bubble == pytest.approx(1 - sum(times) / (4 * max(times))), "ranks wait for the slowest"


def test_slower_ranks_get_fewer_layers_and_smaller_ranks_recompute_more() -> None:
    slow = plan(transformer(), 4, num_microbatches=8, speed=[1.0, 0.5, 1.0, 1.0])
    assert slow.layout.counts[1] < min(slow.layout.counts[0], slow.layout.counts[2])
    small = plan(transformer(), 2, num_microbatches=8, memory=["8GiB", "2.7GiB"])
    assert R not in small.layout.choices[0]


def test_swap_replaces_recompute_where_the_lane_is_fast() -> None:
    again = plan(transformer(), 4, num_microbatches=8, memory="1.6GiB")
    swapped = plan(transformer(swap_bandwidth=8e9), 4, num_microbatches=8, memory="1.6GiB")
    assert any(R in choices for choices in again.layout.choices)
    assert any(S in choices for choices in swapped.layout.choices)
    assert swapped.step_time < again.step_time
    assert (
        plan(transformer(swap_bandwidth=8e9), 4, num_microbatches=8, memory="1.6GiB", swap=False).layout == again.layout
    )


def test_memory_terms_are_within_the_cap_and_shown() -> None:
    found = plan(transformer(), 4, num_microbatches=8, memory="1.6GiB")
    cap = int(1.6 * (1 << 30))
    assert all(terms.total <= cap for terms in found.prediction.stage_memory)
    assert all(size <= cap for size in found.prediction.rank_memory)
    assert "limited by memory: stage" in found.table()
    assert "recompute" in found.table()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved", "zb-v", "pipedream", "pipedream-2bw"])
def test_every_kind_of_schedule_is_planned_within_its_memory(schedule: str) -> None:
    found = plan(transformer(), 4, num_microbatches=8, memory="2GiB", schedule=schedule)
    assert all(size <= 2 << 30 for size in found.prediction.rank_memory)
    assert found.layout.num_stages == 4 * found.stages_per_rank
    assert 0 < found.lower_bound <= found.step_time * (1 + 1e-9)


def test_auto_ranks_the_catalogue_by_simulated_time() -> None:
    near = plan(transformer(), 4, num_microbatches=16, schedule="auto")
    times = [time for _, time in near.ranking]
    assert times == sorted(times)
    assert near.ranking[0][0] == near.schedule
    assert not {"pipedream", "pipedream-2bw", "naive"} & {name for name, _ in near.ranking}
    # On a slow network the ranking turns over: schedules that send often lose.
    far = plan(transformer(link_latency=60e-3), 4, num_microbatches=16, schedule="auto")
    places = {
        name: [[n for n, _ in found.ranking].index(name) for found in (near, far)]
        for name in ("interleaved", "eager-1f1b")
    }
    assert places["interleaved"][0] < places["eager-1f1b"][0]
    assert places["interleaved"][1] > places["eager-1f1b"][1]


def test_the_number_of_microbatches_may_be_free() -> None:
    found = plan(transformer(), 4, num_microbatches=[1, 2, 4, 8, 16], batch_rows=64, schedule="1f1b")
    assert found.num_microbatches == 16
    assert found.microbatch_rows == 4
    slow = plan(transformer(action_overhead=50e-3), 4, num_microbatches=[1, 2, 4, 8, 16], batch_rows=64)
    assert slow.num_microbatches < 16


def test_what_does_not_fit_says_how_much_where_and_what_would() -> None:
    with pytest.raises(UserError) as error:
        plan(transformer(), 4, num_microbatches=8, memory="1GiB")
    words = str(error.value)
    assert "stage" in words
    assert "bytes" in words
    assert "ranks" in words
    ranks = int(words.split("would fit with ")[1].split()[0])
    assert plan(transformer(), ranks, num_microbatches=8, memory="1GiB").layout.num_stages == ranks
    with pytest.raises(UserError):
        plan(transformer(), ranks - 1, num_microbatches=8, memory="1GiB")


def test_the_largest_microbatch_that_would_fit() -> None:
    profile = transformer()
    with pytest.raises(UserError) as error:
        plan(profile, 4, num_microbatches=8, memory="1.15GiB", schedule="gpipe")
    rows = int(str(error.value).split("microbatches of ")[1].split()[0])
    plan(profile.scaled(rows), 4, num_microbatches=8, memory="1.15GiB", schedule="gpipe")
    with pytest.raises(UserError):
        plan(profile.scaled(rows + 1), 4, num_microbatches=8, memory="1.15GiB", schedule="gpipe")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_ranks": 40}, "40 ranks has 40 stages, but the model has only 26 layers"),
        ({"memory": "4 gigs"}, "'4 gigs', which is no size"),
        ({"schedule": "1f2b"}, "did you mean '1f1b'"),
        ({"memory": ["1GiB", "2GiB"]}, "memory is given for 2 ranks, but there are 4"),
        ({"speed": [1.0, 0.0, 1.0, 1.0]}, "speed must be more than zero"),
        ({"num_microbatches": 0}, "at least one rank and one microbatch"),
        ({"num_microbatches": 3, "batch_rows": 64}, "cannot be cut into 3"),
        ({"num_ranks": 29, "replicas": "auto"}, "1f1b cannot divide 29 ranks"),
    ],
)
def test_bad_input_is_one_sentence(wrong: dict[str, object], words: str) -> None:
    arguments = {"num_ranks": 4, "num_microbatches": 8, **wrong}
    with pytest.raises(UserError) as error:
        plan(transformer(), **arguments)  # type: ignore[arg-type]
    assert words in str(error.value)


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    found = plan(transformer(swap_bandwidth=2e9), 4, num_microbatches=8, memory="1.6GiB")
    path = tmp_path / "plan.json"
    found.save(path)
    data = json.loads(path.read_text())
    assert layout_from_json(data, "plan.json", 26) == found.layout
    assert data["lower_bound"] <= data["step_time"] == found.step_time
    assert data["stage_memory"][0]["total"] == found.prediction.stage_memory[0].total
    with pytest.raises(UserError, match="adds up to 26 layers, but the model has 30"):
        layout_from_json(data, "plan.json", 30)


# ── VPipe's form ────────────────────────────────────────────────────────────────────────────────────────────────────

SHIPPED = {
    "BERT-24": ([12, 13, 13, 11], [0.3, 0, 0, 0]),
    "GPipe": ([13, 13, 13, 10], [1, 1, 1, 1]),
    "BERT-48": ([11, 11, 12, 12, 13, 13, 14, 11], [1, 0.85, 0.8, 0.6, 0.5, 0.2, 0, 0]),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_plans_that_vpipe_shipped_are_read_and_written(name: str) -> None:
    partition, ratios = SHIPPED[name]
    layout = layout_from_json({"partition": partition, "recompute_ratio": ratios}, name)
    assert [c.count(R) for c in layout.choices] == [int(r * n) for r, n in zip(ratios, partition, strict=True)]
    written, notes = to_vpipe(layout)
    assert not notes
    assert layout_from_json(written, name) == layout


def test_the_last_blocks_are_recomputed() -> None:
    layout = layout_from_json({"partition": [5], "recompute_ratio": [0.5]}, "file")
    assert layout.choices == ((K, K, K, R, R),)


def test_a_ratio_recomputes_exactly_as_many_blocks() -> None:
    for count in range(1, 130):
        assert [int(to_ratio(k, count) * count) for k in range(count + 1)] == list(range(count + 1))


def test_a_plan_of_another_shape_becomes_the_nearest_one_that_fits() -> None:
    profile = transformer(swap_bandwidth=4e9)
    found = plan(profile, 4, num_microbatches=8, memory="1.6GiB")
    facts = stage_facts(Pipe.of("1f1b", 4, 8).program, Machine.of(4, found.memory))
    written, notes = to_vpipe(found.layout, profile, facts)
    assert notes
    assert "written as the last" in notes[0]
    tail = layout_from_json(written, "file")
    sizes = predict(profile, tail, Pipe.of("1f1b", 4, 8), Machine.of(4, None)).rank_memory
    assert all(size <= cap for size, cap in zip(sizes, found.memory, strict=True))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"partition": [3, 0]}, "partition[1] is 0"),
        ({"partition": "even"}, "must be a list"),
        ({"partition": [3, 3], "recompute_ratio": [1]}, "one entry per stage (2), not 1"),
        ({"partition": [3, 3], "recompute_ratio": [1, 1.5]}, "recompute_ratio[1] is 1.5"),
        ({"partition": [3, 3], "swap": [[4], []]}, "names layer 4, but stage 0 holds layers 0 to 2"),
        (7, "a partition is a list"),
    ],
)
def test_bad_plan_files_are_refused(data: object, words: str) -> None:
    with pytest.raises(UserError) as error:
        layout_from_json(data, "plan.json")
    assert words in str(error.value)
    assert "plan.json" in str(error.value)


def test_planning_does_not_import_torch() -> None:
    code = "import sys, vpipe.plan.planner, vpipe.compat.graph_text, vpipe.compat.plan_file; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("schedule", ["chimera", "dualpipe"])
def test_two_directions_are_not_planned(schedule: str) -> None:
    """A rank holds stages of both ends, which this planner's memory does not know."""
    with pytest.raises(UserError, match=f"vpipe plan plans one direction, but in {schedule}"):
        plan(transformer(), 4, num_microbatches=8, schedule=schedule)
    found = plan(transformer(2), 2, num_microbatches=2, schedule="auto").ranking
    assert found
    assert schedule not in {name for name, _ in found}
