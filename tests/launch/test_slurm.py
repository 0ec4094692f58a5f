"""``vpipe submit`` against a real SLURM of two nodes that the test starts on this machine."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import Cluster, missing

from vpipe.launch.slurm import Job, script

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "gpt_small_cpu.yaml")
ADOPT = "import os; from vpipe.launch.environment import adopt; adopt()"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(missing()), reason=missing() or "SLURM is here"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), num_nodes=2)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A program that takes the place of Python and trains a small pipeline."""
    program = tmp_path_factory.mktemp("trainer") / "trainer"
    source = Path(__file__).with_name("slurm_trainer.py").read_text()
    program.write_text(f"#!{sys.executable}\n{source}")
    program.chmod(0o755)
    return str(program)


def start(cluster: Cluster, folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vpipe", "submit", CONFIG, *words]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=dict(cluster.environment) | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def submit(cluster: Cluster, folder: Path, *words: str, **variables: str) -> tuple[int, str]:
    """(exit code, output) of ``vpipe submit``."""
    process = start(cluster, folder, *words, **variables)
    output, _ = process.communicate(timeout=200)
    return process.returncode, output


def number(output: str) -> int:
    match = re.search(r"job (\d+) ", output)
    assert match, output
    return int(match[1])


@pytest.fixture(scope="module")
def uninterrupted(cluster: Cluster, trainer: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a run over both nodes shows when nothing happens to it."""
    folder = tmp_path_factory.mktemp("plain")
    words = ("--nodes", "2", "--ntasks-per-node", "2", "--gres", "gpu:2", "--python", trainer, "--follow")
    code, output = submit(cluster, folder, *words, STEPS="8", WANDB_API_KEY="secret-word")
    assert code == 0, output
    return output


def test_ranks_are_placed_by_node_and_meet_at_the_first_nodes_address(uninterrupted: str) -> None:
    """Rank 0 and 1 on node 0, rank 2 and 3 on node 1; the address is SLURM's NodeAddr, which no name resolves to."""
    for rank in range(4):
        place = (
            f"rank {rank}/4 starts at step 0 [] SLURM_NODEID={rank // 2} LOCAL_RANK={rank % 2} MASTER_ADDR=127.0.0.1 "
        )
        assert place in uninterrupted
    assert "GLOO_SOCKET_IFNAME=lo CUDA_VISIBLE_DEVICES=0,1" in uninterrupted
    assert "done: loss" in uninterrupted
    assert "is COMPLETED" in uninterrupted
    assert "secret-word" not in uninterrupted


def test_the_script_and_adopt_find_the_same_address(cluster: Cluster, tmp_path: Path) -> None:
    """Plain ``srun python -m vpipe train``, without our script, starting at the second node."""
    code = f"{ADOPT}; print(os.environ['MASTER_ADDR'], os.environ['RANK'])"
    command = ["srun", "--nodes=2", "--ntasks=2", sys.executable, "-c", code]
    assert sorted(cluster.call(*command).splitlines()) == ["127.0.0.1 0", "127.0.0.1 1"]
    address = next(line for line in script(Job("c", 2, 1)).splitlines() if line.startswith("MASTER_ADDR="))
    line = f"SLURM_JOB_NODELIST='n[2,1]'; first=n2; {address}; echo $MASTER_ADDR"
    assert cluster.call("bash", "-c", line) == "127.0.0.2\n"


def test_a_failing_rank_ends_the_job_and_all_ranks(cluster: Cluster, trainer: str, tmp_path: Path) -> None:
    begin = time.monotonic()
    words = ("--nodes", "2", "--python", trainer, "--follow")
    code, output = submit(cluster, tmp_path, *words, FAIL_RANK="2", STEPS="1000", PAUSE="1")
    assert code in (3, 143), output  # srun gives the highest code, and the others were terminated
    assert "rank 2 fails" in output
    assert "is FAILED" in output
    assert time.monotonic() - begin < 60


def test_a_preempted_job_saves_is_queued_again_and_goes_on(
    cluster: Cluster, trainer: str, tmp_path: Path, uninterrupted: str
) -> None:
    words = ("--nodes", "2", "--python", trainer)
    code, output = submit(cluster, tmp_path, *words, STEPS="8", PAUSE="1")
    assert code == 0, output
    job = number(output)
    log = tmp_path / f"slurm-{job}.out"
    until(lambda: log.exists() and log.read_text().count("starts at step 0") == 4, log)
    time.sleep(1)
    cluster.call("scancel", "--batch", "--signal=USR1", str(job))
    until(lambda: "queueing again" in log.read_text(), log)
    hasten(cluster, job)
    cluster.wait(job, "COMPLETED", seconds=120)
    text = log.read_text()
    assert text.count("saved step") == 4
    assert "going on from the latest checkpoint" in text
    assert len(re.findall(r"starts at step [1-7] ", text)) == 4
    done = re.compile(r"done: loss (\S+) after 8 steps")
    assert done.findall(text) == done.findall(uninterrupted)


def test_a_requeued_job_without_a_checkpoint_begins_anew(cluster: Cluster, trainer: str, tmp_path: Path) -> None:
    code, output = submit(cluster, tmp_path, "--nodes", "2", "--python", trainer, STEPS="4", PAUSE="1")
    assert code == 0, output
    job = number(output)
    log = tmp_path / f"slurm-{job}.out"
    until(lambda: log.exists() and "starts at step 0" in log.read_text(), log)
    cluster.call("scontrol", "requeue", str(job))
    hasten(cluster, job)
    cluster.wait(job, "COMPLETED", seconds=120)
    text = log.read_text()
    assert "going on from" not in text
    assert "done: loss" in text


def test_a_sweep_is_a_job_array(cluster: Cluster, trainer: str, tmp_path: Path) -> None:
    axes = ("--sweep", "training.learning_rate=1e-3,1e-4")
    code, output = submit(cluster, tmp_path, "--nodes", "2", *axes, "--python", trainer, "--follow")
    assert code == 0, output
    for index, rate in enumerate(("1e-3", "1e-4")):
        assert re.search(rf"\[\d+_{index}\] rank 0/4 starts at step 0 \['training.learning_rate={rate}'\]", output), (
            output
        )
    assert output.count("is COMPLETED") == 2
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_an_interrupt_cancels_the_job_if_asked(cluster: Cluster, trainer: str, tmp_path: Path) -> None:
    words = ("--nodes", "2", "--python", trainer, "--follow", "--cancel-on-interrupt")
    process = start(cluster, tmp_path, *words, STEPS="1000", PAUSE="1")
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if "starts at step" in line:
            break
    job = number("".join(seen))
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(30) == 130
    assert f"job {job} is cancelled" in rest
    assert cluster.wait(job, "CANCELLED") == "CANCELLED"


def test_slurms_refusal_is_one_sentence(cluster: Cluster, tmp_path: Path) -> None:
    code, output = submit(cluster, tmp_path, "--nodes", "2", "--partition", "nowhere")
    assert code == 2
    assert output.count("\n") == 1
    assert "sbatch refused the job" in output
    assert "invalid partition" in output.lower()


def test_two_jobs_on_one_node_take_different_ports(cluster: Cluster, tmp_path: Path) -> None:
    code = f"{ADOPT}; print(os.environ['MASTER_PORT'])"
    command = ["srun", "--nodes=1", "--ntasks=2", sys.executable, "-c", code]
    ports = [set(cluster.call(*command).split()) for _ in range(2)]
    assert [len(each) for each in ports] == [1, 1]
    assert ports[0] != ports[1]


def until(true: object, log: Path, seconds: float = 90) -> None:
    assert callable(true)
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
        time.sleep(0.2)


def hasten(cluster: Cluster, job: int) -> None:
    """SLURM lets a job that was queued again wait two minutes; tests do not."""
    cluster.wait(job, "PENDING", "RUNNING")
    cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now")
