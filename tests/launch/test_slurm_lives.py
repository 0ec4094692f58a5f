"""A job that is queued again and again: how long that goes on, and what is said before it is handed in."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from vpipe.errors import UserError
from vpipe.launch.job import plan_job
from vpipe.launch.slurm import LIVES, SlurmJob, limit_warning, script, seconds

CONFIG = str(Path(__file__).parents[2] / "configs" / "gpt_small_cpu.yaml")

STEP = """#!/bin/bash
# In srun's place: training that is told to leave, and saves a checkpoint where SAVES says so.
trap '[ -z "$SAVES" ] || mkdir -p "$FOLDER"/checkpoints/iteration-"$SAVES"; exit 143' USR1
echo ready > "$READY"
while true; do sleep 0.02; done
"""


def life(folder: Path, saves: str = "") -> str:
    """One life of the job: it starts, is told to leave, and ends; what the script says."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name, text in {"srun": STEP, "scontrol": '#!/bin/bash\necho "scontrol $*"; exit 1\n'}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    ready = folder / "ready"
    os.mkfifo(ready)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "READY": str(ready), "SAVES": saves}
    process = subprocess.Popen(
        ["bash", "-c", script(SlurmJob("c.yaml", 1, 1, run_directory=str(folder / "runs")))],
        env=environment | {"FOLDER": str(folder / "runs" / "slurm-7")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    ready.read_text()  # until the step has come to its trap
    ready.unlink()
    process.send_signal(signal.SIGUSR1)
    return process.communicate(timeout=200)[0]


def test_lives_that_save_nothing_new_are_counted_and_end(tmp_path: Path) -> None:
    for _ in range(LIVES - 1):
        assert "scontrol requeue 7" in life(tmp_path)
    said = life(tmp_path)
    assert f"{LIVES} times in a row this job saved nothing new" in said
    assert "requeue" not in said


def test_progress_begins_the_count_anew(tmp_path: Path) -> None:
    for saves in ("", "", "100", "", "", "1000", ""):
        assert "scontrol requeue 7" in life(tmp_path, saves)


@pytest.mark.parametrize(
    ("time", "expected"),
    [("3", 180), ("3:05", 185), ("01:00:00", 3600), ("1-0", 86400), ("1-02:03", 93780), ("2-00:00:01", 172801)],
)
def test_slurms_times(time: str, expected: int) -> None:
    assert seconds(time) == expected


def test_a_limit_shorter_than_the_start_is_warned_of() -> None:
    said = limit_warning(SlurmJob("c.yaml", 1, 1, options={"time": "00:01:30"}))
    assert said is not None
    assert "leaves 30 s" in said
    assert limit_warning(SlurmJob("c.yaml", 1, 1, options={"time": "00:03:00"})) is None
    assert limit_warning(SlurmJob("c.yaml", 1, 1, options={"time": "1"}, requeue=False)) is None
    assert any("leaves 0 s" in each for each in plan_job(CONFIG, (), (), None, {"options": {"time": "1"}})[1])


@pytest.mark.parametrize(
    ("array", "fits"), [("0-3", True), ("0-4%2", False), ("1,4", False), ("0-5:3", True), ("3", True)]
)
def test_an_array_is_laid_beside_the_sweep(array: str, fits: bool) -> None:
    axes = ("training.learning_rate=1e-3,1e-4", "parallel.scheduler=1f1b,zb-h1")
    if fits:
        plan_job(CONFIG, axes, (), None, {"array": array})
    else:
        with pytest.raises(UserError, match=f"--with array={array} asks for run 4, but the sweep has 4, 0 to 3"):
            plan_job(CONFIG, axes, (), None, {"array": array})
