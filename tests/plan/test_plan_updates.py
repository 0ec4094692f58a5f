"""The optimizer's update in a prediction: once a batch in synchronous schedules, after every unit in PipeDream's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vpipe.plan.costs import LayerCost, Profile
from vpipe.plan.layout import PlannedLayout
from vpipe.plan.planner import plan
from vpipe.plan.predict import Machine, Pipe, predict

UPDATE = 0.5
LAYER = LayerCost("layer", 1.0, 1.0, 1.0, 0, 0, 8)
PLAIN = Profile((LAYER,) * 4)
PAYING = Profile((replace(LAYER, update=UPDATE),) * 4)
RANKS, MICROBATCHES = 2, 6


def step(profile: Profile, schedule: str) -> float:
    pipe = Pipe.of(schedule, RANKS, MICROBATCHES)
    return predict(profile, PlannedLayout.even(4, RANKS), pipe, Machine.of(RANKS, None)).step_time


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_synchronous_batch_ends_with_one_update(schedule: str) -> None:
    assert step(PAYING, schedule) == pytest.approx(step(PLAIN, schedule) + 2 * UPDATE)


def test_an_asynchronous_pipe_updates_after_every_unit() -> None:
    assert step(PLAIN, "pipedream") == pytest.approx(MICROBATCHES * 2 * 3.0)
    assert step(PAYING, "pipedream") == pytest.approx(MICROBATCHES * 2 * (3.0 + UPDATE))


def test_two_versions_update_once_a_batch() -> None:
    assert step(PAYING, "pipedream-2bw") == pytest.approx(step(PLAIN, "pipedream-2bw") + 2 * UPDATE)


def test_the_search_sees_updates_that_every_unit_pays() -> None:
    """A layer whose update is dear gets fewer neighbours where it is paid after every unit."""
    dear = Profile((replace(LAYER, update=7.5), *[LAYER] * 4))
    once, always = (plan(dear, RANKS, num_microbatches=8, schedule=name).layout for name in ("1f1b", "pipedream"))
    assert once.counts in ((2, 3), (3, 2))
    assert always.counts == (1, 4)
