"""Questions that once had a wrong answer, no answer, or a traceback."""

from __future__ import annotations

import pytest
from plan_chains import cap_of, large_chain

from vpipe.errors import UserError
from vpipe.plan.bounds import Options
from vpipe.plan.costs import LayerCost, Profile
from vpipe.plan.cuts import Cutter
from vpipe.plan.judge import Judge
from vpipe.plan.machine import Machine
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
    assert not list(Cutter(Packer(judge, Options()), over=lambda: True).proposals())
    found = plan(profile, 6, num_microbatches=12, memory=cap, time_limit=1e-6)
    assert max(found.prediction.rank_memory) <= cap
    assert found.lower_bound <= found.step_time
