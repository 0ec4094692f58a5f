"""Training tests run on one thread: more add numbers in another order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import train_runs


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def closed_trainers() -> Iterator[None]:
    """No heartbeat goes on into the next test."""
    yield
    while train_runs.MADE:
        train_runs.MADE.pop().close()
