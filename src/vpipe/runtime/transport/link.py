"""Two ranks of one machine: a ring for each direction, and a socket that says what is in them.

A record on the socket is 56 bytes. Both directions share the socket:

    RING     from here on messages lie in the segment whose descriptor comes along      (generation, size)
    FORM     a message is written, the first of its form: it describes itself   (as a MESSAGE)
    MESSAGE  a message is written           (generation, offset, position after, envelope, number of its form)
    CREDIT   everything before a position is read                       (generation, position, messages read)
    ASK      tell me at once how far you have read: I wait for room
    AWAY     I wait elsewhere and read nothing for a while: do not wait for me, take a larger ring

So of a message whose form has come before, the ring holds the tensors alone: nothing is described or parsed again.

**Why the memory is in order** on every processor: the sender's writes come before its ``send``, the receiver's reads
come after the ``recv`` of that very record, and the kernel hands a record over under a lock of the receiver's queue,
which releases and acquires. The other way round a CREDIT orders the receiver's reads before the sender's next writes.

**Why the socket is never full**: at most ``UNDER_WAY`` messages are without credit, and the other records are few.
About 270 records fit into a socket, so ``send`` does not block, except towards a rank that is away and has more unread.

**Why nobody waits for ever**: a message stays in its ring until it is taken, so that a neighbour that runs ahead fills
the ring and not this rank's memory. But a rank that waits here and is asked reads everything, so there is room again. A
rank that goes to wait elsewhere (a collective operation, another machine) while messages for it are expected says AWAY
first.
"""

from __future__ import annotations

import os
import socket
import struct
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from vpipe.runtime.transport.ring import Ring, Segment
from vpipe.runtime.transport.wire import MOST_LAYOUTS, Envelope, MessageLayout, Packed

_RECORD = struct.Struct("<IIQQqiiiiI4x")
_NO_MESSAGE = (0, 0, 0, 0, 0, 0)
_RING, _FORM, _MESSAGE, _CREDIT, _ASK, _AWAY = range(1, 7)
_BUFFER = 256 * _RECORD.size
_ONE_DESCRIPTOR = socket.CMSG_SPACE(array("i").itemsize)
UNDER_WAY = 128
START_BYTES = 128 * 1024
WINDOW = 16
"""How many of the largest message a ring grows to hold."""
PAGE = 4096

Deliver = Callable[[int, Envelope, Any], None]
"""(peer, envelope, value)."""


class Link:
    """This rank's end. ``connection`` is a connected stream socket of the Unix family.

    A ring begins small, because new pages cost more than messages and old ones stay in the cache. It doubles where a
    sender would wait, up to ``ring_bytes``, and further for a message that is itself larger.
    """

    def __init__(self, peer: int, connection: socket.socket, ring_bytes: int) -> None:
        self.peer = peer
        self.connection = connection
        self.gone = False
        """Whether the peer has closed its end; what it sent before has been read."""
        self.away = False
        """Whether the peer waits elsewhere."""
        self._most_bytes = ring_bytes
        self._ring = Ring(0)
        self._segment: Segment | None = None
        self._generation = 0
        self._num_sent = 0
        self._num_credited = 0
        self._incoming: tuple[int, Segment] | None = None
        """(generation, ring) that messages now come in."""
        self._unread: deque[tuple[int, Segment, int, int, Envelope, MessageLayout]] = deque()
        """(generation, ring, offset, position after, envelope, form) of messages that have come and lie where they
        came."""
        self._forms: dict[int, tuple[int, MessageLayout]] = {}
        """id of a form → (its number, itself), of those that the peer knows."""
        self._known: list[MessageLayout] = []
        """The peer's forms, by number."""
        self._read_generation = 0
        self._position = 0
        self._credited_position = 0
        self._quarter = 0
        self._num_read = 0
        self._num_told = 0
        self._said_away = False
        self._asked = False

    @property
    def num_bytes(self) -> int:
        """How large the ring to the peer is."""
        return self._ring.size

    def send(self, packed: Packed) -> bool:
        """Write a message and say so; False if there is no room now."""
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
        kind, number = (_MESSAGE, form[0]) if form is not None else (_FORM, self._number(packed.layout))
        record = _RECORD.pack(kind, self._generation, offset, self._ring.head, *packed.envelope, number)
        self.connection.send(record, socket.MSG_NOSIGNAL)
        return True

    def _number(self, layout: MessageLayout) -> int:
        """The number of a form that the peer is about to know; where there are too many, counting begins again."""
        if len(self._forms) >= MOST_LAYOUTS:
            self._forms.clear()
        number = len(self._forms)
        self._forms[id(layout)] = (number, layout)
        return number

    def make_room(self, num_bytes: int) -> None:
        """After a message found no room: take a larger ring, or ask for credit where it is large enough."""
        size = 2 * self._ring.size
        if self._num_sent - self._num_credited < UNDER_WAY and size <= min(self._most_bytes, WINDOW * num_bytes):
            self._renew(size)
        else:
            self._ask()

    def leave(self) -> None:
        """Say that this rank is about to wait elsewhere."""
        if not self._said_away and not self.gone:
            self._said_away = True
            self._reply(_AWAY)

    def receive(self) -> bool:
        """Hear what has come, without waiting; whether anything has. Messages stay in the ring until ``read``."""
        try:
            data, attached, _, _ = self.connection.recvmsg(_BUFFER, _ONE_DESCRIPTOR, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data, attached = b"", []
        if not data:
            self.gone = True
            return False
        # The kernel takes and gives records whole: each is one small send, and the buffer holds a whole number of them.
        for kind, generation, first, second, *envelope, form in _RECORD.iter_unpack(data):
            if kind in (_MESSAGE, _FORM):
                assert self._incoming is not None, "a ring comes before its messages"
                if kind == _FORM:
                    self._known[form:] = [self._incoming[1].layout(first)]
                self._unread.append((*self._incoming, first, second, Envelope(*envelope), self._known[form]))
            elif kind == _CREDIT:
                self.away = False
                self._num_credited = second
                if generation == self._generation:
                    self._ring.free(first)
            elif kind == _RING:  # the kernel ends a read at a descriptor, so this is the last record, and the only ring
                self._adopt(generation, first, attached)
            elif kind == _ASK:
                self._asked = True
            elif kind == _AWAY:
                self.away = True
            else:
                raise RuntimeError(f"rank {self.peer} sent a record of kind {kind}: do all ranks run the same vpipe?")
        return True

    def read(self) -> tuple[Envelope, Any] | None:
        """Take the next message out of its ring; None where none has come.

        The peer is told later, by ``pay``: whoever reads has waited for the message.
        """
        if not self._unread:
            return None
        generation, segment, offset, position, envelope, layout = self._unread.popleft()
        value = segment.read(offset, layout)
        if generation != self._read_generation:
            self._read_generation, self._credited_position, self._quarter = generation, 0, segment.size // 4
        self._position = position
        self._num_read += 1
        return envelope, value

    def unread(self) -> Iterator[Envelope]:
        """Which messages have come and have not been read."""
        return (message[4] for message in self._unread)

    def clear(self, deliver: Deliver) -> None:
        """This rank is about to sleep: a peer that waits for room gets all there is."""
        while self._asked and (message := self.read()) is not None:
            deliver(self.peer, *message)
        self.pay()

    def pay(self) -> None:
        """Tell the peer how far this rank has read, where that is due. A peer that has asked is told of every message,
        until none is left."""
        num_untold = self._num_read - self._num_told
        if self._asked and not self._unread:
            self._asked = False
            self._credit()
        elif num_untold and (self._asked or num_untold >= UNDER_WAY // 4 or self._owes_room()):
            self._credit()

    def close(self) -> None:
        self.gone = True
        self.connection.close()
        self._segment = self._incoming = None
        self._unread.clear()

    def _owes_room(self) -> bool:
        return self._position - self._credited_position >= self._quarter

    def _credit(self) -> None:
        self._credited_position, self._num_told, self._said_away = self._position, self._num_read, False
        self._reply(_CREDIT, self._position, self._num_read, self._read_generation)

    def _renew(self, num_bytes: int) -> None:
        """Go on in a new ring. What is in the old one stays there until the receiver has read it."""
        size = -(-num_bytes // PAGE) * PAGE
        self._segment, descriptor = Segment.create(size)
        self._ring = Ring(size)
        self._generation += 1
        record = _RECORD.pack(_RING, self._generation, size, 0, *_NO_MESSAGE)
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

    def _ask(self) -> None:
        record = _RECORD.pack(_ASK, self._generation, 0, 0, *_NO_MESSAGE)
        self.connection.send(record, socket.MSG_NOSIGNAL)

    def _reply(self, kind: int, first: int = 0, second: int = 0, generation: int = 0) -> None:
        """A record for the peer's sake: one that has ended needs it no more, and what it sent is still to be read."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(_RECORD.pack(kind, generation, first, second, *_NO_MESSAGE), socket.MSG_NOSIGNAL)
