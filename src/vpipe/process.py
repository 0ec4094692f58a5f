"""Which process is it, is it one of several, how large is it, and who reads what it writes? A pid alone says little: it
is given to the next one.

A process is known by its machine (until the next start of it), its pid namespace (a container has pids of its own), its
pid and its start, in clock ticks after the machine's. ``alive`` answers only where it can know.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vpipe.records import Natural, parsed_or_none

AS_MODULE = "-Pm"
"""The word of Python before a module of ours: ``-m``, but nothing of the current directory is imported, whatever it is
called."""
_PR_SET_PDEATHSIG = 1
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "PMIX_RANK")
"""By which variables launchers tell a process which of several it is; torch's own first."""


def told_rank(environ: Mapping[str, str] = os.environ) -> str | None:
    """What a launcher has said, in whatever words (``launch.environment.adopt`` translates them into torch's)."""
    return next((environ[name] for name in RANKS if name in environ), None)


def rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Which of several processes this is, in torch's words, or ``None`` where it is the only one."""
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
    pid: Natural
    started: Natural

    @classmethod
    def here(cls) -> Process:
        pid = os.getpid()
        return cls(socket.gethostname(), machine(), pid, _started(pid) or 0)

    @classmethod
    def parse(cls, found: Any) -> Process | None:
        """What ``fields`` wrote; ``None`` for anything else."""
        return parsed_or_none(cls, found)

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


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to send ``signum`` when ``parent`` ends; 0 takes it back. Leaves at once if it has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


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


def cores() -> list[int]:
    """The numbers of the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def num_cores() -> int:
    """Cores that this process may use: a container may have less of their time than there are."""
    return min([len(cores()), *_quotas()])


def _quotas() -> list[int]:
    """How many cores' time the groups of this process may take, of those that have a limit."""
    found = []
    with suppress(OSError, ValueError):
        own = Path("/sys/fs/cgroup" + Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip())
        for folder in (own, *own.parents):
            if (limit := folder / "cpu.max").exists():
                quota, period = limit.read_text().split()
                found += [max(1, int(quota) // int(period))] if quota != "max" else []
    return found


class _Queue(threading.local):
    """The kernel's file about one thread; a fork is another thread."""

    def __init__(self) -> None:
        self.thread, self.file = 0, -1

    def __del__(self) -> None:
        if self.file >= 0:
            os.close(self.file)


_queue = _Queue()


def core_wait() -> int:
    """How long this thread has waited for a processor when it could have run, in nanoseconds; 0 where the kernel does
    not count."""
    try:
        if _queue.thread != threading.get_native_id():
            _queue.file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            _queue.thread = threading.get_native_id()
        return int(os.pread(_queue.file, 64, 0).split()[1])
    except (OSError, IndexError):
        return 0


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
