"""An elastic run inside a SLURM job: the job's nodes are its machines, and srun is what ssh is elsewhere.

    sbatch --no-kill ──▶ script on the first node ──▶ vpipe train ═srun═ n1: node ── slots 0, 1
                                                                  ═srun═ n2: node ── slots 2, 3

One step for each node: where a node is lost, or given back, SLURM ends its step and no other. A node is the same
program as on machines that ssh reaches (``node``), with the same lease, and so are the copies.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vpipe.errors import UserError
from vpipe.launch import command_words as valid
from vpipe.launch import environment
from vpipe.launch.container import wrap
from vpipe.launch.environment import Ask, carried
from vpipe.process import AS_MODULE

if TYPE_CHECKING:
    from vpipe.launch.hosts import Node
    from vpipe.launch.ssh import SshLaunch


def names(environ: Mapping[str, str], ask: Ask = environment.run) -> list[str]:
    """The nodes of the job that this process runs in."""
    listed = environ.get("SLURM_JOB_NODELIST")
    if not listed:
        raise UserError(
            "launch.through is srun, but this process is in no SLURM job (SLURM_JOB_NODELIST is not set); use 'vpipe "
            "submit', or set launch.through: ssh"
        )
    return [valid.host(name, "SLURM_JOB_NODELIST") for name in ask(["scontrol", "show", "hostnames", listed]).split()]


def command(node: Node, launch: SshLaunch, ask: Ask = environment.run) -> list[str]:
    """The step of one node. Its task may use what the job has there, and is told the address that SLURM knows."""
    address = environment.node_address(node.host, ask)
    inside = [launch.python, AS_MODULE, "vpipe.launch.node", address]
    words = wrap(launch.container, inside, launch.directory, carried(os.environ))
    options = ("--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--unbuffered", "--cpu-bind=none", "--mpi=none")
    return [
        "srun",
        "--export=ALL",
        f"--nodelist={valid.host(node.host)}",
        *options,
        f"--chdir={launch.directory}",
        "--",
        *words,
    ]


def shrink(kept: Sequence[str], folder: Path) -> None:
    """Tell SLURM that the job keeps only these nodes. What it objects stands in the job's output; it leaves a file of
    variables for shells in ``folder``."""
    words = ["scontrol", "update", f"JobId={os.environ['SLURM_JOB_ID']}", f"NodeList={','.join(kept)}"]
    with suppress(OSError):
        subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd=folder, start_new_session=True)
