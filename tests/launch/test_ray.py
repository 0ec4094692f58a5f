"""``vpipe submit --to ray`` on a real Ray of two nodes that the test starts on this machine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

import forked_python
from vpipe.errors import UserError
from vpipe.launch.engines import asked_for
from vpipe.launch.ray_cluster import RayJob, run
from vpipe.launch.ssh import SshLaunch

CONFIG = """
model: {name: gpt, hidden_size: 16, num_layers: 2, num_heads: 2, sequence_length: 8}
dataset: {name: synthetic, batch_size: 4}
training: {max_iterations: 3, num_microbatches: 2}
parallel: {model_parallel_size: 2, scheduler: 1f1b}
observe: {log_interval: 1}
"""

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="no Ray; pip install ray")


def test_options_of_slurm_are_refused() -> None:
    with pytest.raises(UserError, match="--with partition=fast says nothing to ray, which understands address"):
        asked_for("ray", ["partition=fast"])


@needs_ray
def test_an_address_where_nothing_listens_is_refused_at_once() -> None:
    """Ray tried for 206 s."""
    with pytest.raises(UserError, match=r"there is no Ray cluster at 127\.0\.0\.1:9"):
        run(RayJob(("x",), 1, SshLaunch((), ".", Path()), address="127.0.0.1:9"), print)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster with two nodes of one core each: two ranks need both."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        yield str(cluster.address)
    finally:
        cluster.shutdown()


def command(cluster: str, *words: str, config: str = "c.yaml") -> list[str]:
    return [sys.executable, "-m", "vpipe", "submit", config, "--to", "ray", "--with", f"address={cluster}", *words]


def losses(folder: Path) -> list[float]:
    (path,) = {each.resolve() for each in folder.glob("runs/*/metrics.jsonl")}  # runs/latest leads to one of them
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row["loss"] for row in rows if row["kind"] == "train"]


@pytest.mark.rotates(1, of="jobs")
@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_on_ray_equals_one_on_this_machine_and_failures_and_cancelling_end_all(
    cluster: str, tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "c.yaml").write_text(CONFIG)
    subprocess.run([forked_python.program(), "-m", "vpipe", "train", "c.yaml"], cwd=here, check=True, timeout=200)
    done = subprocess.run(command(cluster), cwd=there, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "iteration 3/3" in done.stdout
    assert len(losses(there)) == 3
    assert losses(here) == losses(there)

    wrong = command(cluster, "--set", "launch.interface=nope0")
    done = subprocess.run(wrong, cwd=there, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "nope0" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr

    done = subprocess.run(
        command(cluster, "--with", "python=/no/python"),
        cwd=there,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 2
    assert "cannot be started on" in done.stderr
    assert "/no/python: No such file" in done.stderr
    assert "Traceback" not in done.stderr

    endless = command(cluster, "--set", "training.max_iterations=100000000")
    process = subprocess.Popen(endless, cwd=there, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "iteration 2/" in line:
            break
    assert len(ranks(there)) >= 2, "two ranks, and what keeps the store of each node"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=200)
    end = time.monotonic() + 30
    while ranks(there):
        assert time.monotonic() < end, "ranks are left"
        time.sleep(0.1)


@pytest.mark.rotates(1, of="jobs")
@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_users_model_file_trains_on_ray_as_on_one_machine(
    cluster: str, documented_job: Callable[[Path], Path], tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        documented_job(folder)
    subprocess.run([forked_python.program(), "-m", "vpipe", "train", "my_job.yaml"], cwd=here, check=True, timeout=200)
    words = command(cluster, config="my_job.yaml")
    done = subprocess.run(words, cwd=there, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(here) == losses(there) != []


def ranks(folder: Path) -> list[int]:
    """Processes of ranks that work in ``folder``: forks of a zygote."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, AttributeError):
            words = [*process.cmdline(), *process.parent().cmdline()]  # type: ignore[union-attr]
            if words.count("vpipe.launch.zygote") == 2 and process.cwd() == str(folder):
                found.append(process.pid)
    return found
