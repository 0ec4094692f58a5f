"""``vpipe submit`` against a real SLURM of four nodes that the test starts on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from container_image import brought, build
from slurm_cluster import NEEDS_SLURM, Cluster

import forked_python
from programs import needs
from vpipe.launch.slurm import SlurmJob, script

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "gpt_small_cpu.yaml")
ADOPT = "import os; from vpipe.launch.environment import adopt; adopt()"
TRAINING = (
    *("--set", "training.max_iterations=40", "--set", "observe.log_interval=1"),
    *("--set", "parallel.model_parallel_size=2", "--scheduler", "1f1b"),
)
"""One rank a node."""
FRESH = ("--with", f"python={sys.executable}")
"""Ranks are fresh interpreters; without it they are forks, as the submitting command is."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    NEEDS_SLURM,
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), num_nodes=4)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Options that put a small program in the place of Python."""
    program = tmp_path_factory.mktemp("trainer") / "trainer"
    source = Path(__file__).with_name("slurm_trainer.py").read_text()
    program.write_text(f"#!{sys.executable}\n{source}")
    program.chmod(0o755)
    return "--with", f"python={program}"


def start(
    cluster: Cluster, folder: Path, *words: str, config: str = CONFIG, python: str = "", **variables: str
) -> subprocess.Popen[str]:
    command = [python or forked_python.program(), "-m", "vpipe", "submit", config, "--nodes", "2", *words]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=dict(cluster.environment) | {"OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def submit(cluster: Cluster, folder: Path, *words: str, config: str = CONFIG, **variables: str) -> tuple[int, str]:
    """(exit code, output) of ``vpipe submit``."""
    process = start(cluster, folder, *words, config=config, **variables)
    output, _ = process.communicate(timeout=250)
    return process.returncode, output


def job_number(output: str) -> int:
    match = re.search(r"job (\d+) ", output)
    assert match, output
    return int(match[1])


def test_ranks_are_placed_by_node_and_meet_at_the_first_nodes_address(
    cluster: Cluster, trainer: tuple[str, str], tmp_path: Path
) -> None:
    """Ranks 0 and 1 on node 0, ranks 2 and 3 on node 1; GPUs that are none; no secret in script or output. Many sites
    let jobs inherit nothing, and then srun hands nothing on either."""
    words = ("--with", "ntasks_per_node=2", "--with", "gres=gpu:2", *trainer, "--follow")
    code, output = submit(cluster, tmp_path, *words, WANDB_API_KEY="secret-word", SBATCH_EXPORT="NONE")
    assert code == 0, output
    for rank in range(4):
        place = f"SLURM_NODEID={rank // 2} LOCAL_RANK={rank % 2} MASTER_ADDR=127.0.0.1 MASTER_PORT="
        assert f"rank {rank}/4 resume None [] {place}" in output
    assert "GLOO_SOCKET_IFNAME=None CUDA_VISIBLE_DEVICES=0,1" in output  # chosen when ranks meet, see vpipe.network
    assert output.count("secret=64") == 4
    assert "is COMPLETED" in output
    stored = cluster.call("scontrol", "write", "batch_script", str(job_number(output)), "-")
    assert "secret-word" not in output + stored
    assert stored.startswith("#!/bin/bash\n#SBATCH --job-name=vpipe-gpt_small_cpu\n")


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> float:
    """The final loss of a training run over both nodes to which nothing happens."""
    folder = tmp_path_factory.mktemp("whole")
    code, output = submit(cluster, folder, *TRAINING, *FRESH, "--follow")
    assert code == 0, output
    assert "is COMPLETED" in output
    return summary(folder)["final_loss"]


def summary(folder: Path) -> dict[str, float]:
    (path,) = {each.resolve() for each in (folder / "runs").glob("*/summary.json")}  # runs/latest leads to one of them
    found: dict[str, float] = json.loads(path.read_text())
    return found


def test_training_over_two_nodes_equals_training_on_one_machine(whole: float, tmp_path: Path) -> None:
    command = [forked_python.program(), "-m", "vpipe", "train", CONFIG, *TRAINING]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=200)
    assert summary(tmp_path)["final_loss"] == whole


@pytest.mark.rotates(3, of="jobs")
def test_a_users_model_file_trains_on_slurm_as_on_one_machine(
    cluster: Cluster, documented_job: Callable[[Path], Path], tmp_path: Path
) -> None:
    """The files of docs/from-ourgpipe.md: the plugin reaches the ranks of both nodes."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        documented_job(folder)
    code, output = submit(cluster, there, "--follow", config="my_job.yaml")
    assert code == 0, output
    command = [forked_python.program(), "-m", "vpipe", "train", "my_job.yaml"]
    subprocess.run(command, cwd=here, check=True, capture_output=True, timeout=200)
    assert losses(here) == losses(there)


def losses(folder: Path, runs: str = "runs/*") -> list[float]:
    (path,) = {each.resolve() for each in folder.glob(f"{runs}/metrics.jsonl")}
    found = [json.loads(line)["loss"] for line in path.read_text().splitlines()]
    assert found
    return found


def test_a_preempted_run_saves_is_queued_again_and_ends_as_if_nothing_had_happened(
    cluster: Cluster, whole: float, tmp_path: Path
) -> None:
    code, output = submit(cluster, tmp_path, *TRAINING, *FRESH)
    assert code == 0, output
    job = job_number(output)
    log = tmp_path / f"slurm-{job}.out"
    until(lambda: "iteration 3/" in text(log), log)
    cluster.call("scancel", "--batch", "--signal=USR1", str(job))
    until(lambda: "queueing again" in text(log), log)
    hasten(cluster, job)
    cluster.wait(job, "COMPLETED", seconds=150)
    assert "going on from the latest checkpoint" in text(log)
    saved = re.search(r"resumed from \S*/iteration-(\d+)", text(log))
    assert saved, text(log)
    assert 3 <= int(saved[1]) < 40
    assert summary(tmp_path)["final_loss"] == whole


@pytest.mark.rotates(3, of="jobs")
def test_a_requeued_job_without_a_checkpoint_begins_anew(
    cluster: Cluster, trainer: tuple[str, str], tmp_path: Path
) -> None:
    code, output = submit(cluster, tmp_path, *trainer, WAIT="3")
    assert code == 0, output
    job = job_number(output)
    log = tmp_path / f"slurm-{job}.out"
    until(lambda: text(log).count("resume None") == 4, log)
    cluster.call("scontrol", "requeue", str(job))
    hasten(cluster, job)
    cluster.wait(job, "COMPLETED")
    assert text(log).count("resume None") == 4
    assert text(log).count("resume latest") == 4, "which begins anew where there is no checkpoint"
    assert text(log).count("done") == 4


@pytest.mark.rotates(3, of="jobs")
def test_a_more_urgent_partition_preempts_and_the_run_comes_back(
    cluster: Cluster, trainer: tuple[str, str], tmp_path: Path
) -> None:
    """SLURM's own preemption: it takes the nodes at once and queues the job again; the checkpoint of before is read."""
    code, output = submit(cluster, tmp_path, *trainer, WAIT="2")
    assert code == 0, output
    job = job_number(output)
    log = tmp_path / f"slurm-{job}.out"
    until(lambda: "rank 3/4" in text(log), log)
    (tmp_path / "runs" / f"slurm-{job}" / "checkpoints" / "iteration-000007").mkdir(parents=True)
    urgent = int(
        cluster.call("sbatch", "--parsable", "-p", "urgent", "-N4", "--exclusive", "-o", "/dev/null", "--wrap=:")
    )
    cluster.wait(urgent, "COMPLETED")
    hasten(cluster, job)
    cluster.wait(job, "COMPLETED")
    assert text(log).count("resume latest") == 4


def test_a_failing_rank_ends_the_job_and_all_ranks(cluster: Cluster, trainer: tuple[str, str], tmp_path: Path) -> None:
    code, output = submit(cluster, tmp_path, *trainer, "--follow", FAIL_RANK="2", WAIT="600")
    assert code in (3, 143), output  # srun gives the highest code, and the others were terminated
    assert "rank 2 fails" in output
    assert "is FAILED" in output
    assert "queueing again" not in output


@pytest.mark.rotates(3, of="jobs")
def test_a_sweep_is_a_job_array(cluster: Cluster, trainer: tuple[str, str], tmp_path: Path) -> None:
    code, output = submit(cluster, tmp_path, "--sweep", "training.learning_rate=1e-3,1e-4", *trainer, "--follow")
    assert code == 0, output
    for index, rate in enumerate(("1e-3", "1e-4")):
        assert re.search(rf"\[\d+_{index}\] rank 0/4 resume None \['training.learning_rate={rate}'\]", output), output
    assert set(re.findall(r"MASTER_ADDR=(\S+)", output)) == {"127.0.0.1", "127.0.0.3"}  # side by side on four nodes
    assert output.count("is COMPLETED") == 2
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_an_interrupt_cancels_the_job_if_asked(cluster: Cluster, trainer: tuple[str, str], tmp_path: Path) -> None:
    process = start(cluster, tmp_path, *trainer, "--follow", "--with", "cancel_on_interrupt=true", WAIT="600")
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if "resume None" in line:
            break
    job = job_number("".join(seen))
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(200) == 130
    assert f"job {job} is cancelled" in rest
    assert cluster.wait(job, "CANCELLED") == "CANCELLED"


def test_the_script_and_adopt_find_the_same_address(cluster: Cluster) -> None:
    """Plain ``srun python -m vpipe train`` without our script; NodeAddr is an address that no name resolves to."""
    code = f"{ADOPT}; print(os.environ['MASTER_ADDR'], os.environ['RANK'])"
    command = ["srun", "--nodes=2", "--ntasks=2", forked_python.program(), "-c", code]
    assert sorted(cluster.call(*command).splitlines()) == ["127.0.0.1 0", "127.0.0.1 1"]
    address = next(line for line in script(SlurmJob("c", 2, 1)).splitlines() if line.startswith("MASTER_ADDR="))
    assert cluster.call("bash", "-c", f"first=n2; {address}; echo $MASTER_ADDR") == "127.0.0.2\n"


@pytest.mark.rotates(3, of="jobs")
def test_one_rank_on_each_of_four_nodes(cluster: Cluster, trainer: tuple[str, str], tmp_path: Path) -> None:
    code, output = submit(cluster, tmp_path, "--nodes", "4", *trainer, "--follow")
    assert code == 0, output
    for rank in range(4):
        assert f"rank {rank}/4 resume None [] SLURM_NODEID={rank} LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 " in output


def test_the_doctor_sees_the_cluster(cluster: Cluster) -> None:
    answer = json.loads(cluster.call(sys.executable, "-m", "vpipe", "doctor", "--json"))
    (found,) = [finding for finding in answer["findings"] if finding["topic"] == "slurm"]
    assert found["status"] == "found"
    assert "4 nodes gpu:2" in found["detail"]


@pytest.mark.rotates(3, of="jobs")
@pytest.mark.parametrize(
    "kind", [pytest.param("charliecloud", marks=needs("ch-run")), pytest.param("bubblewrap", marks=needs("bwrap"))]
)
def test_ranks_run_inside_a_container(kind: str, cluster: Cluster, trainer: tuple[str, str], tmp_path: Path) -> None:
    """The config names a container: every rank sees its files and still finds its place."""
    program = Path(trainer[1])
    image = build(tmp_path / "image", tmp_path, program.parent)
    binds = ", ".join(f'"{place}"' for place in (*brought(), program.parent))
    container = f"launch: {{container: {{kind: {kind}, image: {image}, binds: [{binds}]}}}}\n"
    (tmp_path / "job.yaml").write_text(Path(CONFIG).read_text() + container)
    words = ("--nodes", "2", *trainer, "--follow")
    code, output = submit(cluster, tmp_path, *words, config="job.yaml", TELL="/image-name", USER="root")
    assert code == 0, output
    assert output.count("vpipe-test-image") == 4
    assert "rank 3/4 resume None [] SLURM_NODEID=1 LOCAL_RANK=1 MASTER_ADDR=127.0.0.1" in output


def test_two_jobs_on_one_node_take_different_ports(cluster: Cluster) -> None:
    code = f"{ADOPT}; print(os.environ['MASTER_PORT'])"
    command = ["srun", "--nodes=1", "--ntasks=2", forked_python.program(), "-c", code]
    ports = [set(cluster.call(*command).split()) for _ in range(2)]
    assert [len(each) for each in ports] == [1, 1]
    assert ports[0] != ports[1]


def test_slurms_refusal_is_one_sentence(cluster: Cluster, tmp_path: Path) -> None:
    code, output = submit(cluster, tmp_path, "--with", "partition=nowhere", python=sys.executable)
    assert code == 2
    assert output.count("\n") == 1
    assert "sbatch refused the job" in output
    assert "invalid partition" in output.lower()
    code, output = submit(cluster, tmp_path, "--with", "cpus_per_task=64")
    assert code == 2
    assert "no such nodes as the job asks for" in output
    assert not cluster.call("squeue", "-h"), "it does not wait for what no node has"


def text(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def until(true: Callable[[], bool], log: Path, seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, text(log)
        time.sleep(0.1)


def hasten(cluster: Cluster, job: int) -> None:
    """SLURM lets a job that was queued again wait two minutes; tests wait until the old credential is over."""
    cluster.wait(job, "PENDING", "RUNNING")
    time.sleep(3)
    cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now")


def by_its_old_name(cluster: Cluster, folder: Path, name: str) -> str:
    """What a ready script says, without the GPUs, which these nodes have not: ranks share the processors."""
    shutil.copy(ROOT / f"{name}.sh", folder)
    variables = dict(cluster.environment) | {"PATH": f"{folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    options = ("--gres=none", "--ntasks-per-node=1", "--overcommit", "--output=said.txt")
    words = ["sbatch", "--parsable", *options, f"{name}.sh"]
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    state = cluster.wait(int(done.stdout), "COMPLETED", "FAILED", seconds=150)
    said = (folder / "said.txt").read_text()
    assert state == "COMPLETED", said
    return said


@pytest.mark.rotates(3, of="jobs")
@pytest.mark.parametrize(
    ("name", "config", "num_ranks"),
    [
        ("submit_gpipe_1node", "gpt_small.yaml", 4),
        ("submit_gpipe_2nodes", "gpt_8stage.yaml", 8),
        ("submit_gpipe_4nodes", "gpt_16stage.yaml", 16),
    ],
)
def test_the_scripts_of_the_old_names_train_as_one_process_does(
    cluster: Cluster, tmp_path: Path, name: str, config: str, num_ranks: int
) -> None:
    """Word for word, with the stages, schedule and microbatches of the config that they name; its model is smaller."""
    (tmp_path / "configs").mkdir()
    small = yaml.safe_load((ROOT / "configs" / config).read_text())
    small["model"] |= {"hidden_size": 16, "num_heads": 2, "sequence_length": 8}
    small["dataset"] = {"name": "synthetic", "batch_size": small["dataset"]["batch_size"]}
    small["training"] = {"num_microbatches": small["training"]["num_microbatches"], "max_iterations": 2}
    (tmp_path / "configs" / config).write_text(yaml.safe_dump(small))
    (tmp_path / "python").symlink_to(forked_python.program())
    said = by_its_old_name(cluster, tmp_path, name)
    assert f"on {num_ranks} ranks" in said
    alone = ("--set", "parallel.model_parallel_size=1", "--scheduler", "gpipe", "--output-dir", "alone")
    words = [str(tmp_path / "python"), "-m", "vpipe", "train", f"configs/{config}", *alone]
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, timeout=200)
    found = losses(tmp_path)
    assert len(found) >= 2
    assert found == losses(tmp_path, "alone")


@pytest.mark.rotates(3, of="jobs")
def test_the_script_of_vpipes_old_name_trains(cluster: Cluster, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    small = (ROOT / "configs" / "bert_4vpipe_cpu.yml").read_text()
    text = re.sub(r"max_iterations('?): \d+", r"max_iterations\1: 2", small)
    (tmp_path / "configs" / "bert_4vpipe.yml").write_text(text)
    (tmp_path / "python").symlink_to(forked_python.program())
    said = by_its_old_name(cluster, tmp_path, "run_vpipe")
    (path,) = {each.resolve() for each in tmp_path.glob("*/*/summary.json")}
    assert json.loads(path.read_text())["iterations_done"] == 2, said
