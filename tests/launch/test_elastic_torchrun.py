"""Ranks that another launcher starts again: torchrun's elastic agent, mpirun. They go on from the newest checkpoint, with
as many ranks as there are, and no bit changes."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml
from running import Running
from test_elastic import CONFIG, vpipe
from test_mpi import command

import forked_python
from programs import needs
from vpipe.launch import chaos
from vpipe.rundir import lineage
from vpipe.rundir.manifest import checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LONG = {"extra": CONFIG["dataset"]["extra"] | {"num_examples": 1600}}
"""Two hundred iterations: a rank is killed after the first checkpoint, of iteration 15."""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHON_EXEC", forked_python.program())  # of the workers; an agent is a Python of its own
    path = tmp_path / "config.yaml"
    values = CONFIG | {"dataset": CONFIG["dataset"] | LONG, "launch": {"threads": 1, "elastic": "2:4"}}
    path.write_text(yaml.safe_dump(values))
    return path


def torchrun(folder: Path, config: Path, *options: str) -> Running:
    words = ("-m", "vpipe", "train", str(config), "--output-dir", str(folder.parent / "run"), "--quiet")
    folder.mkdir()
    return Running(folder, sys.executable, "-m", "torch.distributed.run", *options, *words)


def workers(run: Running) -> list[psutil.Process]:
    return [each for each in psutil.Process(run.process.pid).children() if "vpipe" in each.cmdline()]


def keeps_the_store(agent: Running, port: int) -> bool:
    """Whether it was this agent that came first."""
    found = psutil.Process(agent.process.pid).net_connections()
    return any(each.status == psutil.CONN_LISTEN and each.laddr[1] == port for each in found)


def newest(saved: Path) -> list[Path]:
    """The newest checkpoint, if there is one."""
    return checkpoints(saved)[-1:] if saved.exists() else []


def until(holds: Callable[[], object], *runs: Running) -> None:
    end = time.monotonic() + 120
    while not holds():
        for run in runs:
            assert run.process.poll() is None, run.out + run.err
        assert time.monotonic() < end
        time.sleep(0.02)


def assert_equal(config: Path, tmp_path: Path, lives: int) -> None:
    """The run ended as one that nobody has touched, and it had so many lives."""
    words = ("--set", "launch.elastic=null", "--set", "parallel.transport=inprocess", "--quiet")
    assert vpipe("train", config, *words, "--output-dir", tmp_path / "plain").returncode == 0
    assert chaos.differences(tmp_path / "plain", tmp_path / "run") == []
    assert len(lineage.read(tmp_path / "run")) == lives


@pytest.mark.rotates(1, of="launchers")
def test_a_worker_that_is_killed_under_torchruns_agent_changes_no_bit(config: Path, tmp_path: Path) -> None:
    run = torchrun(tmp_path / "agent", config, "--standalone", "--nproc-per-node=3", "--max-restarts=3")
    try:
        for life in (1, 2):
            before = newest(tmp_path / "run" / "checkpoints")
            until(lambda before=before: newest(tmp_path / "run" / "checkpoints") > before, run)
            workers(run)[life].kill()
        assert run.wait() == 0, run.err
    finally:
        run.kill_all()
    assert_equal(config, tmp_path, lives=3)


@pytest.mark.rotates(1, of="launchers")
def test_an_agent_that_is_lost_leaves_fewer_ranks_and_changes_no_bit(config: Path, tmp_path: Path) -> None:
    """``--nnodes 1:2``: two agents with two ranks each; one is killed with its ranks, and two ranks end the run."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ("--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=one")
    options += (f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=last_call_timeout=2", "--local-addr=127.0.0.1")
    agents = [torchrun(tmp_path / f"agent{index}", config, *options) for index in range(2)]
    try:
        saved = tmp_path / "run" / "checkpoints"
        # On a busy machine the first agent may have begun alone: then the second one's coming is a life of its own.
        until(lambda: all(len(workers(agent)) == 2 for agent in agents), *agents)
        before = newest(saved)
        until(lambda: newest(saved) > before, *agents)
        lives = len(lineage.read(tmp_path / "run"))
        agents.sort(key=lambda agent: keeps_the_store(agent, port), reverse=True)  # without its store no agent goes on
        lost = agents[1].process
        for process in [psutil.Process(lost.pid), *psutil.Process(lost.pid).children(recursive=True)]:
            process.kill()
        assert agents[0].wait() == 0, agents[0].err
    finally:
        for agent in agents:
            agent.kill_all()
    assert_equal(config, tmp_path, lives + 1)


@pytest.mark.rotates(1, of="launchers")
@needs("mpirun.openmpi")
def test_mpirun_that_is_started_again_with_fewer_ranks_changes_no_bit(config: Path, tmp_path: Path) -> None:
    """mpirun ends all ranks with the one that is killed; whoever starts it again goes on."""
    train = (
        forked_python.program(),
        "-m",
        "vpipe",
        "train",
        str(config),
        "--output-dir",
        str(tmp_path / "run"),
        "--quiet",
    )
    mpirun = (*command("mpirun.openmpi"), "-n")
    run = Running(tmp_path, *mpirun, "3", *train)
    try:
        saved = tmp_path / "run" / "checkpoints"
        until(lambda: saved.exists() and checkpoints(saved), run)
        ranks = [each for each in psutil.Process(run.process.pid).children(recursive=True) if "vpipe" in each.cmdline()]
        ranks[1].kill()
        assert run.wait() != 0
    finally:
        run.kill_all()
    again = Running(tmp_path, *mpirun, "2", *train)
    try:
        assert again.wait() == 0, again.err
    finally:
        again.kill_all()
    assert_equal(config, tmp_path, lives=2)
