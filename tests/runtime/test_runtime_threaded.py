"""One worker thread per microbatch: other orders, the same bits."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from runtime_gloo import Worlds
from runtime_models import MODELS, WIDTH, build
from runtime_support import Case, check, check_processes, differing, pipeline
from torch import Tensor, nn

from vpipe import Pipeline, UserError
from vpipe.compat.priorities.order import POLICIES
from vpipe.compat.threaded import ThreadedEngine, predecessors
from vpipe.schedule import catalog

THREADED = {"executor": "threaded"}


@pytest.mark.parametrize("model", MODELS)
def test_async_threaded_equals_replay(model: str) -> None:
    pipe = check(Case("async_threaded", model, 3, 5, recompute=0.5, clip_norm=0.5))
    assert all(isinstance(engine, ThreadedEngine) for engine in pipe.engines)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("schedule", ["async_threaded", "1f1b", "zb-h1"])
def test_every_policy_gives_the_same_bits(policy: str, schedule: str) -> None:
    check(Case(schedule, "batch_norm", 3, 6, recompute=0.5, more=THREADED | {"priority": policy}))


@pytest.mark.parametrize("schedule", [entry.name for entry in catalog.entries()])
def test_every_schedule_may_run_in_threads(schedule: str) -> None:
    check(Case(schedule, "plain", 2, 4, recompute=0.5, num_steps=1, more=THREADED))


def test_one_rank_and_replicas() -> None:
    check(Case("async_threaded", "plain", 1, 4))
    check(Case("async_threaded", "skips", 4, 3, replicas=2))


@pytest.mark.parametrize("model", ["plain", "structured", "batch_norm"])
def test_over_gloo(model: str, worlds: Worlds) -> None:
    check_processes(worlds.run, Case("async_threaded", model, 2, 5, recompute=0.5, more={"priority": "fifo"}))


def test_a_worker_for_each_microbatch() -> None:
    seen: dict[str, set[int]] = {}

    class Noting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.setdefault(threading.current_thread().name, set()).add(int(x[0, 0]))
            return x

    pipe = Pipeline(
        [Noting(), nn.Linear(WIDTH, WIDTH)], nn.functional.mse_loss, schedule="async_threaded", num_microbatches=4
    )
    x = torch.arange(4.0).repeat_interleave(2).unsqueeze(1).expand(8, WIDTH)
    pipe.train_step(x, torch.zeros(8, WIDTH), update=False)
    assert seen == {f"vpipe-rank0-microbatch{unit}": {unit} for unit in range(4)}


def test_waiting_for_a_message_does_not_hold_the_device() -> None:
    """Rank 0 goes on with the next forwards while the first unit's gradient is on its way: a backward may overtake forwards."""
    model = build("plain", 10)
    pipe = pipeline(Case("async_threaded", "plain", 2, 8, more={"priority": "critical-path"}), model, 2)
    pipe.train_step(*model.data(16, 0))
    rows = [[str(record.action) for record in pipe.trace().records[rank]] for rank in range(2)]
    assert rows[1].index("1B0") < rows[1].index("1F7")


def test_what_waits_for_what() -> None:
    """F F B B of two units at one stage: each unit by itself, forwards in order, backwards in order."""
    program = catalog.build("gpipe", 1, 2)
    row = [action for action in program.rows[0] if action.microbatch >= 0]
    assert list(map(str, row)) == ["0F0", "0F1", "0B0", "0B1"]
    assert predecessors(program, row) == [set(), {0}, {0}, {1, 2}]


def test_a_failure_names_its_action_and_the_pipeline_goes_on() -> None:
    case = Case("async_threaded", "plain", 2, 4)
    model, twin = build("plain", 10), build("plain", 10)
    pipe, other = pipeline(case, model, 2), pipeline(case, twin, 2)
    right = model.layers[7].forward
    calls: list[int] = []

    def sometimes(x: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError("mine")
        return right(x)

    model.layers[7].forward = sometimes
    with pytest.raises(ZeroDivisionError, match="mine") as error:
        pipe.train_step(*model.data(8, 0))
    assert any("rank 1, stage 1, action 1F2, microbatch 2" in note for note in error.value.__notes__)
    for step in range(2):
        assert pipe.train_step(*model.data(8, step)) == other.train_step(*model.data(8, step))
    assert not differing(pipe.state_dict(), other.state_dict())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"executor": "threads"}, "there is no executor 'threads'"),
        ({"executor": "threaded", "priority": "first"}, "did you mean 'first-hp'"),
        ({"priority": "fifo"}, "orders worker threads, but the executor is plain"),
    ],
)
def test_bad_choices(more: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Pipeline([nn.Linear(2, 2)], nn.functional.mse_loss, **more)
