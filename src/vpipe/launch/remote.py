"""The far end of an ssh connection: starts the ranks of one node and ends them when the connection ends.

    python -m vpipe.launch.remote        stdin:  one line of JSON (what to run), then nothing until the end
                                         stdout: one line of JSON (hello), then "[rank] line" of every rank

What is run comes by stdin, not as words of a command: no shell reads it and no list of processes shows it. The end of
stdin is the end of the run, however the near end went away: Ctrl-C, a crash, a pulled cable.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Protocol

from vpipe.launch.hosts import free_port
from vpipe.launch.process import die_with_parent, kill_group
from vpipe.network import interface_of

PATIENCE = 5.0
"""Seconds between the request to end and the end, where nobody is left who could grant more."""


@dataclass(frozen=True)
class Stop:
    """A request of the user's, through the connection: which signal, and the seconds that the ranks may take."""

    signal: int = signal.SIGTERM
    grace: float = PATIENCE

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def parse(cls, line: str) -> Stop:
        values = json.loads(line)
        return cls(int(values["signal"]), float(values["grace"]))


@dataclass(frozen=True)
class Order:
    """What a node is asked to run."""

    command: tuple[str, ...]
    directory: str
    environment: Mapping[str, str]
    """What all ranks of the node get."""
    ranks: Mapping[str, Mapping[str, str]]
    """Rank → what it alone gets."""

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def parse(cls, line: str) -> Order:
        values = json.loads(line)
        return cls(tuple(values["command"]), values["directory"], values["environment"], values["ranks"])


@dataclass(frozen=True)
class Hello:
    """What a node says of itself: the address by which it was reached, and a port that is free on it."""

    address: str
    port: int
    interface: str | None

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def parse(cls, line: str) -> Hello:
        values = json.loads(line)
        return cls(str(values["address"]), int(values["port"]), values["interface"])


def hello(environ: Mapping[str, str], address: str = "") -> Hello:
    """sshd tells which of this machine's addresses the other side has called: one that works, whatever names say. SLURM
    knows the address itself."""
    words = environ.get("SSH_CONNECTION", "").split()
    address = address or (words[2] if len(words) == 4 else "127.0.0.1")
    return Hello(address, free_port(address), interface_of(address))


class Lines(Protocol):
    """Where a node's lines go."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> None: ...


class NodeRanks:
    """The ranks of this node."""

    def __init__(self, order: Order, output: Lines) -> None:
        self._output = output
        self.asked = Stop()
        """How to end, once ``stopped`` is set."""
        self._lock = threading.Lock()
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._readers: list[threading.Thread] = []
        for rank, own in order.ranks.items():
            process = start(order.command, order.directory, {**os.environ, **order.environment, **own})
            reader = threading.Thread(target=self._copy, args=(rank, process), daemon=True)
            reader.start()
            self._processes[rank] = process
            self._readers.append(reader)

    def wait(self, stopped: threading.Event) -> int:
        """Until all have ended, one has failed or ``stopped``; then nobody is left. The first bad exit code; that of a
        terminated process where ranks were still at work, so that nobody takes a lost node for a finished one."""
        code = 0
        while not stopped.is_set():
            codes = {rank: process.poll() for rank, process in self._processes.items()}
            failed = [rank for rank, ended in codes.items() if ended]
            if failed:
                code = codes[failed[0]] or 0
                self._say(f"vpipe: rank {failed[0]} ended with {describe(code)}")
                break
            if all(ended is not None for ended in codes.values()):
                break
            time.sleep(0.05)
        else:
            unfinished = [rank for rank, process in self._processes.items() if process.poll() is None]
            self.end(self.asked)
            ended = [process.returncode for process in self._processes.values() if process.returncode]
            code = next(iter(ended), -signal.SIGTERM if unfinished else 0)
        self.end(Stop())
        return code if code >= 0 else 128 - code

    def end(self, stop: Stop) -> None:
        """Ask, wait, and insist; whoever a rank has started goes with it."""
        for process in self._processes.values():
            if process.poll() is None:
                os.killpg(process.pid, stop.signal)
        deadline = time.monotonic() + stop.grace
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            kill_group(process.pid)
            process.wait()
        for reader in self._readers:
            reader.join(1)

    def _copy(self, rank: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._say(f"[{rank}] {line.rstrip()}")

    def _say(self, line: str) -> None:
        with self._lock, suppress(BrokenPipeError, ValueError):
            self._output.write(line + "\n")
            self._output.flush()


def start(command: Sequence[str], directory: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """A rank, in a group of its own, that does not outlive this process."""
    return subprocess.Popen(
        command,
        cwd=directory,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )


def describe(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def main() -> int:
    """Say hello, read the order, run it until stdin ends."""
    sys.stdout.write(hello(os.environ).line())
    sys.stdout.flush()
    line = sys.stdin.readline()
    if not line:
        return 0
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    try:
        node = NodeRanks(Order.parse(line), sys.stdout)
    except OSError as error:
        sys.stdout.write(f"vpipe: cannot start the ranks: {error}\n")
        return 2

    def watch() -> None:
        told = sys.stdin.readline()
        if told:
            node.asked = Stop.parse(told)
        stopped.set()

    threading.Thread(target=watch, daemon=True).start()
    return node.wait(stopped)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the thread that reads stdin must not be waited for
