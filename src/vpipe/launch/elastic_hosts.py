"""An elastic run on several machines: one ssh (or srun) per machine, and a machine may be lost like a rank.

    launcher ═ssh═ node a ── slots 0, 2        a rank is lost:     its node forks another one in its place
             ═ssh═ node b ── slots 1, 3        a machine is lost:  a spare slot elsewhere, or fewer ranks go on

``crew`` and ``ElasticLaunch`` decide as on one machine. What is new is here: where a slot is, when a machine is taken
for lost, and how long the others wait until it surely writes nothing any more (``elastic_node``: the lease).
"""

from __future__ import annotations

import json
import os
import secrets
import select
import selectors
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from vpipe.errors import UserError
from vpipe.launch import hosts, slurm_nodes, ssh
from vpipe.launch.elastic import Elastic, ElasticLaunch
from vpipe.launch.elastic_node import LEASE
from vpipe.launch.environment import SECRET, carried, interface_variables
from vpipe.launch.lines import JsonLines
from vpipe.launch.loop import Grace
from vpipe.launch.members import Member
from vpipe.launch.output import Output
from vpipe.launch.process import signal_name
from vpipe.launch.remote import Hello
from vpipe.launch.ssh import SshLaunch
from vpipe.rundir.journal import Ending

SILENT = 2.0
"""Seconds without a sign after which a machine is taken for lost; more where it has been late before."""
SURELY = 0.5
"""Seconds beyond the lease, until the others go on."""
END_WITHIN = 5.0
NODE = "vpipe.launch.elastic_node"
STARTERS: dict[str, Callable[[hosts.Node, SshLaunch, str], list[str]]] = {
    "ssh": ssh.command,
    "srun": slurm_nodes.command,
}
"""How a node is started → the command of one."""


@dataclass
class HostLink:
    """The connection to one machine."""

    node: hosts.Node
    process: subprocess.Popen[bytes]
    hello: Hello | None = None
    keeper: int = 0
    """The port at which it keeps copies of others."""
    seen: float = 0.0
    longest: float = 0.0
    leased: float = 0.0
    """When it was last given its lease."""
    lives: bool = True
    leaving: bool = False
    """It is given back, as soon as none of its ranks is needed any more."""
    unread: JsonLines = field(default_factory=JsonLines)
    said: str = ""
    """Its last words that are no message: ssh's own."""

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def lines(self) -> list[dict[str, Any]] | None:
        """The messages that have come; ``None`` at the end."""
        assert self.process.stdout is not None
        try:
            data = os.read(self.process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return []
        if not data:
            return None
        found = []
        for line in self.unread.split(data):
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if isinstance(message, dict):
                found.append(message)
            else:
                self.said = line.decode(errors="replace").strip() or self.said
        return found


class FarLaunch(ElasticLaunch):
    """A run whose ranks, and their machines, come and go."""

    keeps_copies = False

    def __init__(self, num_ranks: int, output: Output, grace: Grace, elastic: Elastic, launch: SshLaunch) -> None:
        super().__init__(num_ranks, output, grace, elastic)
        self._launch = launch
        self._links: list[HostLink] = []
        self._ports: dict[int, int] = {}
        self._fence = 0.0
        """Before this moment a machine that is lost may still write."""
        self._control, self._nobody = socket.socketpair()

    def start(self, spec: dict[str, Any], environment: dict[str, str], port: int = 0) -> None:
        del environment, port
        launch = self._launch
        launch.run_directory.mkdir(parents=True, exist_ok=True)
        for node in hosts.nodes(launch.machines):
            words = STARTERS[launch.through](node, launch, NODE)
            try:
                process = subprocess.Popen(
                    words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
                )
            except FileNotFoundError:
                raise UserError(f"{launch.through} is not on this machine, and launch.machines needs it") from None
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            self._links.append(HostLink(node, process))
        deadline = monotonic() + ssh.HELLO_SECONDS
        for link in self._links:
            self._greet(link, deadline)
        hosts.meeting_point([link.hello.address for link in self._links if link.hello])
        secret = secrets.token_hex(32)
        for link in self._links:
            link.send(self._order(link, spec, secret))
            link.seen = link.leased = monotonic()
            assert link.process.stdout is not None
            self._selector.register(link.process.stdout, selectors.EVENT_READ, lambda _, link=link: self._read(link))
        for slot in range(self._num_ranks):
            self._fork(slot)

    def _greet(self, link: HostLink, deadline: float) -> None:
        assert link.process.stdout is not None
        while link.hello is None:
            ready, _, _ = select.select([link.process.stdout], [], [], max(0.0, deadline - monotonic()))
            messages = link.lines() if ready else None
            if messages is None:
                said = link.said or f"no answer within {ssh.HELLO_SECONDS:.0f} s"
                through, host = self._launch.through, link.node.host
                call = "ssh" if through == "ssh" else "srun -w"
                raise UserError(
                    f"{host} could not be started by {through}: {said}; '{call} {host} true' must work without a "
                    "password, and vpipe must be installed there at the same path"
                )
            for message in messages[:1]:
                link.hello = Hello(str(message["address"]), int(message["port"]), message["interface"])

    def _order(self, link: HostLink, spec: Mapping[str, Any], secret: str) -> dict[str, Any]:
        launch = self._launch
        assert link.hello is not None
        variables = interface_variables(launch.interface or link.hello.interface) | carried(os.environ)
        variables |= dict(launch.environment) | link.node.variables | {SECRET: secret, "PYTHONUNBUFFERED": "1"}
        return {
            "spec": {**spec, "rescue": "", "check": None},
            "environment": variables,
            "slots": list(link.node.ranks),
            "most": self._elastic.most,
            "threads": launch.threads,
            "secret": secret,
            "address": link.hello.address,
            "saves": bool(self._elastic.rescue),
            "launcher": self._links[0].node.host if launch.through == "srun" else "",
        }

    # --- what the machines say ----------------------------------------------------------------------------------------

    def _read(self, link: HostLink) -> bool:
        messages = link.lines()
        if messages is None:
            self._unregister(link)
            return False
        if not messages:
            return False
        now = monotonic()
        link.longest, link.seen = max(link.longest, now - link.seen), now
        for message in messages:
            self._hear(link, message)
        return True

    def _hear(self, link: HostLink, message: dict[str, Any]) -> None:
        slot = int(message.get("slot", -1))
        if not link.lives:
            return
        if "beat" in message:
            link.leased = monotonic()
            link.send({"lease": message["beat"]})
        elif "keeper" in message:
            link.keeper = int(message["keeper"])
        elif "event" in message:
            self._heard(message["event"])
        elif "said" in message and slot in self._members:
            self._members[slot].give_sign()
            self._said(slot, message["said"])
        elif "text" in message:
            self._printed(slot, int(message["stream"]), message["text"].encode())
        elif "report" in message:
            self._reported(slot, message["report"])
        elif "stopped" in message:
            self._end_silent(slot, f"is stopped for {message['stopped']:.1f} s")
        elif "broken" in message:
            self._broken, self._code = f"{link.node.host}: {message['broken']}", message.get("code")

    def _read_report(self, rank: int) -> bool:
        return False  # a node has passed all of them on before it tells of an end

    def _said(self, slot: int, message: dict[str, Any]) -> None:
        if "port" in message:
            self._ports[slot] = int(message["port"])
        super()._said(slot, message)

    # --- what they are told -------------------------------------------------------------------------------------------

    def _link(self, slot: int) -> HostLink:
        return next(link for link in self._links if slot in link.node.ranks)

    def _fork(self, slot: int) -> None:
        self._members[slot] = Member(None)
        self._crew.started(slot)
        self._count()
        self._link(slot).send({"fork": slot})

    def _tell(self, slot: int, order: dict[str, Any]) -> None:
        self._link(slot).send({"tell": slot, "order": order})

    def _tell_zygote(self, order: dict[str, Any], fds: Any = ()) -> None:
        if "kill" in order:
            self._link(int(order["kill"])).send(order)
        elif "rescue" not in order:
            for link in self._links:
                link.send(order)

    def _can_fork(self) -> bool:
        return True  # a node keeps orders until its zygote takes them

    def _free_slots(self) -> list[int]:
        return [slot for slot in super()._free_slots() if self._link(slot) in self._staying()]

    def _staying(self) -> list[HostLink]:
        return [link for link in self._links if link.lives and not link.leaving]

    def _seats(self, slots: list[int]) -> dict[int, dict[str, Any]]:
        """Where the ranks meet, and to which other machine each sends its copies."""
        first = self._link(slots[0])
        assert first.hello is not None
        meet = [first.hello.address, self._ports[slots[0]]]
        living = self._staying()
        found = {}
        for slot in slots:
            link = self._link(slot)
            mates = [other for other in slots if other in link.node.ranks]
            other = living[(living.index(link) + 1) % len(living)]
            assert other.hello is not None
            found[slot] = {
                "meet": meet,
                "local_rank": mates.index(slot),
                "local_size": len(mates),
                "group_rank": link.node.index,
                "guest": [other.hello.address, other.keeper] if other is not link else None,
            }
        return found

    # --- who is lost --------------------------------------------------------------------------------------------------

    def _seems_stopped(self, member: Member) -> bool:
        return False  # its node looks, and tells

    def _how(self, slot: int, status: int) -> str:
        link = self._link(slot)
        return super()._how(slot, status) if link.lives else f"is lost with {link.node.host}"

    def _judge(self, now: float) -> None:
        for link in self._links:
            code = link.process.poll()
            if not link.lives or self._verdict.all_ended:
                continue
            if link.leaving and not any(slot in self._members for slot in link.node.ranks):
                self._let_go(link, code)
            elif code is not None:
                how = f"{self._launch.through} ended by {signal_name(-code)}"
                self._lose(link, how if code < 0 else "the connection is lost")
            elif now - link.seen > max(SILENT, 3 * link.longest):
                self._lose(link, f"no sign for {now - link.seen:.1f} s")
        super()._judge(now)
        self._begin_if_all_are_ready()

    def _lose(self, link: HostLink, how: str) -> None:
        """A machine is gone, or cannot be reached: it will have ended its ranks when its lease is over."""
        link.lives = False
        self._fence = max(self._fence, link.leased + LEASE + SURELY)
        self._output.say(f"vpipe: {link.node.host} is lost: {how}")
        self._unregister(link)
        link.process.kill()
        for slot in link.node.ranks:
            if slot in self._members:
                self._ended(slot, -9)

    # --- who is given back --------------------------------------------------------------------------------------------

    def _give_back(self, machines: Sequence[str]) -> None:
        """The ranks of these machines go to spare places, or the others go on without them."""
        staying = [link for link in self._staying() if link.node.host not in machines]
        going = [link for link in self._staying() if link not in staying]
        places = sum(len(link.node.ranks) for link in staying) // self._crew.by * self._crew.by
        if not going or places < self._crew.least or (self._launch.through == "srun" and self._links[0] in going):
            self._output.say(
                f"vpipe: {', '.join(machines)} cannot be given back: the run needs {self._crew.least} places"
                + (f" and {self._links[0].node.host}, where its launcher is" if self._launch.through == "srun" else "")
                + f", and would have {places} on {', '.join(link.node.host for link in staying) or 'no machine'}"
            )
            return
        for link in going:
            link.leaving = True
            self._crew.unwelcome.update(link.node.ranks)
        self._crew.wanted = min(self._crew.wanted, places)
        self._fill()
        if self._crew.unwelcome & self._members.keys():
            self._interrupt(f"{', '.join(link.node.host for link in going)} is given back")
        self._begin_if_all_are_ready()

    def _let_go(self, link: HostLink, code: int | None) -> None:
        """None of its ranks is left: its node ends, and then it is nobody's."""
        link.send({"over": True})
        if code is None:
            return
        link.lives = False
        self._unregister(link)
        self._output.say(f"vpipe: {link.node.host} is given back")
        if self._launch.through == "srun":
            slurm_nodes.shrink([each.node.host for each in self._staying()], self._launch.run_directory)

    def _begin_if_all_are_ready(self) -> None:
        if monotonic() >= self._fence:
            super()._begin_if_all_are_ready()

    def _unregister(self, link: HostLink) -> None:
        assert link.process.stdout is not None
        with suppress(KeyError, ValueError):
            self._selector.unregister(link.process.stdout)

    def close(self) -> None:
        for link in self._links:
            link.send({"over": True})
            assert link.process.stdin is not None
            with suppress(OSError):
                link.process.stdin.close()
        for link in self._links:
            try:
                link.process.wait(END_WITHIN if link.lives else 0)
            except subprocess.TimeoutExpired:
                link.process.kill()
                link.process.wait()
            assert link.process.stdout is not None
            self._unregister(link)
            link.process.stdout.close()
        super().close()
        self._control.close()
        self._nobody.close()


def run(
    launch: SshLaunch,
    num_ranks: int,
    elastic: Elastic,
    spec: Mapping[str, Any],
    grace: Grace | float,
    concluded: Callable[[Ending], str],
    log_dir: Any,
) -> int:
    """Run ``num_ranks`` ranks on the machines of ``launch`` to their end; the exit code. ``spec`` is what the zygote of
    every machine gets: target, arguments, preload."""
    output = Output(sys.stdout.buffer, sys.stderr.buffer, elastic.most, log_dir, False)
    with ExitStack() as stack:
        stack.callback(output.close)
        patience = grace if isinstance(grace, Grace) else Grace(lambda: grace)
        leading = FarLaunch(num_ranks, output, patience, elastic, launch)
        stack.callback(leading.close)
        leading.start(dict(spec), {})
        stack.enter_context(leading.catching_signals())
        code = leading.loop()
        if leading.ending is not None and (said := concluded(leading.ending)):
            output.say(f"vpipe: {said}")
        return code
