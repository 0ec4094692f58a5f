"""VPipe's ``machines``: one ssh per node, one rank per entry, everything ends together.

    this machine ── ssh node0 ──▶ vpipe.launch.remote ──▶ rank 0, rank 2
                 └─ ssh node1 ──▶ vpipe.launch.remote ──▶ rank 1

The ssh command is a list of words that starts a fixed program on the far side; what that program runs is sent through
the connection. Each node says hello with the address by which it was reached, so ranks meet at an address that works.
Kept in the run directory, as VPipe does: ``command_history.log``, ``machinefile`` and ``output.log.<node>``.
"""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from vpipe.config import PipelineConfig
from vpipe.errors import UserError
from vpipe.launch import valid
from vpipe.launch.container import NONE, PYTHON, Container, wrap
from vpipe.launch.environment import SECRET, carried, interface_variables
from vpipe.launch.hosts import Node, all_local, machinefile, meeting_point, nodes
from vpipe.launch.process import signal_name
from vpipe.launch.remote import PATIENCE, Hello, Order, Stop
from vpipe.rundir.journal import Beat

OPTIONS = {"BatchMode": "yes", "ConnectTimeout": "10", "ServerAliveInterval": "5", "ServerAliveCountMax": "3"}
"""No password prompts that nobody sees; a host that is gone is noticed."""

HELLO_SECONDS = 60.0
"""How long a node may take to say hello: ssh, a container, the start of Python."""

Show = Callable[[str], None]


@dataclass(frozen=True)
class SshLaunch:
    """What to run where."""

    machines: tuple[str, ...]
    command: tuple[str, ...]
    """The command of one rank, as words after the Python program: ``("-m", "vpipe", "train", ...)``."""
    directory: str
    """Working directory, the same on every node."""
    run_directory: Path
    python: str = sys.executable
    container: Container = NONE
    interface: str | None = None
    port: int = 0
    threads: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    """More variables for every rank; they go through the connection."""
    through: str = "ssh"
    """How an elastic run starts its nodes: ``ssh`` or ``srun``."""
    grace: float | None = None
    """Seconds from a request to stop to the end of patience; by default what an update and a save take, as measured."""

    def patience(self) -> float:
        return self.grace or Beat.patience(self.run_directory)

    def __post_init__(self) -> None:
        valid.path(self.directory, "the working directory")
        valid.path(self.python, "the Python program")
        for word in self.command:
            valid.argument(word, "an argument of the ranks")
        if self.interface is not None:
            valid.option(self.interface, "launch.interface")


def from_config(
    config: PipelineConfig, arguments: Sequence[str], run_directory: Path, environment: Mapping[str, str] | None = None
) -> SshLaunch | None:
    """The launch of a config whose ``machines`` are not all this one; ``arguments`` are those of ``vpipe train``.

    Every rank runs the same command with the same run directory, and finds out who it is from its environment.
    """
    section = config.launch
    if not section.machines or all_local(section.machines):
        return None
    container = Container.from_config(section.container, gpus=config.parallel.backend == "nccl")
    return SshLaunch(
        machines=section.machines,
        command=("-m", "vpipe", "train", *arguments, "--output-dir", str(run_directory)),
        directory=str(Path.cwd()),
        run_directory=run_directory,
        python=sys.executable if container.kind == "none" else PYTHON,
        container=container,
        interface=section.interface,
        port=section.master_port,
        threads=section.threads,
        environment=dict(environment or {}),
        through=section.through,
        grace=section.grace,
    )


def command(node: Node, launch: SshLaunch, module: str = "vpipe.launch.remote") -> list[str]:
    """The ssh command of one node. The far side's shell reads one string, so every word of it is quoted."""
    remote = wrap(launch.container, [launch.python, "-m", module], launch.directory, carried(os.environ))
    line = f"cd {shlex.quote(launch.directory)} && exec {shlex.join(remote)}"
    options = [word for name, value in OPTIONS.items() for word in ("-o", f"{name}={value}")]
    config = os.environ.get("VPIPE_SSH_CONFIG")
    file = ["-F", valid.path(config, "VPIPE_SSH_CONFIG")] if config else []
    return ["ssh", *file, *options, "-T", "--", valid.host(node.host), line]


def order(node: Node, launch: SshLaunch, meeting: str, port: int, hello: Hello) -> Order:
    """What a node is asked to run: the ranks' variables in torch's words."""
    common = (
        carried(os.environ)
        | dict(launch.environment)
        | {
            "WORLD_SIZE": str(len(launch.machines)),
            "LOCAL_WORLD_SIZE": str(len(node.ranks)),
            "GROUP_RANK": str(node.index),
            "MASTER_ADDR": meeting,
            "MASTER_PORT": str(port),
            **node.variables,
            "PYTHONUNBUFFERED": "1",
        }
    )
    common = interface_variables(launch.interface or hello.interface) | common
    if launch.threads:
        common["OMP_NUM_THREADS"] = str(launch.threads)
    ranks = {str(rank): {"RANK": str(rank), "LOCAL_RANK": str(local)} for local, rank in enumerate(node.ranks)}
    return Order((launch.python, *launch.command), launch.directory, common, ranks)


def run(launch: SshLaunch, show: Show) -> int:
    """Run all ranks to their end; the first bad exit code. ``show`` gets every line, tagged with its node."""
    show = _one_at_a_time(show)
    launch = replace(launch, environment={SECRET: secrets.token_hex(32), **launch.environment})
    here = nodes(launch.machines)
    commands = [command(node, launch) for node in here]
    launch.run_directory.mkdir(parents=True, exist_ok=True)
    with (launch.run_directory / "command_history.log").open("a") as history:
        history.writelines(f"{shlex.join(each)}\n" for each in commands)
    (launch.run_directory / "machinefile").write_text(machinefile(launch.machines))
    with _connections(here, commands, launch.run_directory, show) as connections:
        deadline = time.monotonic() + HELLO_SECONDS
        hellos = [connection.hello(deadline) for connection in connections]
        meeting = meeting_point([hello.address for hello in hellos])
        port = launch.port or hellos[0].port
        for node, connection, hello in zip(here, connections, hellos, strict=True):
            connection.send(order(node, launch, meeting, port, hello))
        with _hearing() as heard:
            return _first_bad(connections, show, heard, launch)


def _one_at_a_time(show: Show) -> Show:
    """Machines are read by threads of their own, and ``print`` writes a line and its end one after the other."""
    turn = threading.Lock()

    def shown(line: str) -> None:
        with turn:
            show(line)

    return shown


class Connection:
    """One node: its ssh process, and what it says."""

    def __init__(self, node: Node, words: Sequence[str], log: Path, show: Show) -> None:
        self.node = node
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,  # Ctrl-C is for the launcher, which then ends all nodes in order
        )
        self._hello: Hello | None = None
        self._greeted = threading.Event()
        self._heard: list[str] = []
        self._reader = threading.Thread(target=self._read, args=(log, show), daemon=True)
        self._reader.start()

    def hello(self, deadline: float) -> Hello:
        """The node's first words; one sentence where it has none."""
        self._greeted.wait(max(0.0, deadline - time.monotonic()))
        if self._hello is None:
            said = " ".join(" ".join(self._heard[-3:]).split()) or f"no answer within {HELLO_SECONDS:.0f} s"
            raise UserError(
                f"{self.node.host} could not be started by ssh: {said}; 'ssh {self.node.host} true' must work without "
                "a password, and vpipe must be installed there at the same path"
            )
        return self._hello

    def send(self, order: Order | Stop) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(order.line())
            self.process.stdin.flush()

    def close(self) -> None:
        """The end of stdin ends the far side; ssh is killed only where that takes too long."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(PATIENCE + 2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(2)

    def _read(self, log: Path, show: Show) -> None:
        assert self.process.stdout is not None
        with log.open("a") as file:
            for line in self.process.stdout:
                if self._hello is None:
                    with suppress(ValueError, KeyError, TypeError):
                        self._hello = Hello.parse(line)
                        self._greeted.set()
                        continue
                    self._heard.append(line)
                file.write(line)
                file.flush()
                show(f"{self.node.host}: {line.rstrip()}")
        self._greeted.set()


@contextmanager
def _connections(
    here: Sequence[Node], commands: Sequence[Sequence[str]], folder: Path, show: Show
) -> Iterator[list[Connection]]:
    """Connections to all nodes, which end together."""
    opened: list[Connection] = []
    try:
        for node, words in zip(here, commands, strict=True):
            opened.append(Connection(node, words, folder / f"output.log.{node.index}", show))
        yield opened
    except FileNotFoundError as error:
        raise UserError(
            f"{error.filename} is not on this machine; install openssh-client to use launch.machines"
        ) from None
    finally:
        closers = [threading.Thread(target=connection.close) for connection in opened]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()


LOST = 255
"""ssh's own exit code: not the far side's command has ended, but the connection."""


@contextmanager
def _hearing() -> Iterator[list[int]]:
    """The requests to stop that this process hears; in a thread, where Python cannot hear any, none."""
    heard: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield heard
        return
    heeded = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: heard.append(number)) for number in heeded}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(connections: Sequence[Connection], number: int, launch: SshLaunch, show: Show) -> float:
    """Pass a request to stop on to all nodes; when patience ends."""
    grace = launch.patience()
    again = "; Ctrl-C again ends them at once" if number == signal.SIGINT else ""
    show(f"vpipe: stopping {len(launch.machines)} ranks, at most {grace:.3g} s{again}")
    for connection in connections:
        connection.send(Stop(number, grace))
    return time.monotonic() + grace + PATIENCE


def _first_bad(connections: Sequence[Connection], show: Show, heard: Sequence[int], launch: SshLaunch) -> int:
    """Wait for all; the first bad exit code, and which machine it came from. A request to stop goes to every node, and
    all are waited for; a second one ends them at once."""
    until = float("inf")
    while True:
        if heard and until == float("inf"):
            until = _stop(connections, heard[0], launch, show)
        codes = [connection.process.poll() for connection in connections]
        place, bad = next(((place, code) for place, code in enumerate(codes) if code), (0, None))
        if heard:
            if len(heard) > 1 or time.monotonic() > until:
                return 128 + heard[0]
            if bad is not None and None not in codes:
                return bad if bad > 0 else 128 - bad
        elif bad is not None:
            host = connections[place].node.host
            if bad == LOST:
                show(f"vpipe: the connection to {host} is lost; the other machines' ranks are ended")
            elif bad < 0:
                show(f"vpipe: ssh to {host} was ended by {signal_name(-bad)}; the other machines' ranks are ended")
            else:
                show(f"vpipe: {host} ended with exit code {bad}; the other machines' ranks are ended")
            return bad if bad > 0 else 128 - bad
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)
