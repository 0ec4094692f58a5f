"""``vpipe train --quiet`` and ``--json``: what a script reads is alone on standard output."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from train_runs import tiny

import forked_python
from vpipe.cli.main import main


def job(directory: Path, changes: dict[str, Any] | None = None) -> str:
    file = directory / "job.yaml"
    short = {"training.epochs": 1, "training.max_iterations": 2, "observe.directory": str(directory / "runs")}
    file.write_text(yaml.safe_dump(tiny(short | (changes or {}))))
    return str(file)


@pytest.fixture
def train(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.delenv("VPIPE_DEBUG", raising=False)

    def call(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["train", *args])
        return (int(end.value.code or 0), *capsys.readouterr())

    return call


def test_quiet_says_nothing(tmp_path: Path, train: Any) -> None:
    assert train(job(tmp_path), "--quiet") == (0, "", "")
    assert (tmp_path / "runs" / "latest" / "summary.json").is_file()


def test_quiet_still_warns(tmp_path: Path, train: Any) -> None:
    code, out, err = train(job(tmp_path, {"training.warmup": 50}), "-q")
    assert (code, out) == (0, "")
    assert "warning: training.warmup is 50 updates" in err


def test_json_is_the_summary_and_nothing_else(tmp_path: Path, train: Any) -> None:
    code, out, err = train(job(tmp_path), "--json")
    found = json.loads(out)
    assert code == 0
    assert found["ending"]["kind"] == "finished"
    assert found["total_iterations"] == 2
    assert Path(found["directory"]) == (tmp_path / "runs" / "latest").resolve()
    assert "iteration 2/2" in err, "the lines are elsewhere, not lost"


def test_both(tmp_path: Path, train: Any) -> None:
    code, out, err = train(job(tmp_path), "--quiet", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["total_iterations"] == 2


def test_a_run_that_fails_has_a_summary_too(tmp_path: Path, train: Any) -> None:
    code, out, err = train(job(tmp_path, {"dataset.batch_size": 64}), "--json")
    assert code == 2
    assert err.startswith("vpipe: ")
    assert json.loads(out)["ending"]["kind"] != "finished"


def test_a_config_alone_has_no_summary(tmp_path: Path, train: Any) -> None:
    code, out, err = train(job(tmp_path), "--json", "--print-config")
    assert (code, out) == (2, "")
    assert "--json has no summary" in err


@pytest.mark.slow
@pytest.mark.parametrize("under_torchrun", [False, True])
def test_json_of_processes(tmp_path: Path, under_torchrun: bool) -> None:
    """What any rank prints goes elsewhere; one summary comes out."""
    file = job(tmp_path, {"parallel.transport": "auto"})
    plugin = tmp_path / "chatty.py"
    plugin.write_text('print("hello from a plugin")\n')
    starter = (
        ["-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "vpipe"] if under_torchrun else ["-m", "vpipe"]
    )
    words = [forked_python.program(), *starter, "train", file, "--json", "--plugin", str(plugin)]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=200, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ending"]["kind"] == "finished"
    assert "iteration 2/2" in done.stderr
    assert "hello from a plugin" in done.stderr
