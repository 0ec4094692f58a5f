"""The connection to a node on another machine: a process such as ssh, whose pipes carry one message a line."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from vpipe.errors import UserError
from vpipe.launch import hosts, slurm_nodes, ssh
from vpipe.launch.events import JsonLines
from vpipe.launch.place import Connection
from vpipe.launch.ssh import SshLaunch

HELLO_SECONDS = 60.0
"""How long a node may take to say hello: ssh, a container, the start of Python."""
STARTERS: dict[str, Callable[[hosts.Node, SshLaunch], list[str]]] = {
    "ssh": ssh.command,
    "srun": slurm_nodes.command,
}
"""How a node is started → the command of one."""
REMEDIES = {
    "ssh": "'ssh {host} true' must work without a password, and vpipe must be installed there at the same path",
    "srun": "'srun -w {host} true' must work, and vpipe must be installed there at the same path",
    "ray": "vpipe must be installed there at the same path",
}


@dataclass
class HostLink:
    """One machine, and the connection to its node."""

    node: hosts.Node
    process: Connection
    address: str = ""
    """By which it was reached."""
    store: int = 0
    """The port at which ranks may meet there."""
    port: int = 0
    """One that is free."""
    interface: str | None = None
    keeper: int = 0
    """The port at which it keeps copies of others."""
    seen: float = 0.0
    longest: float = 0.0
    leased: float = 0.0
    """When it was last given its lease."""
    lives: bool = True
    leaving: bool = False
    """It is given back, as soon as none of its ranks is needed any more."""
    living: set[int] = field(default_factory=set)
    """The slots that have a process."""
    unread: JsonLines = field(default_factory=JsonLines)
    remark: str = ""
    """Its last words that are no message: ssh's own, or a shell's."""

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def messages(self) -> list[list[Any]] | None:
        """What has come; ``None`` at the end. A shell may have written something before the first one."""
        assert self.process.stdout is not None
        try:
            data = os.read(self.process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return []
        if not data:
            self.remark = self.unread.last().strip() or self.remark
            return None
        found = []
        for line in self.unread.split(data):
            remark, mark, message = line.partition(b'{"vpipe": ')
            self.remark = remark.decode(errors="replace").strip() or self.remark
            if mark:
                found.append(json.loads(mark + message)["vpipe"])
            elif self.address and self.remark:
                found.append(["noted", f"{self.node.host}: {self.remark}"])
        return found

    def greet(self, deadline: float, through: str) -> None:
        """Wait until it has said hello."""
        assert self.process.stdout is not None
        while not self.address:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - monotonic()))
            messages = self.messages() if ready else None
            if messages is None:
                remark = self.remark or self.unread.last().strip()
                within = "" if ready else f"no answer within {HELLO_SECONDS:.0f} s"
                said = "; ".join(filter(None, (within, remark))) or "it ended without a word"
                host = self.node.host
                remedy = REMEDIES[through].format(host=host)
                raise UserError(f"{host} could not be started by {through}: {said}; {remedy}")
            for message in messages[:1]:
                _, self.address, self.store, self.port, self.interface = message


def connected(launch: SshLaunch) -> list[HostLink]:
    """One ssh or srun per machine."""
    found = []
    for node in hosts.nodes(launch.machines):
        words = STARTERS[launch.through](node, launch)
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
            )
        except FileNotFoundError:
            raise UserError(f"{launch.through} is not on this machine, and launch.machines needs it") from None
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        found.append(HostLink(node, process))
    return found
