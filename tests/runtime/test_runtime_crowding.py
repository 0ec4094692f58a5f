"""Ranks that share cores: during a step whoever is woken waits for its turn, and nothing of it stays."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from runtime_gloo import Worlds
from torch import Tensor, nn

from vpipe import Pipeline
from vpipe.runtime.ranks.crowding import CrowdedCores
from vpipe.runtime.ranks.membership import own_cores

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


class Busy(nn.Linear):
    """Computes for two milliseconds of this thread's own time, however long that takes."""

    def forward(self, x: Tensor) -> Tensor:
        until = time.thread_time() + 0.002
        while time.thread_time() < until:
            pass
        return super().forward(x)


def waits_of_steps(cores: set[int]) -> list[list[tuple[str, int, int, int, int]]]:
    """What a rank writes down of its steps: (kind, wait, of that for a core, work, of that for a core)."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        pipe = Pipeline(
            [Busy(4, 4), Busy(4, 4)],
            nn.functional.mse_loss,
            num_microbatches=8,
            optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
        )
        told = []
        for _ in range(6):
            pipe.train_step(torch.randn(8, 4), torch.randn(8, 4))
            rows = pipe.trace().records[pipe.rank]
            told.append([(r.action.kind.value, r.ready - r.begin, r.late, r.end - r.ready, r.stalled) for r in rows])
        pipe.close()
        return told
    finally:
        os.sched_setaffinity(0, mine)


def test_what_waits_for_a_core_is_written_down_action_by_action(worlds: Worlds) -> None:
    """Two ranks on one core: the kernel's count is much of the step's time, and not more."""
    for steps in worlds.run(2, waits_of_steps, {min(os.sched_getaffinity(0))}):
        shares = [sum(late + stalled for *_, late, _, stalled in s) / sum(w + k for _, w, _, k, _ in s) for s in steps]
        assert shares[0] == 0, "asked of every action only where the step before has waited"
        assert max(shares[1:]) > 0.1
        assert max(shares) <= 1.05


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


@pytest.mark.parametrize(
    ("ranks", "usable", "threads"),
    [
        ([("m a", 8)], 8, 8),
        ([("m a", 8)] * 4, 8, 2),
        ([("m a", 8)] * 16, 8, 1),
        ([("m a", 8), ("n a", 8)], 8, 8),  # on machines of their own
        ([("m a", (0, 1, 2, 3)), ("m a", (4, 5, 6, 7))], 4, 4),  # bound, as srun can do it
        ([("m a", 8), ("m b", 8)], 2, 2),  # containers that may use the time of two cores
        ([("m a", 8), ("m a", 8)], 2, 1),
    ],
)
def test_ranks_of_one_machine_share_its_cores(ranks: list[tuple[str, Any]], usable: int, threads: int) -> None:
    people = [
        {"process": {"machine": where}, "cores": list(cores if isinstance(cores, tuple) else range(cores))}
        for where, cores in ranks
    ]
    assert own_cores(people, 0, usable) == threads
