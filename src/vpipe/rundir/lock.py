"""One writer per directory. The file ``lock`` is held by the kernel for the process that opened it, and let go however
that process ends; what is written in it is only for the sentence that the second one reads."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from time import time

from vpipe.errors import UserError
from vpipe.process import Process
from vpipe.rundir import writing
from vpipe.rundir.layout import LOCK, STATE
from vpipe.rundir.state import SILENT_AFTER, Beat

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class Lock:
    """The right to write into a directory, until ``release`` or the end of this process."""

    def __init__(self, directory: Path, run: str, command: str) -> None:
        self._path = directory / LOCK
        self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take(directory)
        except BaseException:
            os.close(self._handle)
            raise
        me = {"run": run, "command": command, "since": time(), **Process.here().fields()}
        writing.write(self._path, json.dumps(me).encode() + b"\n", durable=False)

    def _take(self, directory: Path) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{directory} is being written by {_holder(self._path)}; wait until it has ended, or choose another "
                "directory"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _ask_the_heartbeat(directory)

    def release(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _holder(path: Path) -> str:
    """Who holds the lock, as it says itself."""
    found = writing.read(path) or {}
    process = Process.parse(found)
    if process is None:
        return "another process"
    since = found.get("since")
    began = datetime.fromtimestamp(since if isinstance(since, int | float) else 0, UTC)
    return f"run {found.get('run')} ({process} since {began:%Y-%m-%d %H:%M:%S} UTC: {found.get('command')})"


def _ask_the_heartbeat(directory: Path) -> None:
    """Where the file system knows no locks (some cluster ones), a fresh heartbeat of a living process must do."""
    beat = Beat.read(directory)
    if beat is not None and beat.writer.alive is not False and beat.silence <= SILENT_AFTER:
        raise UserError(
            f"{directory / STATE} was written {beat.silence:.0f} s ago by run {beat.run} ({beat.writer}); wait until "
            "it has ended, or choose another directory"
        )
