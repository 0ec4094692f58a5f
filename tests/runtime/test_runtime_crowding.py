"""Ranks that share cores: during a step whoever is woken waits for its turn, and nothing of it stays."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from runtime_gloo import Worlds
from torch import Tensor, nn

from vpipe import Pipeline
from vpipe.runtime.ranks.crowding import CrowdedCores

PLAIN, IN_TURN, USERS = os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_IDLE


class Telling(nn.Module):
    """Notes under which policy it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.policies: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.policies.add(os.sched_getscheduler(0))
        return self.linear(x)


@pytest.fixture
def policy() -> Iterator[None]:
    """This thread's policy is what it was."""
    yield
    os.sched_setscheduler(0, PLAIN, os.sched_param(0))


def policies_of_steps(before: int, cores: set[int] | None) -> tuple[set[int], int]:
    """Under which policies a rank's layer ran in three steps, and the one it was left with."""
    mine = os.sched_getaffinity(0)
    os.sched_setscheduler(0, before, os.sched_param(0))
    os.sched_setaffinity(0, cores or mine)
    try:
        layers = [Telling() for _ in range(2)]
        pipe = Pipeline(
            layers, nn.functional.mse_loss, num_microbatches=3, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1)
        )
        for _ in range(3):
            pipe.train_step(torch.randn(3, 4), torch.randn(3, 4))
        pipe.close()
        return set().union(*(layer.policies for layer in layers)), os.sched_getscheduler(0)
    finally:
        os.sched_setscheduler(0, PLAIN, os.sched_param(0))
        os.sched_setaffinity(0, mine)


def test_ranks_that_share_a_core_take_turns_during_a_step(worlds: Worlds) -> None:
    one = {min(os.sched_getaffinity(0))}
    assert worlds.run(2, policies_of_steps, PLAIN, one) == [({IN_TURN}, PLAIN)] * 2


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
def test_with_a_core_for_every_rank_nothing_is_asked_for(worlds: Worlds) -> None:
    assert worlds.run(2, policies_of_steps, PLAIN, None) == [({PLAIN}, PLAIN)] * 2


def test_the_users_own_policy_stays(worlds: Worlds) -> None:
    one = {min(os.sched_getaffinity(0))}
    assert worlds.run(2, policies_of_steps, USERS, one) == [({USERS}, USERS)] * 2


def test_a_step_that_never_ended_is_no_step_in_another(policy: None) -> None:
    """Two beginnings and one end, as after a failure: the policy is the one before the first."""
    cores = CrowdedCores(10_000)
    cores.begin()
    cores.begin()
    assert os.sched_getscheduler(0) == IN_TURN
    cores.end()
    assert os.sched_getscheduler(0) == PLAIN
    cores.end()
    assert os.sched_getscheduler(0) == PLAIN
