"""Cases that rotate: every run has some of them, every value of every parameter comes as early as it can, and all can
be asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CASES = """
import pytest

@pytest.mark.rotates(4)
@pytest.mark.parametrize("mode", ["x", "y"])
@pytest.mark.parametrize("schedule", ["a", "b", "c", "d"])
def test_some(schedule, mode): pass

def test_always(): pass
"""
JOBS = """
import pytest

@pytest.mark.rotates(2, of="jobs")
@pytest.mark.parametrize("kind", ["x", "y"])
def test_one(kind): pass

@pytest.mark.rotates(2, of="jobs")
def test_another(): pass

@pytest.mark.rotates(2, of="jobs")
def test_third(): pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(Path(__file__).parent / "conftest.py", tmp_path)
    (tmp_path / "test_cases.py").write_text(CASES)
    return tmp_path


def collected(folder: Path, seed: str, *words: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *words]
    variables = os.environ | {"VPIPE_TEST_SEED": seed}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=200, check=True)
    return sorted(line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line)


def test_a_seed_draws_and_all_is_all(folder: Path) -> None:
    some = collected(folder, "1")
    assert len(some) == 5
    assert "test_always" in some
    names = [name.partition("[")[2].rstrip("]") for name in some if "[" in name]
    assert {name[0] for name in names} == {*"abcd"}
    assert {name[-1] for name in names} == {*"xy"}
    assert some == collected(folder, "1")
    assert any(some != collected(folder, seed) for seed in ("2", "3"))
    every = collected(folder, "all")
    assert len(every) == 9
    left = next(name for name in every if name not in some)
    assert collected(folder, "1", f"test_cases.py::{left}") == [left], "who names a case gets it"


def test_tests_of_a_file_rotate_together(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parent / "conftest.py", tmp_path)
    (tmp_path / "test_jobs.py").write_text(JOBS)
    seen = {name for seed in "123456" for name in collected(tmp_path, seed)}
    assert all(len(collected(tmp_path, seed)) == 2 for seed in "12")
    assert seen == {*collected(tmp_path, "all")} == {"test_one[x]", "test_one[y]", "test_another", "test_third"}
