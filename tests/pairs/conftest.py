"""Ranks that are processes, for the cases that ask for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import cases
import pytest

sys.path.append(str(Path(__file__).parents[1] / "runtime"))


@pytest.fixture(scope="session", autouse=True)
def worlds() -> Iterator[None]:
    """Process groups that live for the whole session, one for each number of ranks."""
    from runtime_gloo import Worlds

    found = Worlds()
    cases.RUN_IN_PROCESSES[:] = [lambda num_ranks, program: found.run(num_ranks, cases.run_in_a_rank, program)]
    yield
    found.close()
