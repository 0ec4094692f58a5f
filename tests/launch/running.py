"""What the tests of launching share: a launch under way, its clock, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

import psutil

import forked_python

HERE = Path(__file__).parent
FAILING = str(HERE / "failing.py")
HANG = 150.0
"""Seconds that mean a hang on any machine, however busy; on an idle one a failure takes two or three."""


class Running:
    """A command whose descendants carry a mark in their environment, so that none can hide; forks carry it as their
    name, because the kernel shows the variables of the process that forks them."""

    def __init__(self, folder: Path, *command: str) -> None:
        self._mark = uuid.uuid4().hex
        self._folder = folder
        self._command = command
        self.started = time.time()
        self.process = subprocess.Popen(
            command,
            stdout=(folder / "out.txt").open("wb"),
            stderr=(folder / "err.txt").open("wb"),
            stdin=subprocess.DEVNULL,
            env=_environment() | {forked_python.MARK: self._mark, "FAILED_AT": str(folder / "failed_at")},
        )

    @property
    def out(self) -> str:
        return (self._folder / "out.txt").read_text()

    @property
    def err(self) -> str:
        return (self._folder / "err.txt").read_text()

    def until(self, words: str, timeout: float = HANG) -> None:
        """Wait until the command has said ``words``."""
        end = time.monotonic() + timeout
        while words not in self.out + self.err:
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.out}{self.err}"
            assert time.monotonic() < end, f"{words!r} never came:\n{self.out}{self.err}"
            time.sleep(0.05)

    def wait(self, timeout: float = HANG) -> int:
        """The exit code; seconds from the failure to the end are kept in ``took``."""
        code = self.process.wait(timeout)
        failed_at = self._folder / "failed_at"
        self.took = time.time() - (float(failed_at.read_text()) if failed_at.exists() else self.started)
        print(f"{' '.join(map(str, self._command[3:]))}: ended after {self.took:.1f} s")
        return code

    def processes(self) -> list[psutil.Process]:
        """Every living process that descends from the command."""
        found = []
        for process in psutil.process_iter():
            try:
                if self._is_ours(process) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def _is_ours(self, process: psutil.Process) -> bool:
        name = Path(f"/proc/{process.pid}/comm").read_text().strip()
        return name == self._mark[:15] or process.environ().get(forked_python.MARK) == self._mark

    def assert_clean(self, timeout: float = HANG) -> None:
        """Nothing is left; a killed process may take a moment to go."""
        end = time.monotonic() + timeout
        while left := self.processes():
            assert time.monotonic() < end, f"left behind: {left}"
            time.sleep(0.05)

    def kill_all(self) -> None:
        for process in self.processes():
            process.kill()
        self.process.wait(200)


class BareRanks:
    """Three ranks that nobody looks after, as often as one likes; see ``bare_ranks.py``."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [forked_python.program(), str(HERE / "bare_ranks.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            text=True,
        )

    def run(self, folder: Path, *words: str) -> tuple[list[int], str]:
        """Run a script to the end of all ranks, which leave nothing behind: their exit codes, and what they said."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self._say({"num_ranks": 3, "folder": str(folder), "words": words, "environment": meeting})
        group = self._hear("group")
        try:
            codes = self._hear("codes")
        finally:
            left = _kill(group)
        assert not left, f"process group {group} was left behind"
        return codes, (folder / "all.txt").read_text()

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(200)

    def _say(self, order: dict[str, Any]) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()

    def _hear(self, key: str) -> Any:
        assert self._server.stdout is not None
        return json.loads(self._server.stdout.readline())[key]


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(("VPIPE_", "OMP_"))}


def _kill(group: int) -> bool:
    """Whether there was anything to kill."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def vpipe_run(
    folder: Path, num_ranks: int, *target: str, options: tuple[str, ...] = (), python: str | None = None
) -> Running:
    """``vpipe run --nproc N target``, by default forked."""
    python = python or forked_python.program()
    return Running(folder, python, "-m", "vpipe", "run", "--nproc", str(num_ranks), *options, *target)
