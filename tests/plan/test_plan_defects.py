"""Questions that once had a wrong answer, no answer, or a traceback."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from plan_chains import cap_of, large_chain

from vpipe.errors import UserError
from vpipe.plan.advice import Misfit
from vpipe.plan.answer import Plan
from vpipe.plan.costs import LayerCost, Profile
from vpipe.plan.floor import Floor
from vpipe.plan.judge import Judge
from vpipe.plan.limits import Limits
from vpipe.plan.links import Links
from vpipe.plan.machine import Machine
from vpipe.plan.memory import Options
from vpipe.plan.orders import orders
from vpipe.plan.packing import Packer
from vpipe.plan.pipe import Pipe
from vpipe.plan.planner import plan


def test_a_stage_that_needs_exactly_the_cap_fits() -> None:
    """12000 bytes were called too few for a stage of 12000, and the plan with 12001 was another."""
    sizes = [(2.0, 1000), (6.0, 3000), (6.0, 3000), (2.0, 1000)]
    layers = tuple(LayerCost(f"l{i}", t, t, t, size, 500, 1000) for i, (t, size) in enumerate(sizes))
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        free = plan(Profile(layers), 2, num_microbatches=4, schedule=schedule)
        cap = max(free.prediction.rank_memory)
        exactly, more = (
            plan(Profile(layers), 2, num_microbatches=4, schedule=schedule, memory=c) for c in (cap, cap + 1)
        )
        assert exactly.layout == more.layout == free.layout


def test_as_many_stages_as_layers_but_one() -> None:
    """Was an IndexError: the last stage reached back beyond the end."""
    times = [230e-6, 340e-6, 120e-6, 120e-6]
    profile = Profile(tuple(LayerCost(f"l{i}", t, t, t, 1000, 100) for i, t in enumerate(times)))
    assert plan(profile, 3, num_microbatches=4, schedule="auto").exact


def test_layers_that_take_no_time_on_a_link_that_does() -> None:
    """Searched without end: the least cycle time was halved down from nothing."""
    layer = LayerCost("a", 0.0, 0.0, 0.0, 1000, 1000, 100, 200)
    found = plan(Profile((layer, layer), link_bandwidth=1e9), 2, num_microbatches=4)
    assert found.step_time == pytest.approx(5e-6)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"speed": [float("inf"), 1.0]}, "speed of rank 0 is inf"),
        ({"num_microbatches": 100_000_000}, "use fewer microbatches"),
        ({"num_microbatches": 10**9, "schedule": "auto"}, "use fewer microbatches"),
    ],
)
def test_questions_without_end_are_refused(wrong: dict[str, object], words: str) -> None:
    layer = LayerCost("a", 1.0, 1.0, 1.0, 1000, 1000)
    with pytest.raises(UserError, match=words):
        plan(Profile((layer,) * 4), 2, **({"num_microbatches": 4} | wrong))  # type: ignore[arg-type]


def test_stages_of_a_rank_share_its_memory_and_do_not_divide_it() -> None:
    """One large stage beside small ones on a rank: each in an equal part of the cap would not fit."""
    embedding = LayerCost("emb", 0.1, 0.1, 0.1, 100, 200, 19_000)
    layer = LayerCost("l", 1.2, 1.9, 1.7, 300, 100, 200)
    profile = Profile((embedding, *(layer,) * 5))
    free = plan(profile, 2, num_microbatches=2, schedule="interleaved")
    cap = max(free.prediction.rank_memory)
    assert free.prediction.stage_memory[0].total > cap / 2
    found = plan(profile, 2, num_microbatches=2, schedule="interleaved", memory=cap, recompute=False, swap=False)
    assert found.step_time == free.step_time


def test_the_time_limit_holds_for_the_proposals_too_and_what_fits_is_still_found() -> None:
    """Cuts near the least memory were proposed to the end whatever ``--time-limit`` said."""
    profile = large_chain(0, 60, alike=0.0, swap=1.0)
    cap = cap_of(profile, "1f1b", 6, 12, 0.0) * 1.02
    judge = Judge(profile, Pipe.of("1f1b", 6, 12), Machine.of(6, cap))
    assert not list(Floor(judge, Options(), limits=Limits(deadline=0.0)).proposals())
    found = plan(profile, 6, num_microbatches=12, memory=cap, time_limit=1e-6)
    assert max(found.prediction.rank_memory) <= cap
    assert found.lower_bound <= found.step_time


@pytest.mark.parametrize("swap", [0.0, 1.0])
def test_near_the_least_memory_all_that_is_proposed_fits(swap: float) -> None:
    """At 1000 x 64 a hundred partitions were solved stage by stage before one fitted, and the effort was spent."""
    profile = large_chain(0, 60, alike=0.0, swap=swap)
    cap = cap_of(profile, "1f1b", 12, 24, 0.0) * 1.01
    judge = Judge(profile, Pipe.of("1f1b", 12, 24), Machine.of(12, cap))
    packer = Packer(judge, Options())
    proposed = list(Floor(judge, Options()).proposals())
    assert proposed
    assert all(packer.overflow(cuts)[0] <= 0 for cuts in proposed)


def test_stages_of_a_rank_are_recomputed_in_turn() -> None:
    """One unit of each of two stages on a rank: recomputing frees nothing of a stage alone, but what the other holds.
    The planner said that nothing fits."""
    layer = LayerCost("l", 1.0, 1.0, 1.0, 1000, 10)
    profile = Profile((layer,) * 4)
    free = plan(profile, 2, num_microbatches=2, schedule="v-min")
    cap = max(free.prediction.rank_memory) - 900
    found = plan(profile, 2, num_microbatches=2, schedule="v-min", memory=cap)
    assert max(found.prediction.rank_memory) <= cap


def test_the_time_limit_holds_for_bound_remedies_and_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound of 1000 x 64 took seconds, remedies are plans of their own, and 64 ranks have two thousand exchanges."""
    profile = large_chain(0, 60, alike=0.0, swap=0.0)
    cap = cap_of(profile, "1f1b", 6, 12, 0.0)
    over = Limits(deadline=0.0)
    judge = Judge(profile, Pipe.of("1f1b", 6, 12), Machine.of(6, cap * 1.02))
    full = Floor(judge, Options()).bound
    with monkeypatch.context() as patched:
        patched.setattr("vpipe.plan.floor.Growth", None)
        assert 0 < Floor(judge, Options(), limits=over).bound <= full
    misfit = Misfit(profile, judge.pipe, Machine.of(6, cap * 0.9), Options(), over)
    with monkeypatch.context() as patched:
        patched.setattr("vpipe.plan.advice.shortfall", lambda *given: pytest.fail("asked after the time"))
        assert "short by" in str(misfit.explained())
        assert "the time limit ended the search" in str(misfit.explained())
    tried: list[float] = []

    def made(order: Sequence[int], effort: float) -> Plan:
        tried.append(effort)
        return plan(profile, 8, num_microbatches=8, effort=0.01)

    orders(Machine.of(8, None, [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]), made, over)
    assert tried == [0.1, 1.0], "the given order, little and in full"


def test_what_limits_a_plan_is_seen_over_links_that_differ() -> None:
    layer = LayerCost("layer", 1e-3, 1e-3, 1e-3, 1000, 10**6)
    profile = Profile((layer,) * 4, link_bandwidth=1e12)
    slow = Links(bandwidth=((1.0, 1e12, 1e6), (1e12, 1.0, 1e6), (1e6, 1e6, 1.0)))
    found = plan(profile, 3, num_microbatches=4, links=slow)
    assert found.limit == f"the link before layer {found.layout.cuts[2]}, which is busy 1.00 s for each microbatch"


def test_a_hard_link_to_what_is_read_is_not_written(vpipe: Any, tmp_path: Path) -> None:
    """Only names were compared: a second name of the profile was overwritten with the plan."""
    source, other = tmp_path / "profile.json", tmp_path / "other.json"
    Profile((LayerCost("a", 1.0, 1.0, 1.0, 1000, 1000),) * 4).save(source)
    other.hardlink_to(source)
    said = vpipe("plan", str(source), "-p", "2", "-m", "4", "-o", str(other))
    assert said.returncode == 2
    assert "would destroy it" in said.stderr
