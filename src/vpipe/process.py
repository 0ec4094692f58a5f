"""Which process is it, is it one of several, how large is it, and who reads what it writes? A pid alone says little: it
is given to the next one.

A process is known by its machine (until the next start of it), its pid namespace (a container has pids of its own), its
pid and its start, in clock ticks after the machine's. ``alive`` answers only where it can know.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "PMIX_RANK")
"""By which variables launchers tell a process which of several it is; torch's own first."""


def told_rank(environ: Mapping[str, str] = os.environ) -> str | None:
    """What a launcher has said, in whatever words (``launch.environment.adopt`` translates them into torch's)."""
    return next((environ[name] for name in RANKS if name in environ), None)


def rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Which of several processes this is, in torch's words, or ``None`` where nobody has started several."""
    return int(environ.get("RANK", "0")) if int(environ.get("WORLD_SIZE", "1")) > 1 else None


def under_launcher() -> bool:
    """Whether this process is one of several: a launcher has described them, or torch has a group of processes."""
    distributed = sys.modules.get("torch.distributed")  # who has not loaded it has no group
    described = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return described or (distributed is not None and bool(distributed.is_initialized()))


@dataclass(frozen=True)
class Process:
    """One process, now and for ever."""

    host: str
    machine: str
    pid: int
    started: int

    @classmethod
    def here(cls) -> Process:
        pid = os.getpid()
        return cls(socket.gethostname(), machine(), pid, _started(pid) or 0)

    @classmethod
    def parse(cls, found: Any) -> Process | None:
        """What ``fields`` wrote; ``None`` for anything else."""
        if not isinstance(found, dict):
            return None
        host, where, pid, started = (found.get(key) for key in ("host", "machine", "pid", "started"))
        if not (isinstance(host, str) and isinstance(where, str) and _is_count(pid) and _is_count(started)):
            return None
        return cls(host, where, pid, started)  # type: ignore[arg-type]

    def fields(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def alive(self) -> bool | None:
        """``None`` for a process of another machine or container."""
        if self.machine != machine():
            return None
        return _started(self.pid) == self.started

    def kill(self) -> bool:
        """End it, if it is on this machine and still itself; whether it was. The descriptor is opened before the
        start is compared, so the signal cannot reach a process that got the pid in between."""
        if self.machine != machine() or self.pid <= 1:
            return False
        with suppress(OSError):
            handle = os.pidfd_open(self.pid)
            try:
                if _started(self.pid) == self.started:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    return True
            finally:
                os.close(handle)
        return False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _started(pid: int) -> int | None:
    """Clock ticks from the machine's start to the process's; ``None`` where there is none, or only its remains."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, *rest = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])


@cache
def machine() -> str:
    """This machine until its next start, and the pid namespace of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    words = [boot.read_text().strip()] if boot.exists() else [socket.gethostname()]
    with suppress(OSError):
        words.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(words)


PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """The memory of this process, as every step asks: a tenth of what psutil takes to build a process and read all of
    its figures. Opened anew each time: a descriptor from before a fork would tell of the parent."""
    try:
        handle = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        import psutil

        return int(psutil.Process().memory_info().rss)
    try:
        return int(os.read(handle, 256).split()[1]) * PAGE
    finally:
        os.close(handle)


def obeys(stream: Any) -> bool:
    """Whether ``stream`` is a terminal that understands escape codes; ``TERM=dumb`` (Emacs, some CI) does not."""
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


def columns(stream: Any) -> int | None:
    """The width of the terminal at ``stream``; ``None`` for a file or a pipe, whose lines may be long."""
    return shutil.get_terminal_size().columns if is_terminal(stream) else None


def is_terminal(stream: Any) -> bool:
    try:
        return os.isatty(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return False
