"""Copies of a rank's state that go to another machine, and what keeps them there.

    rank ── a copy in memory ──sendfile──▶ node of another machine ──▶ memory of the same slot there
         ◀───────────── one byte: it is whole ─────────────────────┘

Both ends know the secret of the run (``vpipe.door``). The first bytes of a copy, which say that it is whole, are
written last.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress

from vpipe.door import Door, dial, exactly

MARK_BYTES = 8
"""The bytes at the beginning of a copy without which it is none."""
CONNECT_WITHIN = 10.0
_PURPOSE = "copies"
_HEAD = struct.Struct("<qqq")
_CHUNK = 1 << 20
_WHOLE = b"\1"


class Keeper:
    """Keeps the copies of other machines' slots. ``shelves``: slot → descriptors of its pieces of memory."""

    def __init__(
        self, listener: socket.socket, shelves: Sequence[Sequence[int]], secret: str, foreign: Collection[int]
    ) -> None:
        self._shelves, self._foreign = shelves, frozenset(foreign)
        self._listener = listener
        self.port = int(self._listener.getsockname()[1])
        self._door = Door(self._listener, secret, _PURPOSE)
        threading.Thread(target=self._accept, name="vpipe-keeper", daemon=True).start()

    def _accept(self) -> None:
        with suppress(ConnectionAbortedError):
            while True:
                connection = self._door.next(float("inf")).connection
                threading.Thread(target=self._serve, args=(connection,), name="vpipe-keep", daemon=True).start()
        self._door.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, EOFError):
            while True:
                slot, piece, size = _HEAD.unpack(exactly(connection, _HEAD.size))
                if slot not in self._foreign or piece not in range(len(self._shelves[slot])) or size < MARK_BYTES:
                    return
                take(connection, self._shelves[slot][piece], size)
                connection.sendall(_WHOLE)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)


def take(connection: socket.socket, descriptor: int, size: int) -> None:
    """Receive a copy into memory."""
    os.pwrite(descriptor, bytes(MARK_BYTES), 0)
    mark = exactly(connection, MARK_BYTES)
    if os.fstat(descriptor).st_size < size:
        os.ftruncate(descriptor, size)
    offset = MARK_BYTES
    while offset < size:
        data = connection.recv(min(_CHUNK, size - offset))
        if not data:
            raise EOFError
        os.pwrite(descriptor, data, offset)
        offset += len(data)
    os.pwrite(descriptor, mark, 0)


class Sender:
    """Sends the copies of one slot."""

    def __init__(self, address: tuple[str, int], secret: str, slot: int) -> None:
        self._slot = slot
        self._connection = dial(address, secret, _PURPOSE, CONNECT_WITHIN).connection
        self._connection.settimeout(None)

    def send(self, piece: int, descriptor: int) -> None:
        """Until a piece of memory, which stays as it is meanwhile, is whole on the other side; an ``OSError`` where
        that cannot be."""
        size, offset = os.fstat(descriptor).st_size, 0
        try:
            self._connection.sendall(_HEAD.pack(self._slot, piece, size))
            while offset < size:
                offset += os.sendfile(self._connection.fileno(), descriptor, offset, size - offset)
            exactly(self._connection, 1)
        except (OSError, EOFError, ValueError) as error:
            told = f"a copy could not be sent to another machine ({error or type(error).__name__})"
            raise ConnectionError(told) from None

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
