"""Cases that rotate: every run has some of them, every value of every parameter comes as early as it can, and all can
be asked for."""

from __future__ import annotations

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


COLLECT = """
import os, sys
import hypothesis, pytest  # once for all seeds

seeds, words = sys.argv[1].split(","), sys.argv[2:]
for seed in seeds:
    child = os.fork()
    if not child:
        os.environ["VPIPE_TEST_SEED"] = seed
        os.dup2(os.open(f"{seed}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *words])
        sys.stdout.flush()
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("conftest.py", "programs.py"):
        shutil.copy(Path(__file__).parent / name, tmp_path)
    (tmp_path / "test_cases.py").write_text(CASES)
    return tmp_path


def collected(folder: Path, seeds: str, *words: str) -> list[list[str]]:
    """The names of the cases that each of the seeds draws."""
    command = [sys.executable, "-c", COLLECT, seeds, *words]
    subprocess.run(command, cwd=folder, capture_output=True, timeout=200, check=True)
    said = [(folder / f"{seed}.txt").read_text().splitlines() for seed in seeds.split(",")]
    return [sorted(line.partition("::")[2] for line in lines if "::" in line) for lines in said]


def test_a_seed_draws_and_all_is_all(folder: Path) -> None:
    some, *others, every = collected(folder, "1,2,3,all")
    assert len(some) == 5
    assert "test_always" in some
    names = [name.partition("[")[2].rstrip("]") for name in some if "[" in name]
    assert {name[0] for name in names} == {*"abcd"}
    assert {name[-1] for name in names} == {*"xy"}
    assert any(some != other for other in others)
    assert len(every) == 9
    left = next(name for name in every if name not in some)
    assert collected(folder, "1") == [some], "the same seed draws the same"
    assert collected(folder, "1", f"test_cases.py::{left}") == [[left]], "who names a case gets it"


def test_tests_of_a_file_rotate_together(tmp_path: Path) -> None:
    for name in ("conftest.py", "programs.py"):
        shutil.copy(Path(__file__).parent / name, tmp_path)
    (tmp_path / "test_jobs.py").write_text(JOBS)
    *some, every = collected(tmp_path, "1,2,3,4,5,6,all")
    assert all(len(drawn) == 2 for drawn in some)
    seen = {name for drawn in some for name in drawn}
    assert seen == {*every} == {"test_one[x]", "test_one[y]", "test_another", "test_third"}
