"""Gradients that are sent ahead (``early_reduction``): the same bits on every transport, and the trace shows them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runtime_gloo import Worlds
from runtime_models import WIDTH, build
from runtime_support import Case, check, check_processes, differing, pipeline
from torch import Tensor, nn

from vpipe import Pipeline
from vpipe.runtime.updates import replicas
from vpipe.schedule.action import Kind

EARLY = {"early_reduction": True}


def sends(pipe: Pipeline) -> int:
    return sum(record.action.kind is Kind.SEND_W for row in pipe.trace().records.values() for record in row)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "dualpipe", "chimera", "looped-bfs"])
def test_equal_to_the_replay_and_to_the_late_one(schedule: str) -> None:
    """Losses and weights equal a replay of what was executed; and those of the same run without."""
    count = 1 if schedule in ("dualpipe", "chimera") else 2
    case = Case(schedule, "plain", 4, 4, replicas=count, clip_norm=0.3, num_layers=12, more=EARLY)
    early = check(case)
    assert sends(early) == sum(len(stages) - 1 for stages in early.placement.stages_of)
    model = build("plain", 12, 0.1)
    late = pipeline(Case(schedule, "plain", 4, 4, replicas=count, clip_norm=0.3), model, 4)
    for step in range(case.num_steps):
        late.train_step(*model.data(case.rows * late.programs.num_units, step))
    assert not sends(late)
    assert not differing(early.state_dict(), late.state_dict())


def test_one_stage_per_rank_sends_nothing_ahead() -> None:
    assert not sends(check(Case("1f1b", "plain", 4, 3, replicas=2, more=EARLY)))


@pytest.mark.parametrize("transport", ["distributed", "shm"])
def test_over_processes(transport: str, worlds: Worlds) -> None:
    more = EARLY | {"transport": transport}
    check_processes(worlds.run, Case("interleaved", "plain", 4, 4, replicas=2, clip_norm=0.3, more=more))
    check_processes(worlds.run, Case("zb-v", "tied", 4, 3, replicas=2, recompute=1.0, more=more))


class Sometimes(nn.Module):
    """One of its weights is used by some units only, the other by none."""

    def __init__(self) -> None:
        super().__init__()
        self.some = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.some(x) if x[0, 0] > 0 else x * 1


def run(early: bool) -> dict[str, Tensor]:
    torch.manual_seed(1)
    layers: list[Any] = [nn.Linear(WIDTH, WIDTH), Sometimes(), nn.Linear(WIDTH, WIDTH), Sometimes()]
    pipe = Pipeline(
        layers,
        nn.functional.mse_loss,
        schedule="interleaved",
        num_microbatches=2,
        num_ranks=4,
        replicas=2,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5),
        early_reduction=early,
    )
    for _ in range(3):
        pipe.train_step(torch.randn(8, WIDTH), torch.randn(8, WIDTH))
    return pipe.state_dict()


def test_weights_that_nobody_used_are_left_alone() -> None:
    """AdamW would shrink a weight whose gradient is zero, but not one that has none."""
    early = run(True)
    assert not differing(early, run(False))
    torch.manual_seed(1)
    nn.Linear(WIDTH, WIDTH)
    assert torch.equal(early["1.never.weight"], Sometimes().never.weight)


def test_a_replica_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what came ahead counts."""
    expected = run(True)
    taken = replicas.GradientsAhead.taken

    def alone(self: Any, stage: Any) -> Any:
        return [(parameters, told[:1]) for parameters, told in taken(self, stage) or ()] or None

    monkeypatch.setattr(replicas.GradientsAhead, "taken", alone)
    assert differing(run(True), expected)
