"""The wheel: what it carries, what it says of itself, and that its words are those of the docs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=200)
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_carries_examples_pages_and_types_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for needed in ("examples/minimal.py", "examples/configs/default.yaml", "observe/page/panels.js", "py.typed"):
        assert f"vpipe/{needed}" in names
    sources = {f"vpipe/{path.relative_to(ROOT / 'src/vpipe')}" for path in (ROOT / "src/vpipe").rglob("*.py")}
    assert sources <= set(names)
    assert [name for name in names if "test" in name.lower() or "benchmark" in name.lower()] == []
    assert wheel.stat().st_size < 2_000_000


def test_the_wheel_runs_by_itself(wheel: Path) -> None:
    """From the file alone: the command, its version, a schedule, a config that it carries."""
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import vpipe; "
        "assert '.whl' in vpipe.__file__; from vpipe.cli.main import main; main()"
    )
    for words, said in (
        (["--version"], PROJECT.get("version", "0.1")),
        (["simulate", "1f1b", "-p", "2", "-m", "2"], "makespan"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, str(wheel), *words], capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr
        assert said in done.stdout


def test_classifiers_name_the_tested_versions() -> None:
    named = {each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3." in each}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"Python {min(named, key=_number)} to {max(named, key=_number)}" in readme
    assert PROJECT["requires-python"] == f">={min(named, key=_number)}"


def _number(version: str) -> int:
    return int(version.partition(".")[2])


def test_the_extras_that_the_docs_install_exist() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for extras in re.findall(r"pip install -e '?\.\[([a-z,]+)\]", page.read_text(encoding="utf-8")):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"]), page


@pytest.mark.slow
def test_the_reference_is_that_of_this_code() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/reference"], cwd=ROOT, capture_output=True, text=True, timeout=200, check=True
    )
    words = "docs/api.md is of other docstrings: scripts/reference > docs/api.md writes it anew"
    assert done.stdout == (ROOT / "docs/api.md").read_text(encoding="utf-8"), words
