"""A few random kills in the test suite; ``benchmarks/kills/run.py --kills N`` runs as many as one likes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import forked_python

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kills" / "run.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_runs_killed_at_random_end_with_equal_checksums() -> None:
    words = [forked_python.program(), str(SCRIPT), "--kills", "4", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] >= 4
    assert found["unequal"] == 0
