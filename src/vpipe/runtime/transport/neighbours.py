"""Which ranks share this machine, and a connected socket to each of them; to the others two (``stream_door``).

Every rank opens a door (a socket without a file: nothing can be left behind) and tells all ranks its name and its
machine. Of each pair on one machine the higher rank knocks at the lower one's door. A door exists before its name is
told and a knock waits in the kernel, so nobody has to answer for another to go on.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import torch

from vpipe.runtime.ranks.failure import PeerLost
from vpipe.runtime.transport.base import Transport
from vpipe.runtime.transport.stream_door import StreamCard, StreamDoor

_HELLO = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
_NAMESPACES = ("net", "user")
_SEND_BUFFER = 256 * 1024


class Card(NamedTuple):
    """What a rank tells the others."""

    wanted: str
    """The transport that its user asked for."""
    machine: str
    """Equal for two ranks that can share memory; empty where it cannot be had."""
    door: str
    stream: StreamCard


class Door:
    """Where other ranks knock."""

    def __init__(self, wanted: str) -> None:
        self.streams = StreamDoor()
        self.card = Card(wanted, machine(), f"vpipe-{secrets.token_hex(16)}", self.streams.card)
        self._listener: socket.socket | None = None

    def open(self, num_ranks: int) -> None:
        self.streams.open(num_ranks)
        self.card = self.card._replace(stream=self.streams.card)
        if self.card.machine:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(f"\0{self.card.door}")
            self._listener.listen(num_ranks)

    def exchange(self, transport: Transport) -> list[Card]:
        """Everybody's cards, by rank."""
        mine = torch.frombuffer(bytearray(json.dumps(self.card).encode()), dtype=torch.uint8)
        found = transport.all_gather(mine, range(transport.num_ranks))
        cards = [json.loads(bytes(text.tolist())) for text in found]
        return [Card(wanted, machine, door, StreamCard(*stream)) for wanted, machine, door, stream in cards]

    def connect(self, rank: int, cards: Sequence[Card], patience: float) -> dict[int, socket.socket]:
        """Rank → socket, for the other ranks of this machine. Each of them calls this too."""
        peers = [peer for peer, card in enumerate(cards) if peer != rank and card.machine == self.card.machine]
        if self._listener is None:
            return {}
        found = {peer: _knock(rank, peer, cards[peer].door) for peer in peers if peer < rank}
        end = monotonic() + patience
        while missing := [peer for peer in peers if peer not in found]:
            try:
                connection = _next_knock(self._listener, end)
                connection.settimeout(patience)
                peer = _welcomed(connection)
            except TimeoutError:
                what = f"rank {missing[0]} has not opened its shared memory to rank {rank} within {patience:g} s"
                raise PeerLost(what, missing[0]) from None
            except ConnectionAbortedError:
                raise PeerLost(
                    f"rank {rank} has waited for rank {missing[0]}, and its door was shut", missing[0]
                ) from None
            if peer in missing:
                found[peer] = connection
            else:
                connection.close()
        for connection in found.values():
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        return found

    def close(self) -> None:
        self.streams.close()
        if self._listener is not None:
            self._listener.close()


def machine() -> str:
    """This machine until its next start, as far as processes of one user can pass memory to each other."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if sys.platform != "linux" or not hasattr(os, "memfd_create") or not boot.exists():
        return ""
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES]
    return " ".join([socket.gethostname(), boot.read_text().strip(), *spaces, str(os.getuid())])


def _knock(rank: int, peer: int, door: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(f"\0{door}")
        connection.send(_HELLO.pack(rank), socket.MSG_NOSIGNAL)
    except OSError as error:
        connection.close()
        raise PeerLost(f"rank {rank} connects to rank {peer}, but that is gone: {error.strerror}", peer) from None
    return connection


def _next_knock(listener: socket.socket, end: float) -> socket.socket:
    """Whoever knocks before ``end``. Not by ``accept`` with a timeout: where somebody shuts the listener (``sockets``),
    the kernel says both "hang-up" and "try again", so that ``accept`` spins inside itself, and no signal ends it."""
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    listener.setblocking(False)
    while (left := end - monotonic()) > 0:
        for _, event in waiting.poll(1000 * left):
            if event & (select.POLLHUP | select.POLLERR):
                raise ConnectionAbortedError
            try:
                return listener.accept()[0]
            except BlockingIOError:
                continue  # it has left again
    raise TimeoutError


def _welcomed(connection: socket.socket) -> int | None:
    """The rank that has knocked; None for somebody else's process."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.getuid():
        return None
    try:
        hello = connection.recv(_HELLO.size)
    except ConnectionResetError:
        return None
    return int(_HELLO.unpack(hello)[0]) if len(hello) == _HELLO.size else None
