"""Who am I? The launcher's answer, in torch's words: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.

torchrun and ``vpipe run`` speak torch's language; srun and mpirun do not. ``adopt`` is called before anything else by
``python -m vpipe train`` and translates what SLURM says:

    SLURM_PROCID -> RANK             SLURM_STEP_NUM_TASKS -> WORLD_SIZE        SLURM_LOCALID -> LOCAL_RANK
    the first node's NodeAddr -> MASTER_ADDR                                   SLURM_JOB_ID -> MASTER_PORT

and what MPI's process managers leave in the environment (MPI programs find each other through MPI itself, which ours do
not link):

    Open MPI         OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    MPICH, Intel     PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
    PMIx alone       PMIX_RANK, and WORLD_SIZE by hand: PMIx keeps the size in its own store

No manager says where rank 0 runs. On one machine that is the loopback; on several MASTER_ADDR must be given
(``mpirun -x MASTER_ADDR=node1``), because a guess would be a hang.

The address is never guessed: on several nodes a wrong ``localhost`` is a hang of half an hour, an error takes a second.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
import zlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence

from vpipe import network
from vpipe.errors import UserError
from vpipe.launch import command_words as valid
from vpipe.launch.hosts import DEVICES
from vpipe.process import told_rank

Ask = Callable[[Sequence[str]], str]
"""Command → what it prints."""

POLITENESS = 2.0
"""Seconds after which rank 0 has spoken, if it makes the same mistake, and the launcher has ended the others."""

FIRST_PORT, NUM_PORTS = 10_000, 20_000
"""Of SLURM's jobs: below the range from which Linux takes the ports of outgoing connections."""
MPI_PORTS, NUM_MPI_PORTS = 30_000, 2_000
"""Between the two."""

_FORMS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMIX_RANK", "WORLD_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE"),
)
"""(rank, size, local rank, local size) by the names of each manager."""

_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
_MANAGERS = ("mpirun", "mpiexec", "hydra_pmi_proxy", "pmi_proxy", "orted", "prted", "prterun")


def adopt(environ: MutableMapping[str, str] | None = None, ask: Ask | None = None) -> None:
    """Translate SLURM's or MPI's description of this process, if there is one that is not translated yet.

    mpirun is asked first: inside a SLURM job it is srun that starts mpirun's helpers, whose task is not the rank.
    """
    environ = os.environ if environ is None else environ
    if "RANK" in environ:
        return
    is_task = int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PROCID" in environ
    by_mpirun = "OMPI_COMM_WORLD_RANK" in environ or "MPI_LOCALRANKID" in environ
    if by_mpirun or not is_task:
        environ.update((from_mpi(environ) if by_mpirun or "SLURM_PROCID" not in environ else None) or {})
    else:
        environ.update(from_slurm(environ, ask or run))


def let_rank_0_speak(environ: Mapping[str, str] | None = None) -> None:
    """Before the ranks have met: a mistake in a config is one for all, and torchrun or srun end the others with the
    first that ends. A rank whose mistake is its own, such as a file that only this machine lacks, speaks after that."""
    if told_rank(os.environ if environ is None else environ) not in (None, "0"):
        time.sleep(POLITENESS)


def from_slurm(environ: Mapping[str, str], ask: Ask) -> dict[str, str]:
    """torch's variables for one task of a job step."""
    node = int(environ.get("SLURM_NODEID", "0"))
    counts = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", environ["SLURM_STEP_NUM_TASKS"]))
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(counts[min(node, len(counts) - 1)]),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or master_address(environ, ask),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(master_port(environ)),
        **_devices_of_task(environ),
    }


def _devices_of_task(environ: Mapping[str, str]) -> dict[str, str]:
    """Where SLURM shows each task its own devices alone, a rank takes the first that it sees, whatever its place."""
    alone = "SLURM_GPUS_PER_TASK" in environ or "per_task" in environ.get("SLURM_GPU_BIND", "")
    return {DEVICES: ",".join(["0"] * (int(environ["SLURM_LOCALID"]) + 1))} if alone else {}


def master_port(environ: Mapping[str, str]) -> int:
    """A port that other jobs on the same node do not take: neighbours in the queue get neighbouring ports."""
    job, step = int(environ["SLURM_JOB_ID"]), int(environ.get("SLURM_STEP_ID", "0"))
    return FIRST_PORT + (4 * job + step % 4) % NUM_PORTS


def master_address(environ: Mapping[str, str], ask: Ask) -> str:
    """The ``NodeAddr`` of the step's first node; a step on one node meets on its loopback."""
    if int(environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES", "1"))) == 1:
        return "127.0.0.1"
    listed = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
    names = ask(["scontrol", "show", "hostnames", listed]).split()
    if not names:
        raise UserError(f"SLURM does not tell the address of the first node of {valid.shown(listed)}; set MASTER_ADDR")
    return node_address(valid.host(names[0], "the first host of SLURM_JOB_NODELIST"), ask)


def node_address(node: str, ask: Ask) -> str:
    """The ``NodeAddr`` of a node: its name may not resolve."""
    found = re.search(r"\bNodeAddr=(\S+)", ask(["scontrol", "--oneliner", "show", "node", node]))
    if found is None:
        raise UserError(f"SLURM does not tell the address of node {node}; set MASTER_ADDR")
    return valid.address(found[1], f"NodeAddr of {node}")


def tasks_per_node(text: str) -> list[int]:
    """SLURM's short form: ``2(x3),1`` is 2, 2, 2, 1."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise UserError(f"SLURM_TASKS_PER_NODE is {valid.shown(text)}, which is not of the form 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def from_mpi(environ: Mapping[str, str]) -> dict[str, str] | None:
    """torch's variables for one process of an MPI job; ``None`` where none or only one was started."""
    form = next((form for form in _FORMS if form[0] in environ), None)
    if form is None:
        return None
    rank, size, local_rank, local_size = (environ.get(name) for name in form)
    if size is None:
        raise UserError(f"{form[0]} is {rank}, but nothing says of how many; set WORLD_SIZE to the number of processes")
    if int(size) == 1:
        return None
    local_rank, local_size = local_rank or rank, local_size or size
    several = int(local_size or "1") < int(size)
    if several and not environ.get("MASTER_ADDR"):
        raise UserError(
            f"mpirun has started {size} ranks ({form[1]}), {local_size} of them on this machine, and does not say "
            "where rank 0 runs; give its address: mpirun -x MASTER_ADDR=node1 … (MPICH: -genv MASTER_ADDR node1)"
        )
    return {
        "RANK": rank or "0",
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank or "0",
        "LOCAL_WORLD_SIZE": local_size or "1",
        "MASTER_ADDR": environ.get("MASTER_ADDR") or "127.0.0.1",
        "MASTER_PORT": environ.get("MASTER_PORT") or str(_mpi_port(environ, several)),
    }


def _mpi_port(environ: Mapping[str, str], several: bool) -> int:
    """A port of this job's own, the same for all its ranks: from the job's name, else from its manager's process."""
    job = next((environ[name] for name in _JOBS if name in environ), None)
    if job is None and not several:
        import psutil  # a manager of processes is looked for by its name: seldom

        ancestors = psutil.Process().parents()
        job = next((str(each.pid) for each in ancestors if each.name() in _MANAGERS), None)
    if job is None:
        raise UserError("nothing in the environment tells this MPI job from others; set MASTER_PORT for all its ranks")
    return MPI_PORTS + zlib.crc32(job.encode()) % NUM_MPI_PORTS


def run(command: Sequence[str]) -> str:
    """What a command prints; one sentence where it cannot."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not on this machine; 'vpipe doctor' says what is") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{' '.join(command)} did not answer within 30 s; is SLURM's controller up?") from None
    if done.returncode:
        raise UserError(f"{' '.join(command)} failed: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def interface_variables(interface: str | None) -> dict[str, str]:
    """How gloo and NCCL are told ``launch.interface``."""
    return dict.fromkeys(network.NAMES, interface) if interface else {}


VENDORS: tuple[str, ...] = ("NCCL_", "RCCL_", "CUDA_", "NVIDIA_", "HIP_", "HSA_", "ROCR_", "UCX_", "GLOO_")
VENDORS += ("TORCH_", "PYTORCH_", "CUBLAS_")
"""Beginnings of the variables by which devices, what joins them, and torch's allocators are told what to do."""
HERE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUDA_HOME")
"""Variables of them that say something of one machine alone."""
CARRIED = (*VENDORS, "HF_", "WANDB_", "OMP_", "MKL_", "PYTHONPATH", "ORION_", "VPIPE_DEBUG")
"""Beginnings of the variables that go along to other machines and into containers: by name or stdin, never in argv."""


def carried(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that ranks on other machines get too."""
    return {
        name: value
        for name, value in environ.items()
        if (name.startswith(CARRIED) and name not in HERE) or name == "USE_ORION_SCHEDULER"
    }
