"""Two ranks of one machine: a ring of shared memory for each direction (``ring``), beside the records of a link.

A RING record brings the descriptor of the segment that messages lie in from then on. The first message of a form
describes itself in the ring.

**Why the memory is in order** on every processor: the sender's writes come before its ``send``, the receiver's reads
come after the ``recv`` of that very record, and the kernel hands a record over under a lock of the receiver's queue,
which releases and acquires. The other way round a CREDIT orders the receiver's reads before the sender's next writes.
"""

from __future__ import annotations

import os
import socket
from array import array
from typing import Any

from vpipe.runtime.transport.link import (
    BUFFER,
    FORM,
    MESSAGE,
    MESSAGES,
    NO_MESSAGE,
    RECORD,
    RING,
    START_BYTES,
    UNDER_WAY,
    WINDOW,
    Link,
    addressed,
)
from vpipe.runtime.transport.ring import Ring, Segment
from vpipe.runtime.transport.wire import Envelope, Packed

_ONE_DESCRIPTOR = socket.CMSG_SPACE(array("i").itemsize)
PAGE = 4096


class RingLink(Link):
    """This rank's end. ``connection`` is of the Unix family.

    A ring begins small, because new pages cost more than messages and old ones stay in the cache. It doubles where a
    sender would wait, up to ``most_bytes``, and further for a message that is itself larger.
    """

    eager = 2

    def __init__(self, peer: int, connection: socket.socket, most_bytes: int) -> None:
        super().__init__(peer, connection, most_bytes)
        self._ring = Ring(0)
        self._segment: Segment | None = None
        self._incoming: tuple[int, Segment] | None = None
        """(generation, ring) that messages now come in."""

    @property
    def num_bytes(self) -> int:
        """How large the ring to the peer is."""
        return self._ring.size

    def send(self, packed: Packed) -> bool:
        num_bytes = packed.layout.num_bytes
        if num_bytes > self._ring.size // 2:
            self._renew(max(min(START_BYTES, self._most_bytes), 4 * num_bytes))
        if self._num_sent - self._num_credited >= UNDER_WAY and not self.away:
            return False
        offset = self._ring.place(num_bytes)
        if offset is None:
            if not self.away:
                return False
            self._renew(max(2 * self._ring.size, 4 * num_bytes))
            offset = self._ring.place(num_bytes)
        assert offset is not None, "a new ring has room"
        assert self._segment is not None, "a ring has a segment"
        form = self._forms.get(id(packed.layout))
        self._segment.write(offset, packed, describe=form is None)
        self._num_sent += 1
        kind, number = (MESSAGE, form[0]) if form is not None else (FORM, self._number(packed.layout))
        record = RECORD.pack(kind, self._generation, offset, self._ring.head, *packed.envelope, number)
        self.connection.send(record, socket.MSG_NOSIGNAL)
        return True

    def make_room(self, num_bytes: int) -> None:
        size = 2 * self._ring.size
        if self._num_sent - self._num_credited < UNDER_WAY and size <= min(self._most_bytes, WINDOW * num_bytes):
            self._renew(size)
        else:
            self._ask()

    def receive(self) -> bool:
        try:
            data, attached, _, _ = self.connection.recvmsg(BUFFER, _ONE_DESCRIPTOR, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data, attached = b"", []
        if not data:
            self.gone = True
            return False
        # The kernel takes and gives records whole: each is one small send, and the buffer holds a whole number of them.
        for record in RECORD.iter_unpack(data):
            kind, generation, first, second, form = record[0], record[1], record[2], record[3], record[9]
            if kind in MESSAGES:
                assert self._incoming is not None, "a ring comes before its messages"
                if kind == FORM:
                    self._known[form:] = [self._incoming[1].layout(first)]
                envelope = addressed(Envelope, record[4:9])
                self._unread.append((envelope, self._known[form], *self._incoming, first, second))
            elif kind == RING:  # the kernel ends a read at a descriptor, so this is the last record, and the only ring
                self._adopt(generation, first, attached)
            else:
                self._heard(kind, generation, first, second)
        return True

    def read(self) -> tuple[Envelope, Any] | None:
        if not self._unread:
            return None
        envelope, layout, generation, segment, offset, position = self._unread.popleft()
        value = segment.read(offset, layout)
        if generation != self._read_generation:
            self._read_generation, self._credited_position, self._quarter = generation, 0, segment.size // 4
        self._position = position
        self._num_read += 1
        self.owes = True
        return envelope, value

    def close(self) -> None:
        super().close()
        self._segment = self._incoming = None

    def _free(self, position: int) -> None:
        self._ring.free(position)

    def _renew(self, num_bytes: int) -> None:
        """Go on in a new ring. What is in the old one stays there until the receiver has read it."""
        size = -(-num_bytes // PAGE) * PAGE
        self._segment, descriptor = Segment.create(size)
        self._ring = Ring(size)
        self._generation += 1
        record = RECORD.pack(RING, self._generation, size, 0, *NO_MESSAGE)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))]
        try:
            self.connection.sendmsg([record], rights, socket.MSG_NOSIGNAL)
        finally:
            os.close(descriptor)

    def _adopt(self, generation: int, size: int, attached: list[tuple[int, int, bytes]]) -> None:
        descriptors = array("i")
        for level, kind, data in attached:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        if len(descriptors) != 1:
            raise RuntimeError(
                f"rank {self.peer} sent a ring without its memory; is the limit of open files reached (ulimit -n)?"
            )
        try:
            self._incoming = (generation, Segment(descriptors[0], size))
        finally:
            os.close(descriptors[0])
