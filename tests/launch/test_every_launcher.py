"""The table of docs/cluster.md: what every launcher gives its ranks, seen where it is installed. Two ranks of a tiny model
say which secret they know, with how many threads they compute and which run directory they see; then one of them fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from slurm_cluster import NEEDS_SLURM, Cluster
from ssh_server import NEEDS_SSHD, Server

from programs import needs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CONFIG = """
plugins: [{plugins}]
model: {{name: gpt, hidden_size: 16, num_layers: 2, num_heads: 2, sequence_length: 8}}
dataset: {{name: synthetic, batch_size: 4}}
training: {{max_iterations: 2, num_microbatches: 2}}
parallel: {{model_parallel_size: 2, scheduler: 1f1b, timeout: 60}}
launch: {{{machines}}}
observe: {{log_interval: 1}}
"""
SAYS = """
import atexit, json, os, sys
from pathlib import Path

def say():
    if "RANK" in os.environ:
        import torch
        from vpipe.door import secret_of
        runs = sorted(str(path.resolve()) for path in Path(__file__).parent.glob("runs*/**/state.json"))
        told = {"secret": secret_of(os.environ), "threads": torch.get_num_threads(), "runs": runs}
        told["compiler"] = "torch._dynamo" in sys.modules
        Path(__file__).with_name(f"rank{os.environ['RANK']}.json").write_text(json.dumps(told))

atexit.register(say)
"""
FAILS = """
import os, torch
from pathlib import Path
from vpipe.process import told_rank
forward = torch.nn.Linear.forward
if (rank := told_rank()) is not None:
    Path(__file__).with_name(f"pid{rank}").write_text(str(os.getpid()))

def fails(self, x):
    if os.environ.get("RANK") == "1" and torch.is_grad_enabled():
        raise RuntimeError("rank 1 has had enough")
    return forward(self, x)

torch.nn.Linear.forward = fails
"""
VPIPE = (sys.executable, "-m", "vpipe")
TRAIN = ("train", "c.yaml")
MPI = [pytest.param(name, marks=needs(name)) for name in ("mpirun.openmpi", "mpirun.mpich")]
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="no Ray; pip install ray")


@contextmanager
def launched(name: str, folder: Path) -> Iterator[tuple[tuple[str, ...], dict[str, str], str]]:
    """The words that start a run of c.yaml, the variables that they need, and the config's machines."""
    if name == "local":
        yield (*VPIPE, *TRAIN), {}, ""
    elif name == "torchrun":
        agent = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
        yield (sys.executable, *agent, "-m", "vpipe", *TRAIN), {}, ""
    elif name.startswith("mpirun"):
        options = ("--allow-run-as-root", "--oversubscribe") if name.endswith("openmpi") else ()
        yield (name, *options, "-n", "2", *VPIPE, *TRAIN), {}, ""
    elif name == "ssh":
        hosts = {"node-a": "127.0.0.2"}
        (folder / "sshd").mkdir()
        server = Server(folder / "sshd", hosts)
        try:
            server.listen(list(hosts.values()))
            yield (*VPIPE, *TRAIN), {"VPIPE_SSH_CONFIG": str(server.config)}, "machines: [node-a:0, node-a:1]"
        finally:
            server.stop()
    elif name == "slurm":
        (folder / "slurm").mkdir()
        cluster = Cluster(folder / "slurm", num_nodes=2)
        try:
            cluster.start()
            variables = {"SLURM_CONF": cluster.environment["SLURM_CONF"], "SBATCH_EXPORT": "NONE"}
            yield (*VPIPE, "submit", "c.yaml", "--nodes", "2", "--follow"), variables, ""
        finally:
            cluster.stop()
    elif name == "ray":
        from ray.cluster_utils import Cluster as RayCluster

        places = RayCluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        try:
            yield (*VPIPE, "submit", "c.yaml", "--to", "ray", "--with", f"address={places.address}"), {}, ""
        finally:
            places.shutdown()


def ran(folder: Path, words: tuple[str, ...], variables: dict[str, str]) -> tuple[int, str]:
    dropped = ("OMP_NUM_THREADS", "VPIPE_SECRET")
    environment = {key: value for key, value in os.environ.items() if key not in dropped} | variables
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.rotates(2, of="launchers")
@pytest.mark.parametrize(
    "name",
    [
        "local",
        "torchrun",
        *MPI,
        pytest.param("ssh", marks=NEEDS_SSHD),
        pytest.param("slurm", marks=NEEDS_SLURM),
        pytest.param("ray", marks=needs_ray),
    ],
)
def test_a_cell_of_the_table(name: str, tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    (tmp_path / "fails.py").write_text(FAILS)
    with launched(name, tmp_path) as (words, variables, machines):
        submits = "submit" in words

        def own(directory: str) -> tuple[str, ...]:
            return () if submits else ("--output-dir", f"runs/{directory}")

        (tmp_path / "c.yaml").write_text(CONFIG.format(plugins="says.py", machines=machines))
        code, said = ran(tmp_path, (*words, *own("other")), variables)
        assert code == 0, said
        code, said = ran(tmp_path, (*words, *own("mine"), *(() if submits else ("--resume", "latest"))), variables)
        assert code == 0, said
        assert "done: 2 iterations" in said
        assert "resumed" not in said, "it went on from another run"
        one, other = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
        assert one["secret"] == other["secret"] != ""
        alone = len(os.sched_getaffinity(0)) // 2 or 1
        assert one["threads"] == other["threads"] == (1 if name == "torchrun" else alone), "torchrun says one thread"
        assert one["runs"] == other["runs"] != []
        assert not one["compiler"], "the second step, whose bytes are counted, imported it in every rank"
        assert not other["compiler"]
        shared = f"{one['threads']} thread{'s' * (one['threads'] > 1)} "
        assert shared in said, "the first line says what a rank computes with"
        (tmp_path / "c.yaml").write_text(CONFIG.format(plugins="fails.py", machines=machines))
        code, said = ran(tmp_path, words, variables)
        assert code, said
        assert "rank 1 has had enough" in said
        until = time.monotonic() + 100
        for rank in range(2):
            pid = int((tmp_path / f"pid{rank}").read_text())
            while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < until, f"rank {rank} goes on after the other one has failed"
                time.sleep(0.1)
