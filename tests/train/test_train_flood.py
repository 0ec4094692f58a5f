"""A bounded flood against page and store; ``benchmarks/flood/run.py`` prints the run's step time beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the live page needs vpipe[dashboard]")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "flood" / "run.py"


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_run_goes_on_while_strangers_flood_its_ports() -> None:
    words = [sys.executable, str(SCRIPT), "--rounds", "1", "--seconds", "2", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["goes_on"]
    assert found["exit_code"] == 75, "a request to stop is heard as ever"
    assert found["answered"] == "1 of 1", "a whole request is served among half-sent ones"
    assert not found["strange_words"]
    assert all(found["seen"][where]["connections"] > 10 for where in ("page", "store"))
