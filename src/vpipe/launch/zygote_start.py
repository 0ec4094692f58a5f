"""A zygote that begins before it is known what it will run.

Reading a config takes the launcher half a second of one core, importing torch takes the zygote more than one of
another: the second need not wait for the first. What ``vpipe train`` will most probably need is therefore started
first of all. Only what must be known before torch is imported, the threads of one operation, is guessed
(``cli.main``), from the command's words and the config's text. A guess that turns out wrong costs what was imported
until then: the launcher lets that zygote go and starts the right one, as it does where nothing was guessed.

    vpipe train ── begin ─────────── read the config ── take ── spec ──▶ ┐
                     └─ zygote: import torch, vpipe ─────────────────────┴─ fork the ranks
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vpipe.launch.process import allow_files, kill_group
from vpipe.process import AS_MODULE, num_cores

PRELOAD = ("torch", "torch.distributed", "vpipe.runtime.pipeline")
"""What every rank of ours needs."""
WORKER = "vpipe.train.worker"
STARTED_BY_OTHERS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "PMIX_RANK", "MPI_LOCALRANKID")
LATE = ("VPIPE_COMMAND", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that are read when ranks meet and later: they may still change when torch is imported."""


@dataclass(frozen=True)
class Started:
    """A zygote that waits for its spec."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    environment: Mapping[str, str]


def settings(num_ranks: int, threads: int) -> dict[str, str]:
    """What must be known before torch is imported; the user's own settings win, but for ``threads`` of the config."""
    default = {
        "OMP_NUM_THREADS": str(threads or max(1, num_cores() // num_ranks)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONUNBUFFERED": "1",
    }
    return default | dict(os.environ) | ({"OMP_NUM_THREADS": str(threads)} if threads else {})


def spawn(environment: Mapping[str, str], shared: Sequence[int] = (), preload: Sequence[str] = ()) -> Started:
    """Start a zygote, which inherits the descriptors ``shared`` and imports ``preload`` while it waits."""
    allow_files()
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, AS_MODULE, "vpipe.launch.zygote", str(theirs.fileno()), str(os.getpid()), *preload],
        stdin=subprocess.DEVNULL,
        env=environment,
        pass_fds=[*shared, theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    return Started(process, ours, dict(environment))


_begun: list[Started] = []


def begin(num_ranks: int, threads: int) -> None:
    """Start the zygote of so many ranks of ``vpipe train``, unless this process is a rank of another launcher's."""
    if not any(name in os.environ for name in STARTED_BY_OTHERS):
        _begun.append(spawn(settings(num_ranks, threads), preload=(*PRELOAD, WORKER)))


def take(environment: Mapping[str, str]) -> Started | None:
    """The zygote that has begun, if it has the environment that it should have; otherwise it is let go."""
    if not _begun:
        return None
    fits = _fixed(_begun[0].environment) == _fixed(environment) and _begun[0].process.poll() is None
    if fits:
        return _begun.pop()
    dismiss()
    return None


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in LATE}


def dismiss() -> None:
    """End a zygote that was not taken."""
    while _begun:
        started = _begun.pop()
        started.control.close()
        kill_group(started.process.pid)
        started.process.wait()
