"""The fixture that writes run directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from observe_runs import MakeRun, write_run


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """``make_run("1f1b", 4, 8, name="…")`` writes a run directory and returns its path."""
    counter = iter(range(1000))

    def make(schedule: str = "1f1b", ranks: int = 4, microbatches: int = 8, **options: Any) -> Path:
        return write_run(tmp_path / f"run{next(counter)}", schedule, ranks, microbatches, **options)

    return make
