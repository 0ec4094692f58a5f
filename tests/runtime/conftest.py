"""Set-up of the runtime's tests: one thread per process, gloo worlds that live for the whole session, counts at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from runtime_gloo import Worlds
from runtime_support import COUNTS


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """``worlds.run(num_ranks, task, *arguments)``: the task on every rank of a gloo world."""
    found = Worlds()
    yield found
    found.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if COUNTS:
        total = ", ".join(f"{number} {name}" for name, number in sorted(COUNTS.items()))
        terminalreporter.write_line(f"equal to replay, bit for bit: {total}")
