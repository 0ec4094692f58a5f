"""What the operating system must know about a process that must not outlive its parent.

A launcher that is killed with SIGKILL cannot clean up. So the kernel is asked to do it (``prctl``), and every
descendant is in one process group that whoever survives can kill at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
MOST_DESCRIPTORS = 64
"""Of one message over a socket."""


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to send ``signum`` when ``parent`` ends; 0 takes it back. Leaves at once if it has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def kill_group(group: int) -> None:
    """End every process of a group, with all their descendants that have not left it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def kill_own_group() -> NoReturn:
    """End this process and everything it has started."""
    kill_group(os.getpgrp())
    os._exit(1)


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped (SIGSTOP) and can do nothing until it is woken."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def signal_name(signum: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def num_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
