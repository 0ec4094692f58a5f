"""TCP connections between ranks of any machines, two for each pair: one for records, one for tensors.

Every rank listens on the address that gloo uses and tells all ranks where, with a word of its own; of each pair the
higher rank knocks at the lower one's door and says that word, so that no stranger comes in. gloo has connected the same
ranks by the same network before. Where this fails all the same (a firewall that knows ports), all ranks hear of it, and
messages go over gloo.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hmac import compare_digest
from typing import NamedTuple

import torch

from vpipe.network import address_here
from vpipe.runtime.transport.base import Transport
from vpipe.runtime.transport.stream_link import RECEIVE_BUFFER, streamable

_HELLO = struct.Struct("<32sII")
_HELLO_WITHIN = 10.0
_COME_WITHIN = 30.0
"""Seconds for ranks that have just spoken to each other; then messages go over gloo."""
RECORDS, TENSORS = LANES = (0, 1)


class StreamCard(NamedTuple):
    """Where a rank listens; nowhere if ``port`` is 0."""

    address: str = ""
    port: int = 0
    word: str = ""
    streamed: int = 0
    """Bytes of the largest message that its machine has room for."""


class StreamDoor:
    """Where ranks of other machines knock."""

    def __init__(self) -> None:
        self.card = StreamCard()
        self._listener: socket.socket | None = None

    def open(self, num_ranks: int) -> None:
        address = address_here(os.environ)
        listener = _socket(address)
        try:
            listener.bind((address, 0))
            listener.listen(2 * num_ranks)
        except OSError:
            listener.close()
            return
        self._listener = listener
        granted = listener.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        self.card = StreamCard(address, listener.getsockname()[1], secrets.token_hex(16), streamable(granted))

    def connect(
        self, transport: Transport, cards: Sequence[StreamCard], peers: Sequence[int]
    ) -> Mapping[int, Sequence[socket.socket]]:
        """Peer → its sockets, one for each lane. All ranks call this; nothing where one of them could not connect."""
        found: dict[tuple[int, int], socket.socket] = {}
        can = all(card.port for card in cards)
        if can:
            try:
                self._meet(transport.rank, cards, peers, found)
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

    def _meet(
        self,
        rank: int,
        cards: Sequence[StreamCard],
        peers: Sequence[int],
        found: dict[tuple[int, int], socket.socket],
    ) -> None:
        assert self._listener is not None, "a rank with a card listens"
        for peer in peers:
            for lane in LANES if peer < rank else ():
                found[peer, lane] = connection = _socket(cards[peer].address)
                connection.settimeout(_COME_WITHIN)
                connection.connect((cards[peer].address, cards[peer].port))
                connection.sendall(_HELLO.pack(cards[peer].word.encode(), rank, lane))
        self._listener.settimeout(_COME_WITHIN)
        while any((peer, lane) not in found for peer in peers for lane in LANES):
            connection, _ = self._listener.accept()
            place = self._welcomed(connection)
            if place is not None and place[0] in peers and place not in found:
                found[place] = connection
            else:
                connection.close()

    def _welcomed(self, connection: socket.socket) -> tuple[int, int] | None:
        """The (rank, lane) that has knocked; None for a stranger."""
        connection.settimeout(_HELLO_WITHIN)
        hello = b""
        with suppress(OSError):
            while len(hello) < _HELLO.size and (more := connection.recv(_HELLO.size - len(hello))):
                hello += more
        if len(hello) < _HELLO.size:
            return None
        word, rank, lane = _HELLO.unpack(hello)
        return (rank, lane) if compare_digest(word, self.card.word.encode()) and lane in LANES else None

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()


def _socket(address: str) -> socket.socket:
    """A socket of the family of an address, which holds what comes while a rank computes."""
    found = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
    return found
