"""Two ranks of one machine: a ring of shared memory for each direction (``ring``), beside the records of a link.

A RING record brings the descriptor of the segment that messages lie in from then on.

**Why the memory is in order** on every processor: the sender's writes come before its ``send``, the receiver's reads
come after the ``recv`` of that very record, and the kernel hands a record over under a lock of the receiver's queue,
which releases and acquires. The other way round a CREDIT orders the receiver's reads before the sender's next writes.
"""

from __future__ import annotations

import os
import socket
from array import array
from typing import Any

from vpipe.runtime.transport.link import NO_MESSAGE, RECORD, RING, START_BYTES, UNDER_WAY, WINDOW, Link
from vpipe.runtime.transport.ring import Ring, Segment
from vpipe.runtime.transport.wire import MessageLayout, Packed

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

    @property
    def num_bytes(self) -> int:
        """How large the ring to the peer is."""
        return self._ring.size

    def _put(self, packed: Packed) -> tuple[int, int] | None:
        num_bytes = packed.layout.num_bytes
        if num_bytes > self._ring.size // 2:
            self._renew(max(min(START_BYTES, self._most_bytes), 4 * num_bytes))
        offset = self._ring.place(num_bytes)
        if offset is None:
            if not self.away:
                return None
            self._renew(max(2 * self._ring.size, 4 * num_bytes))
            offset = self._ring.place(num_bytes)
        assert offset is not None, "a new ring has room"
        assert self._segment is not None, "a ring has a segment"
        self._segment.write(offset, packed)
        return offset, self._ring.head

    def make_room(self, num_bytes: int) -> None:
        size = 2 * self._ring.size
        if self._num_sent - self._num_credited < UNDER_WAY and size <= min(self._most_bytes, WINDOW * num_bytes):
            self._renew(size)
        else:
            self._ask()

    def _get(self, layout: MessageLayout, incoming: tuple[int, Segment], place: int) -> Any:
        generation, segment = incoming
        value = segment.read(place, layout)
        if generation != self._read_generation:
            self._read_generation, self._credited_position, self._quarter = generation, 0, segment.size // 4
        return value

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

    def _heard(self, kind: int, generation: int, first: int, second: int) -> None:
        if kind != RING:
            super()._heard(kind, generation, first, second)
            return
        descriptors, attached = array("i"), self._attached
        self._attached = []  # the kernel ends a read at a descriptor: it is that of this ring
        for level, kind, data in attached:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        if len(descriptors) != 1:
            raise RuntimeError(
                f"rank {self.peer} sent a ring without its memory; is the limit of open files reached (ulimit -n)?"
            )
        try:
            self._incoming = (generation, Segment(descriptors[0], first))
        finally:
            os.close(descriptors[0])
