"""Two ranks of any machines: a TCP stream for the tensors of messages, beside the records of a link.

gloo carries a message by a thread of its own at either end: the receiver's thread reads it and wakes the rank, and the
sender's fights with the rank for a lock. Here the rank itself hands its bytes to the kernel, straight from the tensors,
and the rank that waits for them reads them, straight into the tensors: two copies and one wake. What the kernel does
not take at once (``Outlet``) is sent by a thread, so that no rank ever waits for the network with its hands full.

The network's buffers are the ring of this link: a message stays there until it is taken. They are small, so that this
way is for messages that fit (``streamable``); larger ones go over gloo, whose thread receives while a rank computes.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from ctypes import c_char
from typing import Any

from vpipe.runtime.crossing import unflatten
from vpipe.runtime.transport.link import BUFFER, START_BYTES, WINDOW, Link
from vpipe.runtime.transport.wire import ByteArray, Envelope, MessageLayout, Packed, rooms

RECEIVE_BUFFER = 8 * 2**20
"""What the kernel is asked to hold for a rank that computes; it grants less where it is told to."""
LEAST_STREAMED, MOST_STREAMED = 512 * 1024, 2 * 2**20
_AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_TIME = struct.Struct("@ll")


def streamable(granted: int) -> int:
    """Bytes of a message up to which it goes by a stream, where the kernel says that it has ``granted`` a buffer of so
    many bytes, of which it counts half for itself: two of the largest fit, where they are not the least."""
    return min(max(LEAST_STREAMED, granted // 4), MOST_STREAMED)


class StreamLink(Link):
    """This rank's end: ``connection`` for records, ``data`` for tensors; ``streamed`` is the largest message."""

    def __init__(
        self,
        peer: int,
        connection: socket.socket,
        data: socket.socket,
        most_bytes: int,
        patience: float,
        streamed: int,
    ) -> None:
        super().__init__(peer, connection, most_bytes)
        self._streamed = streamed
        self._data, self._outlet = data, Outlet(data)
        self._sent_position = 0
        self._freed_position = 0
        self._largest = 0
        seconds = min(patience, 2.0**31 - 1)
        data.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIME.pack(int(seconds), int(seconds % 1 * 1e6)))

    def send(self, packed: Packed) -> bool:
        return super().send(packed) and self._note(packed.envelope, packed.layout)

    def _put(self, packed: Packed) -> tuple[int, int] | None:
        num_bytes = packed.layout.num_bytes
        if self._num_sent > self._num_credited and not self.away:
            self._largest = max(self._largest, num_bytes)
            room = max(START_BYTES, min(self._most_bytes, WINDOW * self._largest))
            if self._sent_position - self._freed_position + num_bytes > room:
                return None
        self._sent_position += num_bytes
        try:
            self._outlet.send(packed.memory())  # before the record, so that a rank that this wakes finds it
        except OSError as error:
            raise ConnectionResetError(str(error)) from None
        return 0, self._sent_position

    def read(self) -> tuple[Envelope, Any] | None:
        if self._unread:
            self._note(*self._unread[0][:2])
        return super().read()

    def _note(self, envelope: Envelope, layout: MessageLayout) -> bool:
        """Both ends remember what is too large for a stream."""
        if layout.num_bytes > self._streamed:
            self.too_large[envelope.source, envelope.target, envelope.backward] = layout.num_bytes
        return True

    def _get(self, layout: MessageLayout, incoming: None, place: int) -> Any:
        tensors, places = [], []
        for tensor, memory, _, num_bytes in rooms(layout):
            tensors.append(tensor)
            if num_bytes:
                places.append((c_char * num_bytes).from_address(memory.data_ptr()))
        if places:
            self._fill(places)
        self._quarter = max(self._quarter, 4 * layout.num_bytes)
        return unflatten(layout.structure, tensors)

    def _fill(self, places: list[ByteArray]) -> None:
        """Wait for the bytes of a message. Its sender has begun to send them."""
        left: Sequence[ByteArray | memoryview] = places
        while left:
            try:
                count = self._data.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                raise TimeoutError("half of a message has come") from None
            except OSError:  # a network that is gone has many names
                count = 0
            if not count:
                self.gone = True
                raise ConnectionResetError("a message has no end")
            left = _after(left, count)

    def drain(self, patience: float) -> bool:
        return self._outlet.drain(patience)

    def close(self) -> None:
        with suppress(OSError):  # what is unread would make the kernel reset the connection: the peer has more to read
            while self.connection.recv(BUFFER, socket.MSG_DONTWAIT):
                pass
        super().close()
        self._data.close()

    def _free(self, position: int) -> None:
        self._freed_position = position


class Outlet:
    """Bytes into a socket, without waiting: what the kernel does not take now is copied, and sent by a thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._waiting: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def send(self, parts: list[ByteArray]) -> None:
        """The parts may be changed or dropped afterwards."""
        left: Sequence[ByteArray | memoryview] = parts
        if left and not self._waiting:  # the thread takes away what it has sent, not what it is about to send
            with suppress(BlockingIOError):
                left = _after(left, self._connection.sendmsg(left, (), _AT_ONCE))
        if not left:
            return
        with self._changed:
            if self._error is not None:
                raise self._error
            self._waiting.append(b"".join(left))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="vpipe outlet", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting)
                self._connection.sendall(self._waiting[0], socket.MSG_NOSIGNAL)
                with self._changed:
                    self._waiting.popleft()
                    self._changed.notify_all()
        except OSError as error:
            with self._changed:
                self._error = error
                self._waiting.clear()
                self._changed.notify_all()

    def drain(self, patience: float) -> bool:
        """Wait until nothing waits; whether that has come."""
        if not self._waiting:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, patience)


def _after(parts: Sequence[ByteArray | memoryview], count: int) -> Sequence[ByteArray | memoryview]:
    """What is left of some memory after its first ``count`` bytes."""
    for index, part in enumerate(parts):
        if count < len(part):
            return [memoryview(part).cast("B")[count:], *parts[index + 1 :]]
        count -= len(part)
    return ()
