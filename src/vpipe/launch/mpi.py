"""Ranks that ``mpirun`` started, in torch's words.

MPI programs find each other through MPI itself; ours do not link it. What a process manager leaves in the environment
is enough: who this process is, and how many there are.

    Open MPI         OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    MPICH, Intel     PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
    PMIx alone       PMIX_RANK, and WORLD_SIZE by hand: PMIx keeps the size in its own store

No manager says where rank 0 runs. On one machine that is the loopback; on several MASTER_ADDR must be given
(``mpirun -x MASTER_ADDR=node1``), because a guess would be a hang.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import psutil

from vpipe.errors import UserError

FIRST_PORT, NUM_PORTS = 30_000, 2_000
"""Between the ports of SLURM's jobs and those that Linux takes for outgoing connections."""

_FORMS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMIX_RANK", "WORLD_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE"),
)
"""(rank, size, local rank, local size) by the names of each manager."""

_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
_MANAGERS = ("mpirun", "mpiexec", "hydra_pmi_proxy", "pmi_proxy", "orted", "prted", "prterun")


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
    return {
        "RANK": rank or "0",
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank or "0",
        "LOCAL_WORLD_SIZE": local_size or "1",
        "MASTER_ADDR": environ.get("MASTER_ADDR") or _address(several, form[1], size, local_size or "1"),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(_port(environ, several)),
    }


def _address(several: bool, name: str, size: str, local_size: str) -> str:
    if several:
        raise UserError(
            f"mpirun has started {size} ranks ({name}), {local_size} of them on this machine, and does not say where "
            "rank 0 runs; give its address: mpirun -x MASTER_ADDR=node1 … (MPICH: -genv MASTER_ADDR node1)"
        )
    return "127.0.0.1"


def _port(environ: Mapping[str, str], several: bool) -> int:
    """A port of this job's own, the same for all its ranks: from the job's name, else from its manager's process."""
    job = next((environ[name] for name in _JOBS if name in environ), None)
    if job is None and not several:
        ancestors = psutil.Process().parents()
        job = next((str(each.pid) for each in ancestors if each.name() in _MANAGERS), None)
    if job is None:
        raise UserError("nothing in the environment tells this MPI job from others; set MASTER_PORT for all its ranks")
    return FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS
