"""The equality matrix: every schedule, model, optimizer, recompute and replication equals ``Replay`` to the bit.

The whole product takes half an hour of two cores and shows little more than its corners do. So what is not one of the
two leading dimensions rotates with them, such that any three meet: a fault that needs four particular values at once
is the only one that could hide.
"""

from __future__ import annotations

from itertools import combinations, product
from math import prod

import pytest
from runtime_models import MODELS
from runtime_support import Case, check

from vpipe.schedule import catalog

SCHEDULES = [entry.name for entry in catalog.entries()]
SYNCHRONOUS = [entry.name for entry in catalog.entries() if entry.mode == "bsp"]
SHAPES = ((2, 4), (3, 5), (4, 8), (1, 3), (4, 2))
"""(ranks, microbatches): fewer microbatches than ranks, one rank, and numbers that do not divide are among them."""
TREATMENTS = [
    (optimizer, recompute, dropout)
    for optimizer in ("sgd", "adam")
    for recompute, dropout in ((0.0, 0.0), (0.5, 0.2), (1.0, 0.2))
]
CROSS = [
    (model, optimizer, recompute)
    for model in MODELS
    for optimizer, recompute in (("sgd", 0.0), ("adam", 1.0), ("adamw", 0.5))
]


def _may_run(schedule: str, model: str, num_ranks: int, num_microbatches: int) -> bool:
    if (schedule == "pipedream-2bw" and num_microbatches < num_ranks - 1) or (schedule == "dualpipe" and num_ranks % 2):
        return False
    return model != "tied" or schedule in SYNCHRONOUS


def _once() -> list[tuple[str, str]]:
    """Each schedule and every model once, where the shape of that place lets them meet."""
    pairs = product(enumerate(SCHEDULES), enumerate(MODELS))
    return [(name, model) for (i, name), (j, model) in pairs if _may_run(name, model, *SHAPES[(i + j) % 3])]


@pytest.mark.rotates(57)
@pytest.mark.parametrize(("schedule", "model"), _once())
def test_every_schedule_equals_replay(schedule: str, model: str) -> None:
    """The fast core: three models of each schedule, with everything else rotating."""
    place = SCHEDULES.index(schedule) + list(MODELS).index(model)
    num_ranks, num_microbatches = SHAPES[place % 3]
    _, optimizer, recompute = CROSS[place % 3]
    clip = 0.5 if place % 2 else None
    check(Case(schedule, model, num_ranks, num_microbatches, optimizer, recompute=recompute, clip_norm=clip))


@pytest.mark.rotates(38)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shape", [(1, 3), (4, 2), (2, 1)])
def test_few_ranks_and_few_microbatches(schedule: str, shape: tuple[int, int]) -> None:
    if _may_run(schedule, "plain", *shape):
        check(Case(schedule, "plain", *shape, recompute=0.5, num_steps=1))


def _cells(schedule: str, model: str) -> list[tuple[tuple[int, int], tuple[str, float, float]]]:
    """Every treatment once and every shape at least once; which of them meet moves on with schedule and model."""
    shift = SCHEDULES.index(schedule) + list(MODELS).index(model)
    return [(SHAPES[(number + shift) % len(SHAPES)], treatment) for number, treatment in enumerate(TREATMENTS)]


def test_any_three_meet() -> None:
    """Of schedule, model, shape and treatment."""
    sizes = {"schedule": len(SCHEDULES), "model": len(MODELS), "shape": len(SHAPES), "treatment": len(TREATMENTS)}
    met = [
        dict(zip(sizes, (schedule, model, *cell), strict=True))
        for schedule in SCHEDULES
        for model in MODELS
        for cell in _cells(schedule, model)
    ]
    for three in combinations(sizes, 3):
        assert len({tuple(cell[name] for name in three) for cell in met}) == prod(sizes[name] for name in three)


@pytest.mark.rotates(24)
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_whole_matrix(schedule: str, model: str) -> None:
    for (num_ranks, num_microbatches), (optimizer, recompute, dropout) in _cells(schedule, model):
        if _may_run(schedule, model, num_ranks, num_microbatches):
            check(Case(schedule, model, num_ranks, num_microbatches, optimizer, dropout, recompute))


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_replicas_of_a_synchronous_schedule(schedule: str) -> None:
    model = ("plain", "skips", "tied", "frozen", "batch_norm")[SYNCHRONOUS.index(schedule) % 5]
    check(Case(schedule, model, 4, 2, replicas=2, recompute=0.5, clip_norm=0.3))


@pytest.mark.rotates(24)
@pytest.mark.slow
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
@pytest.mark.parametrize("model", MODELS)
def test_replicas_of_every_model(schedule: str, model: str) -> None:
    shift = SYNCHRONOUS.index(schedule) + list(MODELS).index(model)
    replicas, num_ranks = ((2, 4), (3, 6), (2, 4 if schedule == "dualpipe" else 2))[shift % 3]
    check(Case(schedule, model, num_ranks, 3, replicas=replicas, recompute=0.5, clip_norm=0.3))


@pytest.mark.parametrize("replicas", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2), (3, 1), (2, 1, 3)])
def test_pipedream_with_replicas_per_stage(replicas: tuple[int, ...]) -> None:
    check(Case("pipedream", "plain", sum(replicas), 12, replicas=replicas, recompute=0.5, num_steps=2))


@pytest.mark.parametrize("options", [{"vertical_sync": True}, {"update_interval": 3}, {"depths": (4, 2, 0)}])
def test_options_of_pipedream(options: dict[str, object]) -> None:
    for model in ("plain", "batch_norm", "skips"):
        check(Case("pipedream", model, 3, 7, options=options, recompute=0.5))


def test_batches_of_2bw() -> None:
    check(Case("pipedream-2bw", "plain", 3, 4, options={"num_batches": 5}, num_steps=2))


def test_stages_per_rank() -> None:
    for schedule, stages in (("interleaved", 3), ("looped-bfs", 4), ("hanayo", 4), ("interleaved-zb", 3)):
        check(Case(schedule, "skips", 3, 6, num_layers=14, more={"stages_per_rank": stages}))
