"""What a launcher asks the operating system: which cores there are, and how its processes are ended.

A launcher that is killed with SIGKILL cannot clean up. So the kernel is asked to do it (``process.die_with_parent``),
and every descendant is in one process group that any survivor can kill at once.
"""

from __future__ import annotations

import os
import resource
import signal
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from vpipe.errors import UserError

MOST_DESCRIPTORS = 64
"""Of one message over a socket."""


_MOST_FILES = 1 << 16


def files_for(num_ranks: int) -> int:
    """About how many open files the launcher of so many ranks, or one of them, has."""
    return 32 + 8 * num_ranks


def allow_files(num_ranks: int = 0) -> None:
    """Let this process and its children have as many open files as they may; refuse ranks that need more."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if most == resource.RLIM_INFINITY else min(most, _MOST_FILES)
    if limit == resource.RLIM_INFINITY:
        return
    if limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    if max(limit, wanted) < files_for(num_ranks):
        raise UserError(
            f"{num_ranks} ranks need up to {files_for(num_ranks)} open files in a process, but no more than {wanted} "
            "are allowed (ulimit -Hn); raise that limit, or take fewer ranks on this machine"
        )


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
