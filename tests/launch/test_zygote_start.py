"""A zygote that begins before the config is read: what is guessed, and what becomes of a wrong guess."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from vpipe.cli.main import guessed
from vpipe.launch import local, zygote_start

CONFIG = """
model: {name: gpt}
dataset: {name: synthetic, extra: {kind: gpt}}
parallel:
  model_parallel_size: 4   # stages
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(CONFIG)
    return path


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("", [], (4, 0)),
        ("  data_parallel_size: 2\n", [], (8, 0)),
        ("launch: {threads: 3}\n", [], (4, 3)),
        ("", ["--nproc", "2"], (2, 0)),
        ("", ["--set", "parallel.model_parallel_size=3", "--set", "launch.threads=2"], (3, 2)),
        ("", ["--nproc", "1"], None),
        ("", ["--help"], None),
        ("", ["--print-config"], None),
        ("", ["--elastic", "2:4"], None),
        ("", ["--set", "parallel.transport=inprocess"], None),
        ("  transport: inprocess\n", [], None),
        ("  transport: gloo\n", [], (4, 0)),
        ("launch:\n  container:\n    kind: apptainer\n", [], None),
        ("launch:\n  machines: [a, b]\n", [], None),
        ("launch:\n  elastic: 2:4\n", [], None),
        ("launch:\n  elastic: null\n", [], (4, 0)),
        ("", ["--nproc", "many"], None),
    ],
)
def test_what_is_guessed(config: Path, text: str, words: list[str], expected: tuple[int, int] | None) -> None:
    config.write_text(CONFIG + text)
    assert guessed([str(config), *words]) == expected


def test_no_guess_without_a_config(tmp_path: Path) -> None:
    assert guessed([]) is None
    assert guessed([str(tmp_path / "absent.yaml")]) is None


Begin = Callable[..., int]


@pytest.fixture
def begin(config: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Lets a zygote begin that imports next to nothing; its process id."""
    for name in zygote_start.STARTED_BY_OTHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(zygote_start, "PRELOAD", ("json",))
    monkeypatch.setattr(zygote_start, "WORKER", "no_such_module")

    def begin(*words: str) -> int:
        zygote_start.begin(*(guessed([str(config), *words]) or (1, 0)))
        (started,) = zygote_start._begun
        return started.process.pid

    return begin


def test_the_right_one_is_taken(begin: Begin) -> None:
    begun = begin()
    wanted = local.environment_of(4, 0, {"VPIPE_COMMAND": "[]"})
    started = zygote_start.take(wanted)
    assert started is not None
    assert started.process.pid == begun
    assert not zygote_start._begun
    zygote_start._begun.append(started)
    zygote_start.dismiss()
    assert not psutil.pid_exists(begun)


@pytest.mark.parametrize(
    "change", [{"OMP_NUM_THREADS": "7"}, {"LD_PRELOAD": "library.so"}, {"CUDA_VISIBLE_DEVICES": "1"}]
)
def test_a_wrong_one_is_let_go(begin: Begin, change: dict[str, str]) -> None:
    begun = begin()
    assert zygote_start.take(local.environment_of(4, 0, change)) is None
    assert not psutil.pid_exists(begun)


def test_ranks_of_other_launchers_start_none(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    zygote_start.begin(*(guessed([str(config)]) or (1, 0)))
    assert not zygote_start._begun


def test_ranks_run_in_the_one_that_has_begun(begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty ranks have more descriptors than one message holds."""
    out = tmp_path / "out"
    (tmp_path / "own.py").write_text(
        f"import os\ndef work():\n    open(r'{out}', 'a').write(f'{{os.getpid()}} {{os.getppid()}}\\n')\n    return 0\n"
    )
    path = {"PYTHONPATH": str(tmp_path)}
    wrong = begin("--nproc", "30")
    assert local.run("own:work", 30, preload=["json"], environment=path, log_dir=tmp_path / "logs") == 0
    parents = {line.split()[1] for line in out.read_text().splitlines()}
    assert len(parents) == 1
    assert str(wrong) not in parents, "another environment, so another one was started"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out.unlink()
    right = begin("--nproc", "30")
    assert local.run("own:work", 30, preload=["json"], log_dir=tmp_path / "logs") == 0
    assert [line.split()[1] for line in out.read_text().splitlines()] == [str(right)] * 30
    assert not psutil.pid_exists(right)


def test_ctrl_c_after_the_end_was_told_shows_no_traceback() -> None:
    """Exit functions of libraries run meanwhile, for a second and more."""
    lines = (
        "import atexit, os, signal, sys, types",
        "from vpipe.launch import rank",
        "atexit.register(rank.DEPARTURE)",
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))",
        "sys.modules['job'] = types.SimpleNamespace(run=lambda: 3)",
        "rank.call_target({'target': 'job:run', 'arguments': {}})",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (3, "")
