"""The far end of a run on other machines: starts this machine's ranks, and ends them when nothing leads them any more.

    python -m vpipe.launch.node [ADDRESS]     stdin:  what to run, then orders        a line of JSON each
                                              stdout: hello, then what happens

                 ┌─ streams, reports, control sockets ─┐
    launcher ═ssh═ node ── zygote ── ranks             │   what ranks say is passed on, what they are told too
                 └─ memory of all slots' copies ───────┘   those of this machine, and of its neighbour's ranks

What is run comes by stdin, not as words of a command: no shell reads it and no list of processes shows it. The end of
stdin is the end of the run, however the near end went away: a crash, a pulled cable.

**Lease** of an elastic run. The node sends its clock with every beat, and the launcher sends it back. What it sees of
its own clock is how old the launcher's last word is at most; a node whose launcher is silent for ``LEASE`` seconds ends
its ranks. The launcher, which takes the machine for lost, waits as long before it lets others go on: there are never
two groups. In a SLURM job the node then waits for SLURM's word about the launcher's node (``slurm_return``).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any

from vpipe.door import SECRET
from vpipe.launch.events import EventLoop, JsonLines
from vpipe.launch.hosts import free_port
from vpipe.launch.local_place import LocalPlace, make_shelves
from vpipe.launch.slurm_return import SAVED_WITHIN, LostJob
from vpipe.launch.zygote_start import settings
from vpipe.network import family_of, interface_of
from vpipe.remote_copies import Keeper
from vpipe.rundir.layout import LEFT, SAVED

LEASE = 6.0
"""Seconds that a machine's ranks go on without a word from the launcher."""
BEAT = 0.5
RESCUE = "vpipe.train.rescue:save_together"


class FarEnd:
    """The leader of this machine's ranks, who passes on what they say and are told."""

    def __init__(self, address: str) -> None:
        self._store, self._copies = (
            socket.create_server((address, 0), family=family_of(address), backlog=1024) for _ in range(2)
        )
        """Where the ranks of all machines meet if one of this machine is the first."""
        self._say("hello", address, self._store.getsockname()[1], free_port(address), interface_of(address))
        self._events = EventLoop()
        self._orders = JsonLines()
        self._living: set[int] = set()
        self._lease, self._beat_at = monotonic() + LEASE, 0.0
        self._is_over = self._is_abandoned = self._is_dismissed = self._is_to_save = False
        self._is_broken = self._has_begun = False

    def take(self, order: dict[str, Any]) -> None:
        """Make ready to start what the launcher has ordered."""
        self._order, self._elastic = order, order["elastic"]
        environment = settings(order["num_ranks"], order["threads"]) | order["environment"]
        variables, shelves = dict(order["environment"]), []
        if self._elastic:
            shelves = make_shelves(self._elastic["most"])
            foreign = set(range(self._elastic["most"])) - set(order["slots"])
            keeper = Keeper(self._copies, shelves, environment[SECRET], foreign)
            self._say("keeper", keeper.port)
        self._place = LocalPlace(
            self._events,
            self,
            environment,
            leads=bool(self._elastic),
            shelves=shelves,
            saver=RESCUE,
            listeners=[self._store],
        )
        self._place.start({**order["spec"], "environment": variables})

    def run(self) -> int:
        """Until the launcher says that it is over, or is gone."""
        self._events.watch(0, self._read_orders)
        while not self._is_over and not self._is_broken:
            self._events.turn(self._beat_at - monotonic())
            self._place.look(monotonic())
            self._keep_lease(monotonic())
        self._place.drain()
        if self._is_to_save or (self._is_broken and self._elastic and self._has_begun):
            self._save()
        elif self._elastic and self._elastic["launcher"] and not self._is_dismissed:
            self._place.signal(signal.SIGKILL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            LostJob.here(self._elastic["launcher"], os.environ).come_back(self._save)
        return 0

    def _save(self) -> bool:
        """Make a checkpoint of what this node and the others have; whether one of them has done so."""
        if not self._elastic["saves"]:
            return True
        arguments = self._order["spec"]["arguments"]
        self._events.wait(self._place.save(), SAVED_WITHIN, lambda: True)
        return Path(arguments["directory"], LEFT, arguments["run"], SAVED).exists()

    # --- the launcher -------------------------------------------------------------------------------------------------

    def _say(self, *message: Any) -> None:
        try:
            sys.stdout.write(json.dumps({"vpipe": message}) + "\n")
            sys.stdout.flush()
        except OSError:
            self.abandoned()

    def _read_orders(self) -> None:
        data = os.read(0, 1 << 16)  # it may be the socket that stdout is: it must block
        if not data:
            self._events.forget(0)
            self.abandoned()
        for message in self._orders.feed(data):
            self._obey(message)

    def abandoned(self) -> None:
        """The launcher is gone. Its lease lets the ranks end their update and save."""
        if not self._is_abandoned:
            self._is_abandoned = True
            self._lease = max(self._lease, monotonic() + LEASE) if self._elastic is None else self._lease
            self._place.signal(signal.SIGTERM)
            self._is_over = self._is_over or not self._living

    def _obey(self, message: dict[str, Any]) -> None:
        if "lease" in message:
            self._lease = max(self._lease, float(message["lease"]) + LEASE)
        elif "tell" in message:
            self._place.tell(int(message["tell"]), message["order"])
        elif "fork" in message:
            self._living.add(int(message["fork"]))
            self._place.fork(int(message["fork"]), message["variables"])
        elif "save" in message:
            self._is_over = self._is_to_save = True
        elif "over" in message:
            self._is_over = self._is_dismissed = True
        else:
            self._place.signal(message["signal"], message["slot"])

    def _keep_lease(self, now: float) -> None:
        if now >= self._beat_at:
            self._beat_at = now + BEAT
            self._say("beat", now)
        if now > self._lease and (self._elastic or self._is_abandoned):
            os.write(2, f"vpipe: no word from the launcher for {LEASE:g} s; this machine's ranks are ended\n".encode())
            self._is_over = True

    # --- the ranks ----------------------------------------------------------------------------------------------------

    def forked(self, slot: int, pid: int) -> None:
        self._has_begun = True
        self._say("forked", slot, pid)

    def printed(self, slot: int, number: int, data: bytes) -> None:
        self._say("printed", slot, number, data.decode("latin-1"))

    def reported(self, slot: int, message: dict[str, Any]) -> None:
        self._say("reported", slot, message)

    def said(self, slot: int, message: dict[str, Any]) -> None:
        self._say("said", slot, message)
        if self._is_abandoned and "finished" in message:
            self._place.tell(slot, {"leave": True})  # the launcher cannot

    def stopped(self, slot: int, seconds: float) -> None:
        self._say("stopped", slot, seconds)

    def noted(self, sentence: str) -> None:
        self._say("noted", sentence)

    def ended(self, slot: int, status: int, how: str = "") -> None:
        self._say("ended", slot, status, how)
        self._living.discard(slot)
        self._is_over = self._is_over or (self._is_abandoned and not self._living)

    def broken(self, sentence: str, code: int | None = None) -> None:
        self._is_broken = True
        self._say("broken", sentence, code)


def main() -> int:
    """Say hello: the address by which this machine was reached, the port of its store and one that is free, and its
    interface. sshd tells which of this machine's addresses the other side has called: one that works, whatever names
    say; SLURM knows the address itself. Then read what to run, and run it."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    address = sys.argv[1] if len(sys.argv) > 1 else words[2] if len(words) == 4 else "127.0.0.1"
    node = FarEnd(address)
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        line = stdin.readline()  # byte by byte: the orders after it are not read ahead
    if not line:
        return 0
    try:
        node.take(json.loads(line))
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, lambda *_: node.abandoned())
        return node.run()
    except (subprocess.SubprocessError, OSError) as error:
        node._say("broken", f"cannot start the ranks: {error}", None)
        return 2
    finally:
        node._place.close()


if __name__ == "__main__":
    os._exit(main())
