"""An elastic run as a job of a real SLURM: ranks and nodes are lost, taken and given back, and no bit changes.

The job is stopped in order, and goes on for two iterations on this machine: it must end as a run that was left alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from slurm_cluster import NEEDS_SLURM, Cluster
from test_elastic import CONFIG, vpipe

import forked_python
from vpipe.launch import chaos
from vpipe.rundir.manifest import MANIFEST, checkpoints
from vpipe.rundir.roster import Roster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    NEEDS_SLURM,
]
HANG = 200.0
LONG: dict[str, Any] = {
    "training": CONFIG["training"] | {"max_iterations": 5000},
    "dataset": CONFIG["dataset"] | {"extra": CONFIG["dataset"]["extra"] | {"num_examples": 80000}},
    "checkpoint": {"interval": 100_000},
}
"""So many that no busy machine comes to their end before it is stopped."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "slurm").mkdir()
    cluster = Cluster(tmp_path / "slurm", num_nodes=3)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


class Job:
    """An elastic run of three ranks in the queue."""

    def __init__(self, cluster: Cluster, folder: Path, elastic: str, *words: str) -> None:
        self.cluster, self.config = cluster, folder / "config.yaml"
        self.config.write_text(yaml.safe_dump(CONFIG | LONG))
        command = [
            forked_python.program(),
            "-m",
            "vpipe",
            "submit",
            str(self.config),
            "--set",
            f"launch.elastic={elastic}",
        ]
        command += ["--with", f"python={sys.executable}"]
        environment = dict(cluster.environment) | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG, check=False
        )
        assert done.returncode == 0, done.stderr
        self.number = int(done.stdout.split("job ")[1].split()[0])
        self.folder, self._log = folder / "runs" / f"slurm-{self.number}", folder / f"slurm-{self.number}.out"

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def facts(self) -> str:
        return self.cluster.call("scontrol", "-o", "show", "job", str(self.number))

    def until(self, holds: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + HANG
        while not holds():
            assert time.monotonic() < end, f"waited for {what}\n{self.said}"
            time.sleep(0.05)

    def crew(self, num_ranks: int, after: Roster | None = None) -> Roster:
        """Who is there when so many ranks have done a step together, in another epoch or life than ``after``."""
        found: list[Roster] = []

        def holds() -> bool:
            roster = Roster.read(self.folder)
            fits = roster is not None and roster.has_stepped and len(roster.ranks) == num_ranks
            if (
                fits
                and roster is not None
                and (after is None or roster.epoch != after.epoch or roster.pids != after.pids)
            ):
                found.append(roster)
            return bool(found)

        self.until(holds, f"{num_ranks} ranks")
        return found[0]

    def stop(self, lives: int) -> None:
        """In order: the ranks save and leave, and the job is queued again."""
        self.cluster.call("scancel", "--batch", "--signal=USR1", str(self.number))
        self.until(lambda: self.said.count("queueing again") == lives, "the job to be queued again")

    def start_again(self) -> None:
        """SLURM lets a job that was queued again wait two minutes; tests wait until the old credential is over."""
        self.cluster.wait(self.number, "PENDING", seconds=HANG)
        time.sleep(3)
        self.cluster.call("scontrol", "update", f"JobId={self.number}", "StartTime=now")

    def assert_equal(self, folder: Path) -> None:
        saved = checkpoints(self.folder / "checkpoints")[-1]
        iteration = json.loads((saved / MANIFEST).read_text())["position"]["iteration"]
        words = ("--quiet", "--set", f"training.max_iterations={iteration + 2}")
        done = vpipe("train", self.config, *words, "--resume", self.folder, "--output-dir", self.folder)
        assert done.returncode == 0, done.stderr
        plain = folder / "plain"
        assert vpipe("train", self.config, *words, "--output-dir", plain).returncode == 0
        assert chaos.differences(plain, self.folder) == []

    def recoveries(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line["kind"] == "recovery"]


def lose_node(cluster: Cluster, index: int, pid: int) -> None:
    """Its slurmd and all it has started are gone at once; ``pid`` is a rank's: rank → zygote → node → slurmstepd."""
    step = psutil.Process(pid).parents()[2]
    lost = [step, *step.children(recursive=True)]
    cluster.kill_node(index)
    for process in lost:
        with suppress(psutil.Error):
            process.kill()


def lose_first_node(job: Job, pid: int) -> None:
    """The same, with the script of the job and the launcher, which that node has as well."""
    train = [sys.executable, "-Pm", "vpipe", "train", str(job.config)]
    launcher = next(each for each in psutil.process_iter() if _command(each)[: len(train)] == train)
    script = launcher.parents()[1]
    lost = [script, *script.children(recursive=True)]
    lose_node(job.cluster, 1, pid)
    for process in lost:
        with suppress(psutil.Error):
            process.kill()


def _command(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def test_a_lost_rank_a_lost_node_and_fewer_nodes_after_that_change_no_bit(cluster: Cluster, tmp_path: Path) -> None:
    """A killed rank comes back; the others go on without a node that is lost; queued again, the job takes what is left."""
    job = Job(cluster, tmp_path, "2:3", "--nodes", "2-3")
    first = job.crew(3)
    psutil.Process(first.pids[1]).kill()
    second = job.crew(3, after=first)
    assert second.pids[0] == first.pids[0], "who is well is not restarted"
    lose_node(cluster, 3, second.pids[2])
    third = job.crew(2, after=second)
    assert third.pids[0] == first.pids[0]
    assert cluster.state(job.number) == "RUNNING"
    assert "n3 is lost: no sign for" in job.said
    assert [line["lost"][-1] for line in job.recoveries()] == ["rank 1 was killed by SIGKILL", "rank 2 is lost with n3"]
    cluster.call("scontrol", "update", "NodeName=n3", "State=DOWN", "Reason=lost")
    job.stop(1)
    job.start_again()
    job.crew(2, after=third)
    assert "2 nodes: 2 ranks instead of 3" in job.said
    job.stop(2)
    cluster.call("scancel", str(job.number))
    job.assert_equal(tmp_path)


PLACES = ("--nodes", "1-3", "--with", "ntasks_per_node=2")


def test_a_node_that_is_given_back_shrinks_the_job_and_changes_no_bit(cluster: Cluster, tmp_path: Path) -> None:
    """Its rank goes to a spare place, and SLURM has the node back."""
    job = Job(cluster, tmp_path, "2:4", *PLACES)
    first = job.crew(3)
    assert vpipe("scale", job.folder, "--without", "n2").returncode == 0
    second = job.crew(3, after=first)
    assert sorted(second.ranks) == [0, 2, 3]
    assert second.pids[0] == first.pids[0], "who is well is not restarted"
    job.until(lambda: "n2 is given back" in job.said, "n2 to be given back")
    job.until(lambda: " NodeList=n[1,3] " in job.facts, "SLURM to have n2 back")
    assert cluster.state(job.number) == "RUNNING"
    job.stop(1)
    cluster.call("scancel", str(job.number))
    job.assert_equal(tmp_path)


def test_nodes_that_are_taken_away_shrink_the_job_and_change_no_bit(cluster: Cluster, tmp_path: Path) -> None:
    """Two nodes of three at once: the two places of the first one go on. (Without a database of jobs SLURM changes a
    job once only, so this is a job of its own.)"""
    job = Job(cluster, tmp_path, "2:4", *PLACES)
    first = job.crew(3)
    cluster.call("scontrol", "update", f"JobId={job.number}", "NumNodes=1")
    second = job.crew(2, after=first)
    assert " NodeList=n1 " in job.facts
    assert second.pids[0] == first.pids[0], "who is well is not restarted"
    assert cluster.state(job.number) == "RUNNING"
    job.stop(1)
    cluster.call("scancel", str(job.number))
    job.assert_equal(tmp_path)


def test_a_job_whose_first_node_is_lost_comes_back_by_itself_and_changes_no_bit(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The launcher is gone with it. When SLURM says so, the other nodes make a checkpoint of what they have together,
    of which the lost node's part is a copy, and one of them has the job queued again."""
    job = Job(cluster, tmp_path, "2:3", "--nodes", "2-3")
    first = job.crew(3)
    lose_first_node(job, first.pids[0])
    job.until(lambda: not any(map(psutil.pid_exists, first.pids.values())), "the ranks to end")
    assert cluster.state(job.number) == "RUNNING"
    assert not checkpoints(job.folder / "checkpoints"), "before SLURM's word the launcher may live"
    cluster.call("scontrol", "update", "NodeName=n1", "State=DOWN", "Reason=lost")
    job.until(lambda: " Restarts=1 " in job.facts, "the job to be queued again")
    assert "n1, where the launcher was, is lost" in job.said
    assert len(checkpoints(job.folder / "checkpoints")) == 1
    job.start_again()
    job.crew(2, after=first)
    assert "2 nodes: 2 ranks instead of 3" in job.said
    assert "resumed from" in job.said
    job.stop(1)
    cluster.call("scancel", str(job.number))
    job.assert_equal(tmp_path)
