"""Connected sockets to all other ranks: one to each of this machine, two to each of the others (records and tensors).

Every rank opens two doors, one for its machine (a socket without a file: nothing can be left behind) and one at the
address that gloo uses, and tells all ranks where, with a word of its own. Of each pair the higher rank knocks at the
lower one's door and proves that it knows that word (``vpipe.door``): no stranger comes in. Where a door to other
machines is shut (a firewall that knows ports), all ranks hear of it, and messages go over gloo.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import torch

from vpipe.door import Door, knock
from vpipe.network import address_here
from vpipe.runtime.ranks.failure import PeerLost
from vpipe.runtime.transport.base import Transport
from vpipe.runtime.transport.stream_link import RECEIVE_BUFFER, streamable

_PURPOSE = "messages"
_NAMESPACES = ("net", "user")
_SEND_BUFFER = 256 * 1024
_COME_WITHIN = 30.0
"""Seconds for ranks of several machines that have just spoken to each other; then messages go over gloo."""
RECORDS, TENSORS = LANES = (0, 1)


class Card(NamedTuple):
    """What a rank tells the others."""

    wanted: str
    """The transport that its user asked for."""
    machine: str
    """Equal for two ranks that can share memory; empty where it cannot be had."""
    word: str
    """What is to be proved at its doors."""
    name: str
    """Of the door for its machine."""
    address: str = ""
    port: int = 0
    """Where other machines find it; nowhere if 0."""
    streamed: int = 0
    """Bytes of the largest message that its machine has room for."""


class Neighbours:
    """Where other ranks knock."""

    def __init__(self, wanted: str) -> None:
        self.card = Card(wanted, machine(), secrets.token_hex(16), f"\0vpipe-{secrets.token_hex(16)}")
        self._near: Door | None = None
        self._far: Door | None = None

    def open(self, num_ranks: int) -> None:
        if self.card.machine:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(self.card.name)
            listener.listen(num_ranks)
            self._near = Door(listener, self.card.word, _PURPOSE)
        address = address_here(os.environ)
        listener = _socket(address)
        try:
            listener.bind((address, 0))
            listener.listen(2 * num_ranks)
        except OSError:
            listener.close()
            return
        room = streamable(listener.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF))
        self.card = self.card._replace(address=address, port=listener.getsockname()[1], streamed=room)
        self._far = Door(listener, self.card.word, _PURPOSE)

    def of_this_machine(self, rank: int, cards: Sequence[Card], patience: float) -> dict[int, socket.socket]:
        """Rank → socket. Each of them calls this too."""
        peers = [peer for peer, card in enumerate(cards) if peer != rank and card.machine == self.card.machine]
        if self._near is None:
            return {}
        found: dict[tuple[int, int], socket.socket] = {}
        try:
            _meet(self._near, rank, cards, [(peer, 0) for peer in peers], found, patience)
        except OSError as error:
            peer = next(peer for peer in peers if (peer, 0) not in found)
            what = f"rank {rank} connects to rank {peer}, but that is gone: {error}"
            if isinstance(error, TimeoutError):
                what = f"rank {peer} has not opened its shared memory to rank {rank} within {patience:g} s"
            elif isinstance(error, ConnectionAbortedError):
                what = f"rank {rank} has waited for rank {peer}, and its door was shut"
            raise PeerLost(what, peer) from None
        for connection in found.values():
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        return {peer: connection for (peer, _), connection in found.items()}

    def of_others(
        self, transport: Transport, cards: Sequence[Card], peers: Sequence[int]
    ) -> Mapping[int, Sequence[socket.socket]]:
        """Peer → its sockets, one for each lane. All ranks call this; nothing where one of them could not connect."""
        found: dict[tuple[int, int], socket.socket] = {}
        can = self._far is not None and all(card.port for card in cards)
        if self._far is not None and can:
            try:
                _meet(self._far, transport.rank, cards, [(peer, at) for peer in peers for at in LANES], found)
            except OSError:
                can = False
        answers = transport.all_gather(torch.tensor([int(can)]), range(transport.num_ranks), [1] * transport.num_ranks)
        if not all(int(answer) for answer in answers):
            for connection in found.values():
                connection.close()
            return {}
        for connection in found.values():
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return {peer: [found[peer, lane] for lane in LANES] for peer in peers}

    def close(self) -> None:
        for door in (self._near, self._far):
            if door is not None:
                door.close()


def machine() -> str:
    """This machine until its next start, as far as processes of one user can pass memory to each other."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if sys.platform != "linux" or not hasattr(os, "memfd_create") or not boot.exists():
        return ""
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES]
    return " ".join([socket.gethostname(), boot.read_text().strip(), *spaces, str(os.getuid())])


def _meet(
    door: Door,
    rank: int,
    cards: Sequence[Card],
    wanted: Sequence[tuple[int, int]],
    found: dict[tuple[int, int], socket.socket],
    patience: float = _COME_WITHIN,
) -> None:
    """Connect to the wanted (peer, lane)s: knock at lower ranks, then let higher ones in. Rank 0 only lets in, so that
    no ranks wait in a circle."""
    until = monotonic() + patience
    for peer, lane in wanted:
        if peer < rank:
            connection = socket.socket(socket.AF_UNIX) if door.is_local else _socket(cards[peer].address)
            connection.settimeout(None if door.is_local else patience)  # with one, a door that is busy refuses
            connection.connect(cards[peer].name if door.is_local else (cards[peer].address, cards[peer].port))
            connection.settimeout(patience)
            found[peer, lane] = knock(connection, cards[peer].word, _PURPOSE, (rank, lane)).connection
    while not all(place in found for place in wanted):
        guest = door.next(until)
        found[guest.place] = guest.connection


def _socket(address: str) -> socket.socket:
    """A socket of the family of an address, which holds what comes while a rank computes."""
    found = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
    return found
