"""The processes of this machine: forks of a zygote, with streams, a pipe for reports and a control socket each.

this process ──socket──▶ zygote ──fork──▶ ranks, store
   │  killed: the socket closes, the zygote kills its group
   └─ zygote killed: the kernel kills the ranks (prctl), this process kills the group
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import termios
import tty
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

from vpipe.launch import zygote_start
from vpipe.launch.events import EventLoop, JsonLines, read_now
from vpipe.launch.place import Leader, RankPlace
from vpipe.launch.process import is_stopped, kill_group
from vpipe.process import AS_MODULE

SHELVES = "VPIPE_SHELVES"
"""The descriptors of the copies' memory: slot → two pieces."""
MOST_READS = 64
STOPPED_FOR = 0.75
"""Seconds without a sign after which a process that is stopped is taken for lost."""
GONE = "the process that started the ranks has ended"


@dataclass
class RankProcess:
    """The process of a slot, as its parent's parent holds it."""

    report: int
    connection: socket.socket | None = None
    """Where it is told things, if it is led."""
    pid: int = 0
    seen: float = field(default_factory=monotonic)
    words: JsonLines = field(default_factory=JsonLines)
    reports: JsonLines = field(default_factory=JsonLines)


def make_shelves(count: int) -> list[list[int]]:
    """Memory without a name for the copies of so many slots: two generations each."""
    return [[os.memfd_create("vpipe-copy") for _ in range(2)] for _ in range(count)]


class LocalPlace(RankPlace):
    """This machine. ``leads``: its processes are told things, and say things, one by one. ``outlives``: ``saver`` runs
    where this process is killed, too."""

    def __init__(
        self,
        events: EventLoop,
        leader: Leader,
        environment: Mapping[str, str],
        *,
        leads: bool,
        shelves: Sequence[Sequence[int]] = (),
        saver: str = "",
        outlives: bool = False,
        listeners: Sequence[socket.socket] = (),
        terminals: Sequence[bool] = (False, False),
    ) -> None:
        self._events, self._leader = events, leader
        self._environment = environment
        self._leads, self._saver, self._outlives = leads, saver, outlives
        self._listeners, self._terminals = listeners, terminals
        self._shelves = shelves
        self._shared = [fd for pair in shelves for fd in pair]
        """Descriptors that all ranks get."""
        self._members: dict[int, RankProcess] = {}
        self._streams: dict[int, dict[int, int]] = {}
        """Slot → open descriptor → number of the stream. A child of a process that has ended may write on."""
        self._waiting: list[dict[str, Any]] | None = []
        """Orders for when the zygote takes them; ``None`` from then on."""
        self._zygote: subprocess.Popen[bytes] | None = None
        self._said = JsonLines()

    def start(self, spec: dict[str, Any]) -> None:
        self._spec = spec | {"rescue": self._saver if self._outlives else ""}
        begun = None if self._shared else zygote_start.take(self._environment)
        started = begun or zygote_start.spawn(self._environment, self._shared)
        self._zygote, self._control = started.process, started.control
        self._events.watch(self._control, self._read_control)
        if self._listeners:
            socket.send_fds(self._control, [b"\n"], [listener.fileno() for listener in self._listeners])
        for listener in self._listeners:
            listener.close()
        if self._shared:
            spec["environment"] |= {SHELVES: json.dumps(self._shelves)}
        self._control.sendall(json.dumps(self._spec).encode() + b"\n")

    # --- orders -------------------------------------------------------------------------------------------------------

    def fork(self, slot: int, variables: Mapping[str, str] | None = None) -> None:
        order = {"fork": slot, "variables": dict(variables or {})}
        if self._waiting is not None:
            self._waiting.append(order)
            return
        fds = self._open(slot)
        self._order(order | {"fds": len(fds)}, fds)
        for fd in fds:
            os.close(fd)

    def _order(self, order: dict[str, Any], fds: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(order).encode() + b"\n"], fds)
        except OSError:
            self._leader.broken(GONE)

    def _open(self, slot: int) -> list[int]:
        """The descriptors that a rank writes to: stdout, stderr, report, and the socket by which it is led. Rank 0 gets
        a terminal where we have one."""
        given = []
        for number in (0, 1):
            ours, theirs = _terminal() if slot == 0 and self._terminals[number] else os.pipe()
            given.append(theirs)
            os.set_blocking(ours, False)
            self._streams.setdefault(slot, {})[ours] = number
            self._events.watch(ours, partial(self._read_stream, slot, ours))
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        member = self._members[slot] = RankProcess(reader)
        self._events.watch(reader, partial(self._read_report, slot, member))
        given.append(writer)
        if self._leads:
            member.connection, control = socket.socketpair()
            self._events.watch(member.connection, partial(self._read_member, slot, member))
            given.append(control.detach())
        return given

    def tell(self, slot: int, order: dict[str, Any]) -> None:
        member = self._members.get(slot)
        with suppress(OSError):  # one that is gone will be reaped
            if member is not None and member.connection is not None:
                member.connection.sendall(json.dumps(order).encode() + b"\n")

    def signal(self, signum: int, slot: int | None = None) -> None:
        order = {"signal": int(signum)} | ({} if slot is None else {"slot": slot})
        if self._waiting is None:
            self._order(order)
        elif signum == signal.SIGUSR1:
            self._waiting.append(order)  # save and leave: the ranks know how
        else:
            self._leader.broken("the ranks were not started")

    # --- what is heard ------------------------------------------------------------------------------------------------

    def _read_control(self) -> None:
        data = _received(self._control)
        if not data:
            self._events.forget(self._control)
            self._leader.broken(GONE)
        for event in self._said.feed(data):
            self._heard(event)

    def _heard(self, event: dict[str, Any]) -> None:
        if "ended" in event:
            slot = int(event["ended"])
            self._drain(slot)
            self._drop(self._members.pop(slot))
            self._leader.ended(slot, int(event["status"]))
        elif "forked" in event:
            slot, pid = int(event["forked"]), int(event["pid"])
            if slot in self._members:
                self._members[slot].pid = pid
                self._leader.forked(slot, pid)
        elif "ready" in event:
            waiting, self._waiting = self._waiting or [], None
            for order in waiting:
                if "fork" in order:
                    self.fork(order["fork"], order["variables"])
                else:
                    self._order(order)
        elif "refused" in event:
            self._leader.broken(str(event["refused"]), 2)
        elif "failed" in event:
            self._leader.broken(str(event["failed"]))

    def _read_stream(self, slot: int, fd: int) -> bool:
        data = read_now(fd)
        if data:
            self._leader.printed(slot, self._streams[slot][fd], data)
        elif data is not None:
            self._events.forget(fd)
            os.close(fd)
            del self._streams[slot][fd]
        return bool(data)

    def _read_report(self, slot: int, member: RankProcess) -> bool:
        data = read_now(member.report)
        for message in member.reports.feed(data or b""):
            self._leader.reported(slot, message)
        if data == b"":
            self._events.forget(member.report)
        return bool(data)

    def _read_member(self, slot: int, member: RankProcess) -> None:
        assert member.connection is not None
        data = _received(member.connection)
        if not data:
            self._events.forget(member.connection)
        member.seen = monotonic()
        for message in member.words.feed(data):
            self._leader.said(slot, message)

    def look(self, now: float) -> None:
        """A zygote that was stopped is woken: without it the ends of ranks would go unheard."""
        if self._zygote is not None and is_stopped(self._zygote.pid):
            self._zygote.send_signal(signal.SIGCONT)
            self._leader.noted("the process that started the ranks had been stopped; it goes on")
        for slot, member in list(self._members.items()):
            silent = now - member.seen
            if self._leads and silent > STOPPED_FOR and member.pid and is_stopped(member.pid):
                member.seen = now
                self._leader.stopped(slot, silent)

    # --- the end ------------------------------------------------------------------------------------------------------

    def save(self) -> list[subprocess.Popen[bytes]]:
        """In a child of the zygote, or where that is gone in a process that imports for itself."""
        assert self._zygote is not None
        if self._events.watches(self._control):
            self._order({"rescue": self._saver})
            self._events.forget(self._control)
            self._control.close()
        else:
            kill_group(self._zygote.pid)
            self._zygote.wait()
            module, _, name = self._saver.partition(":")
            self._zygote = subprocess.Popen(
                [sys.executable, AS_MODULE, module, name, json.dumps(self._spec["arguments"])],
                stdin=subprocess.DEVNULL,
                env=os.environ | self._spec["environment"],
                pass_fds=self._shared,
                start_new_session=True,
            )
        return [self._zygote]

    def drain(self) -> None:
        for slot in self._streams:
            self._drain(slot)

    def _drain(self, slot: int) -> None:
        """Read what a process said last. A child of it may write on for ever: more than a pipe holds is not read."""
        for fd in list(self._streams[slot]):
            all(self._read_stream(slot, fd) for _ in range(MOST_READS))
        member = self._members.get(slot)
        if member is not None:
            all(self._read_report(slot, member) for _ in range(MOST_READS))

    def _drop(self, member: RankProcess) -> None:
        """A child of the process may hold its pipe for reports open for ever."""
        self._events.forget(member.report)
        os.close(member.report)
        if member.connection is not None:
            self._events.forget(member.connection)
            member.connection.close()

    def close(self) -> None:
        if self._zygote is not None:
            if self._waiting is None and self._control.fileno() >= 0:
                with suppress(OSError):
                    self._control.sendall(b'{"rescue": ""}\n')
            self._events.forget(self._control)
            self._control.close()
            kill_group(self._zygote.pid)
            self._zygote.wait()
        for member in self._members.values():
            self._drop(member)
        for fd in (*self._shared, *(fd for streams in self._streams.values() for fd in streams)):
            os.close(fd)


def _received(connection: socket.socket) -> bytes:
    """What has come; nothing at the end, also where the other side ended with words of ours unread."""
    with suppress(OSError):
        return connection.recv(65536)
    return b""


def _terminal() -> tuple[int, int]:
    """A terminal of the size of ours that passes bytes unchanged: (our end, the rank's end)."""
    master, slave = os.openpty()
    tty.setraw(slave)
    with suppress(OSError):
        fcntl.ioctl(slave, termios.TIOCSWINSZ, fcntl.ioctl(2, termios.TIOCGWINSZ, b"\0" * 8))
    return master, slave
