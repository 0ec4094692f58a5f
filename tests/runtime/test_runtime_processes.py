"""The matrix over real processes: gloo and shared memory change no bit."""

from __future__ import annotations

import pytest
from runtime_gloo import Worlds
from runtime_models import MODELS
from runtime_support import Case, check_processes

from vpipe.schedule import catalog

SCHEDULES = [entry.name for entry in catalog.entries()]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("transport", ["distributed", "shm"])
def test_two_processes(schedule: str, transport: str, worlds: Worlds) -> None:
    asynchronous = catalog.get(schedule).mode == "asp"
    models = [name for name in MODELS if not (asynchronous and name == "tied")]
    model = models[SCHEDULES.index(schedule) % len(models)]
    check_processes(
        worlds.run, Case(schedule, model, 2, 4, recompute=0.5, clip_norm=0.5, more={"transport": transport})
    )


@pytest.mark.parametrize("model", MODELS)
def test_four_processes(model: str, worlds: Worlds) -> None:
    transport = "shm" if list(MODELS).index(model) % 2 else "distributed"
    case = Case("zb-v", model, 4, 5, recompute=0.5, num_layers=12, more={"transport": transport})
    check_processes(worlds.run, case)


@pytest.mark.rotates(3)
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_model_over_processes(schedule: str, worlds: Worlds) -> None:
    for number, model in enumerate(MODELS):
        if model != "tied" or catalog.get(schedule).mode == "bsp":
            more = {"transport": ("distributed", "shm")[(SCHEDULES.index(schedule) + number) % 2]}
            check_processes(worlds.run, Case(schedule, model, 4, 6, "sgd", recompute=0.5, num_layers=12, more=more))


def test_replicas_over_gloo(worlds: Worlds) -> None:
    check_processes(worlds.run, Case("1f1b", "plain", 4, 3, replicas=2, clip_norm=0.3))
    check_processes(worlds.run, Case("zb-v", "tied", 4, 3, replicas=2, recompute=1.0))
    check_processes(worlds.run, Case("pipedream", "plain", 4, 8, replicas=(2, 1, 1)))
    check_processes(worlds.run, Case("pipedream", "skips", 4, 8, replicas=(1, 2, 1)))
