"""The far end of an elastic run on several machines: starts this machine's ranks, and ends them when nobody leads them.

    python -m vpipe.launch.elastic_node [ADDRESS]     stdin:  what to run, then orders       one line of JSON each
                                                      stdout: hello, then what happens

                 ┌─ streams, reports, control sockets ─┐
    launcher ═ssh═ node ── zygote ── ranks             │   what ranks say is passed on, what they are told too
                 └─ memory of all slots' copies ───────┘   those of this machine, and of its neighbour's ranks

**Lease.** The node sends its clock with every beat, and the launcher sends it back. What it sees of its own clock is
how old the launcher's last word is at most; a node whose launcher is silent for ``LEASE`` seconds ends its ranks. The
launcher, which takes the machine for lost, waits as long before it lets others go on: there are never two groups. In a
SLURM job the node then waits for SLURM's word about the launcher's node (``slurm_return``).
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from vpipe.launch.lines import JsonLines
from vpipe.launch.local import environment_of
from vpipe.launch.loop import Grace
from vpipe.launch.members import SHELVES, STOPPED_FOR, Member, MemberLaunch, make_shelves
from vpipe.launch.output import Output
from vpipe.launch.process import is_stopped
from vpipe.launch.remote import hello
from vpipe.launch.slurm_return import SAVED_WITHIN, LostJob
from vpipe.network import GLOO
from vpipe.remote_copies import Keeper
from vpipe.rundir.layout import LEFT, SAVED

LEASE = 6.0
"""Seconds that a machine's ranks go on without a word from the launcher."""
BEAT = 0.5
RESCUE = "vpipe.train.rescue:save_together"
LISTEN = "VPIPE_LISTEN_ON"
"""The address by which other machines reach this one; a rank opens the store there when its turn comes."""


class NodeLaunch(MemberLaunch):
    """The ranks of this machine."""

    def __init__(self, order: dict[str, Any], shelves: list[list[int]], address: str) -> None:
        super().__init__(0, Output(sys.stderr.buffer, sys.stderr.buffer, 0, None, True), Grace(lambda: 0.0))
        self._order, self._shelves, self._address = order, shelves, address
        self._shared = [fd for pair in shelves for fd in pair]
        self._members: dict[int, Member] = {}
        self._lease = monotonic() + LEASE
        self._beat_at = 0.0
        self._orders = JsonLines()
        self._is_over = self._is_abandoned = self._is_dismissed = False
        self._waiting: list[int] | None = []
        """Slots to be forked when the zygote can take descriptors; ``None`` from then on."""

    def _variables(self) -> dict[str, str]:
        return {**self._order["environment"], SHELVES: json.dumps(self._shelves), LISTEN: self._address}

    def run(self) -> int:
        """Until the launcher says that it is over, or is gone."""
        own = self._order["environment"]
        environment = environment_of(len(self._order["slots"]), self._order["threads"], own)
        if GLOO not in own:
            environment.pop(GLOO, None)  # the loopback interface leads to no other machine
        self.start(dict(self._order["spec"]), environment)
        os.set_blocking(0, False)
        self._selector.register(0, selectors.EVENT_READ, self._read_near)
        while not self._is_over and not self._broken:
            self._turn()
        if self._broken:
            self._say({"broken": self._broken, "code": self._code})
        elif self._order["launcher"] and not self._is_dismissed:
            self._signal(signal.SIGKILL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            LostJob.here(self._order["launcher"], os.environ).come_back(self._save)
        return 0

    def _save(self) -> bool:
        """Make a checkpoint of what this node and the others have; whether one of them has done so."""
        if not self._order["saves"]:
            return True
        arguments = self._order["spec"]["arguments"]
        if self._control.fileno() >= 0 and self._zygote is not None:
            self._tell_zygote({"rescue": RESCUE})
            self._control.close()
            with suppress(subprocess.TimeoutExpired):
                self._zygote.wait(SAVED_WITHIN)
        return Path(arguments["directory"], LEFT, arguments["run"], SAVED).exists()

    def _say(self, message: dict[str, Any]) -> None:
        try:
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()
        except OSError:
            self._abandoned()

    def _read_near(self, _: Any) -> bool:
        try:
            data = os.read(0, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(0)
            self._abandoned()
            return False
        for message in self._orders.feed(data):
            self._obey(message)
        return True

    def _abandoned(self) -> None:
        """The launcher is gone. Its lease lets the ranks end their update and save, where that is asked for."""
        if self._is_abandoned:
            return
        self._is_abandoned = True
        if self._order["saves"]:
            self._signal(signal.SIGTERM)
        else:
            self._is_over = True

    def _obey(self, message: dict[str, Any]) -> None:
        if "lease" in message:
            self._lease = max(self._lease, float(message["lease"]) + LEASE)
        elif "tell" in message:
            self._tell(int(message["tell"]), message["order"])
        elif "fork" in message and self._waiting is not None:
            self._waiting.append(int(message["fork"]))
        elif "fork" in message:
            self._fork(int(message["fork"]))
        elif "over" in message:
            self._is_over = self._is_dismissed = True
        else:
            self._tell_zygote(message)

    def _said(self, slot: int, message: dict[str, Any]) -> None:
        self._say({"slot": slot, "said": message})
        if self._is_abandoned and "finished" in message:
            self._tell(slot, {"leave": True})  # there is nobody else who could

    def _printed(self, rank: int, number: int, data: bytes) -> None:
        self._say({"slot": rank, "stream": number, "text": data.decode(errors="replace")})

    def _reported(self, rank: int, message: dict[str, Any]) -> None:
        self._say({"slot": rank, "report": message})

    def _heard(self, event: dict[str, Any]) -> None:
        if "started" in event:
            waiting, self._waiting = self._waiting or [], None
            for slot in waiting:
                self._fork(slot)
            return
        if "forked" in event:
            self._members[int(event["forked"])].pid = int(event["pid"])
        elif "ended" in event:
            slot = int(event["ended"])
            while self._read_report(slot):
                pass
            self._drop(slot)
            if not self._members and self._is_abandoned:
                self._is_over = True  # abandoned, and all have saved and left
        elif "failed" in event or "refused" in event:
            super()._heard(event)
            return
        self._say({"event": event})

    def _judge(self, now: float) -> None:
        if now >= self._beat_at:
            self._beat_at = self._judge_at = now + BEAT
            self._say({"beat": now})
        if now > self._lease:
            os.write(2, f"vpipe: no word from the launcher for {LEASE:g} s; this machine's ranks are ended\n".encode())
            self._is_over = True
        for slot, member in self._members.items():
            if now - member.seen > STOPPED_FOR and member.pid and is_stopped(member.pid):
                self._say({"slot": slot, "stopped": now - member.seen})
                member.seen = now


def main() -> int:
    """Say hello, with the port at which copies are kept; read what to run, and run it."""
    sys.stdout.write(hello(os.environ, *sys.argv[1:2]).line())
    sys.stdout.flush()
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        line = stdin.readline()  # byte by byte: the orders after it are not read ahead
    if not line:
        return 0
    order = json.loads(line)
    shelves = make_shelves(order["most"])
    foreign = set(range(order["most"])) - set(order["slots"])
    keeper = Keeper(order["address"], shelves, order["secret"], foreign)
    node = NodeLaunch(order, shelves, order["address"])
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: node._abandoned())
    node._say({"keeper": keeper.port})
    try:
        return node.run()
    except (subprocess.SubprocessError, OSError) as error:
        node._say({"broken": f"cannot start the ranks: {error}", "code": None})
        return 2
    finally:
        node.close()


if __name__ == "__main__":
    code = main()
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code)
