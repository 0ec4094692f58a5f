"""Copies of a rank's state that go to another machine, and what keeps them there.

    rank ── a copy in memory ──sendfile──▶ node of another machine ──▶ memory of the same slot there
         ◀───────────── one byte: it is whole ─────────────────────┘

Both ends know the secret of the run: who cannot answer to a number that is used once is not listened to. The first
bytes of a copy, which say that it is whole, are written last.
"""

from __future__ import annotations

import hmac
import os
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress

MARK_BYTES = 8
"""The bytes at the beginning of a copy without which it is none."""
CONNECT_WITHIN = 10.0
_NONCE = 32
_HEAD = struct.Struct("<qqq")
_CHUNK = 1 << 20
_WHOLE = b"\1"


class Keeper:
    """Keeps the copies of other machines' slots. ``shelves``: slot → descriptors of its pieces of memory."""

    def __init__(self, host: str, shelves: Sequence[Sequence[int]], secret: str, foreign: Collection[int]) -> None:
        self._shelves, self._secret, self._foreign = shelves, secret.encode(), frozenset(foreign)
        self._listener = socket.create_server((host, 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="vpipe-keeper", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="vpipe-keep", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, EOFError):
            nonce = secrets.token_bytes(_NONCE)
            connection.sendall(nonce)
            if not hmac.compare_digest(_exactly(connection, _NONCE), _answer(self._secret, nonce)):
                return
            while True:
                slot, piece, size = _HEAD.unpack(_exactly(connection, _HEAD.size))
                if slot not in self._foreign or piece not in range(len(self._shelves[slot])) or size < MARK_BYTES:
                    return
                take(connection, self._shelves[slot][piece], size)
                connection.sendall(_WHOLE)

    def close(self) -> None:
        self._listener.close()


def take(connection: socket.socket, descriptor: int, size: int) -> None:
    """Receive a copy into memory."""
    os.pwrite(descriptor, bytes(MARK_BYTES), 0)
    mark = _exactly(connection, MARK_BYTES)
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
    """Sends the copies of one slot, one at a time, in a thread of its own."""

    def __init__(self, address: tuple[str, int], secret: str, slot: int) -> None:
        self._slot = slot
        self._queue: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self.problem = ""
        self._connection = socket.create_connection(address, CONNECT_WITHIN)
        try:
            self._connection.sendall(_answer(secret.encode(), _exactly(self._connection, _NONCE)))
        except EOFError:
            raise ConnectionError("the other machine has closed the connection") from None
        self._connection.settimeout(None)
        threading.Thread(target=self._run, name="vpipe-sender", daemon=True).start()

    def send(self, piece: int, descriptor: int) -> None:
        """Begin to send a piece of memory, which must stay as it is until ``wait`` has returned."""
        self._idle.clear()
        self._queue.put((piece, descriptor))

    def wait(self) -> None:
        """Until all that was sent is whole on the other side; an ``OSError`` where that cannot be."""
        self._idle.wait()
        if self.problem:
            raise ConnectionError(self.problem)

    def close(self) -> None:
        self._queue.put(None)
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _run(self) -> None:
        try:
            while (wanted := self._queue.get()) is not None:
                piece, descriptor = wanted
                size = os.fstat(descriptor).st_size
                self._connection.sendall(_HEAD.pack(self._slot, piece, size))
                offset = 0
                while offset < size:
                    offset += os.sendfile(self._connection.fileno(), descriptor, offset, size - offset)
                _exactly(self._connection, 1)
                self._idle.set()
        except (OSError, EOFError, ValueError) as error:
            self.problem = f"a copy could not be sent to another machine ({error or type(error).__name__})"
            self._idle.set()


def _answer(secret: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, nonce, "sha256")


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data
