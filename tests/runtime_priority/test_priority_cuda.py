"""CUDA stream priorities: the mapping of keys to levels, which needs no GPU."""

from __future__ import annotations

import pytest
import torch

from vpipe.compat.priorities.cuda import StreamPriorities, levels
from vpipe.compat.priorities.order import POLICIES
from vpipe.schedule.action import parse


def test_the_smallest_key_gets_the_highest_priority_and_the_rest_is_clamped() -> None:
    assert levels(POLICIES["first-hp"], 8, lowest=0, highest=-1) == {(0,): -1, (1,): 0}
    assert levels(POLICIES["fifo"], 4, lowest=0, highest=-2) == {(0,): -2, (1,): -1, (2,): 0, (3,): 0}
    assert levels(POLICIES["none"], 4, lowest=0, highest=-1) == {(): -1}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_turns_run_on_streams_of_their_priority() -> None:
    backend = StreamPriorities(POLICIES["first-hp"], 2, torch.device("cuda", 0))
    for text in ("0F0", "0F1", "0B0", "0B1"):
        with backend.turn(parse(text)):
            assert (torch.ones(8, device="cuda") * 2).sum() == 16
    backend.close()
