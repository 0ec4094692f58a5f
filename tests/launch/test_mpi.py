"""Ranks under mpirun: what its managers leave in the environment, and real ones where they are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import forked_python
from programs import needs
from vpipe.errors import UserError
from vpipe.launch.environment import adopt, from_mpi

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1145962497",
    "PMIX_RANK": "1",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def test_open_mpi_on_one_machine_meets_on_its_loopback() -> None:
    found = from_mpi(OPEN_MPI)
    assert found is not None
    port = found.pop("MASTER_PORT")
    assert found == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    other = from_mpi(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0"})
    assert other is not None
    assert other["MASTER_PORT"] == port
    assert from_mpi(OPEN_MPI | {"PMIX_NAMESPACE": "7"})["MASTER_PORT"] != port  # type: ignore[index]


def test_several_machines_need_an_address_and_it_is_said_how() -> None:
    with pytest.raises(UserError, match=r"4 ranks.*2 of them on this machine.*-x MASTER_ADDR=node1"):
        from_mpi(HYDRA)
    found = from_mpi(HYDRA | {"MASTER_ADDR": "node1", "MASTER_PORT": "31000"})
    assert found is not None
    assert (found["RANK"], found["LOCAL_RANK"], found["MASTER_ADDR"]) == ("3", "1", "node1")


def test_a_job_without_a_name_needs_a_port() -> None:
    with pytest.raises(UserError, match="MASTER_PORT"):
        from_mpi(HYDRA | {"MASTER_ADDR": "node1"})


def test_pmix_alone_does_not_say_how_many() -> None:
    with pytest.raises(UserError, match=r"PMIX_RANK is 1, but nothing says of how many"):
        from_mpi({"PMIX_RANK": "1"})


def test_mpirun_inside_a_slurm_job_is_asked_before_slurm() -> None:
    """srun starts one helper of mpirun per node: its SLURM_PROCID is not the rank."""
    helper = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7"}
    environment = OPEN_MPI | helper
    adopt(environment, lambda words: pytest.fail("SLURM was asked"))
    assert environment["RANK"] == "1"


@pytest.mark.parametrize("size", ["1"])
def test_one_process_is_no_rank(size: str) -> None:
    environment = OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": size}
    before = dict(environment)
    adopt(environment)
    assert environment == before


CONFIG = """
model: {name: gpt, hidden_size: 16, num_layers: 2, num_heads: 2, sequence_length: 8}
dataset: {name: synthetic, batch_size: 4}
training: {max_iterations: 3, num_microbatches: 2}
parallel: {model_parallel_size: 2, scheduler: 1f1b}
observe: {log_interval: 1}
"""


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row["kind"] == "train"]


def command(program: str) -> list[str]:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [program, *root, "--oversubscribe"] if program.endswith("openmpi") else [program]


@pytest.mark.rotates(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [pytest.param(name, marks=needs(name)) for name in ("mpirun.openmpi", "mpirun.mpich")]
)
def test_training_under_mpirun_equals_training_under_our_launcher(program: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    train = ["-m", "vpipe", "train", "c.yaml", "--output-dir"]
    found = {}
    mpi = [*command(program), "-n", "2", sys.executable]
    for name, words in {"mpi": [*mpi, *train, "mpi"], "ours": [forked_python.program(), *train, "ours"]}.items():
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "terminate" not in done.stderr, done.stderr
        found[name] = losses(tmp_path / name)
    assert len(found["mpi"]) == 3
    assert found["mpi"] == found["ours"]


@pytest.mark.slow
@needs("mpirun.openmpi")
def test_a_mistake_is_said_once_under_mpirun(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG.replace("num_heads: 2", "num_heads: 3"))
    words = [*command("mpirun.openmpi"), "-n", "2", forked_python.program(), "-m", "vpipe", "train", "c.yaml"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("num_heads") == 1, done.stderr
