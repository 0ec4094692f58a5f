"""The old commands: ``driver.py`` and ``gpipe_runner.py`` are ``vpipe train`` in other words."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import forked_python
from vpipe.compat.commands import translate

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("option", "words", "expected"),
    [
        ("--config_file", "--config_file c.yml", "train -- c.yml"),
        ("--config_file", "--config_file=c.yml", "train -- c.yml"),
        ("--config", "--config c.yaml --scheduler naive", "train --scheduler naive -- c.yaml"),
        ("--config", "--scheduler naive --config -c.yaml", "train --scheduler naive -- -c.yaml"),
        ("--config", "--config c.yaml --set training.epochs=1", "train --set training.epochs=1 -- c.yaml"),
        ("--config", "--help", "train --help"),
    ],
)
def test_words_are_translated(option: str, words: str, expected: str) -> None:
    assert translate("old.py", option, words.split()) == expected.split()


def call(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [forked_python.program(), *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["driver.py"], "--config_file is missing"),
        (["gpipe_runner.py", "--scheduler", "naive"], "--config is missing"),
        (["driver.py", "--config_file", "c.yml", "--mount_directories", "/x"], "is now launch.container.binds"),
        (["driver.py", "--config_file", "absent.yml"], "absent.yml"),
        (["gpipe_runner.py", "--config", "configs/gpt_small.yaml", "--sceduler", "naive"], "--sceduler"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], sentence: str) -> None:
    done = call(ROOT, *words)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    "words",
    [
        ["driver.py", "--config_file", "configs/bert_4vpipe_cpu.yml"],
        ["gpipe_runner.py", "--config", "configs/gpt_small_cpu.yaml", "--scheduler", "naive"],
    ],
    ids=lambda words: Path(words[2]).stem,
)
def test_the_old_commands_train(words: list[str], tmp_path: Path) -> None:
    done = call(ROOT, *words, "--set", "training.max_iterations=2", "--output-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["iterations_done"] == 2
    assert summary["final_loss"] > 0
