"""The processes that come and go, as their launcher holds them: a socket to each, its last sign, and how one is forked.

The launcher of an elastic run has them on its own machine, a node has those of another one: what a process says is
read in the same way and then decided upon, or passed on.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from vpipe.launch.lines import JsonLines
from vpipe.launch.loop import Launch

SHELVES = "VPIPE_SHELVES"
"""The descriptors of the copies' memory: slot → two pieces."""
STOPPED_FOR = 0.75
"""Seconds without a sign after which a process that is stopped is taken for lost."""


@dataclass
class Member:
    """The process of a slot."""

    connection: socket.socket | None
    """``None`` where it is another machine's."""
    pid: int = 0
    seen: float = field(default_factory=monotonic)
    longest: float = 0.0
    """Seconds between two of its signs, at most so far: patience adapts to it."""
    lines: JsonLines = field(default_factory=JsonLines)

    def give_sign(self) -> None:
        now = monotonic()
        self.longest, self.seen = max(self.longest, now - self.seen), now


def make_shelves(count: int) -> list[list[int]]:
    """Memory without a name for the copies of so many slots: two generations each."""
    return [[os.memfd_create("vpipe-copy") for _ in range(2)] for _ in range(count)]


class MemberLaunch(Launch, ABC):
    """A launcher whose processes are told things, and say things, one by one."""

    num_streams = 4

    _members: dict[int, Member]

    def _streams(self, rank: int) -> list[int]:
        ours, theirs = socket.socketpair()
        self._members[rank] = member = Member(ours)
        self._selector.register(ours, selectors.EVENT_READ, lambda _: self._read_member(rank, member))
        return [*super()._streams(rank), theirs.detach()]

    def _read_member(self, slot: int, member: Member) -> bool:
        assert member.connection is not None
        try:
            data = member.connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            with suppress(KeyError, ValueError):
                self._selector.unregister(member.connection)
            return False
        member.give_sign()
        for message in member.lines.feed(data):
            self._said(slot, message)
        return True

    @abstractmethod
    def _said(self, slot: int, message: dict[str, Any]) -> None:
        """A process says how it stands."""

    def _tell(self, slot: int, order: dict[str, Any]) -> None:
        """A process that is gone will be reaped."""
        member = self._members.get(slot)
        with suppress(OSError):
            if member is not None and member.connection is not None:
                member.connection.sendall(json.dumps(order).encode() + b"\n")

    def _fork(self, slot: int) -> None:
        """A new process for a slot; its streams are as those of the one before."""
        fds = self._streams(slot)
        self._tell_zygote({"fork": slot}, fds)
        for fd in fds:
            os.close(fd)

    def _drop(self, slot: int) -> None:
        """The process of a slot has ended."""
        member = self._members.pop(slot, None)
        if member is not None and member.connection is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(member.connection)
            member.connection.close()
