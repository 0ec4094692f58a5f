"""Two ranks that are connected: records on a socket say which messages there are, whatever carries their tensors.

A record is 56 bytes. Both directions share the socket:

    FORM     as a MESSAGE, the first of its form: the text that describes it follows
    MESSAGE  a message has been sent        (generation, place, position after, envelope, number of its form)
    CREDIT   everything before a position is read                       (generation, position, messages read)
    ASK      tell me at once how far you have read: I wait for room
    AWAY     I wait elsewhere and read nothing for a while: do not wait for me
    RING     from here on messages lie in another segment of shared memory          (``ring_link``)

So of a message whose form has come before, the tensors travel alone: nothing is described or parsed again.

**Why the socket is never full**: at most ``UNDER_WAY`` messages are without credit, and the other records are few.
About 270 records fit into a socket, so ``send`` does not block, except towards a rank that is away and has more unread.

**Why no rank waits for ever**: a message stays where it is until it is taken, so that a neighbour that runs ahead fills
the ring, or the network's buffers, and not this rank's memory. But a rank that waits here and is asked reads
everything, so there is room again. A rank that goes to wait elsewhere (a collective operation, a message over gloo)
while messages for it are expected says AWAY first.
"""

from __future__ import annotations

import socket
import struct
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from vpipe.runtime.transport.wire import MOST_LAYOUTS, Envelope, MessageLayout, Packed, parsed

RECORD = struct.Struct("<IIQQqiiiiII")
NO_MESSAGE = (0, 0, 0, 0, 0, 0, 0)
RING, FORM, MESSAGE, CREDIT, ASK, AWAY = range(1, 7)
addressed = tuple.__new__
"""``Envelope`` of a record's numbers, without a call of Python."""
_ONE_DESCRIPTOR = socket.CMSG_SPACE(array("i").itemsize)
BUFFER = 256 * RECORD.size
UNDER_WAY = 128
START_BYTES = 128 * 1024
WINDOW = 16
"""For how many of the largest message there is room."""


class Link(ABC):
    """This rank's end. ``connection`` is a connected stream socket for records; ``most_bytes`` may be under way. A kind
    of link says where tensors lie on their way (``_put``, ``_get``, ``_free``)."""

    eager = 0
    """Messages that a rank which waits for another one copies out: a message too many is memory."""

    def __init__(self, peer: int, connection: socket.socket, most_bytes: int) -> None:
        self.peer = peer
        self.connection = connection
        self.gone = False
        """Whether the peer has closed its end; what it sent before has been read."""
        self.away = False
        """Whether the peer waits elsewhere."""
        self.too_large: dict[tuple[int, int, int], int] = {}
        """(source stage, target stage, backward) → bytes of a message that should go another way from the next step on;
        both ends note the same."""
        self._most_bytes = most_bytes
        self._generation = 0
        self._num_sent = 0
        self._num_credited = 0
        self._forms: dict[int, tuple[int, MessageLayout]] = {}
        """id of a form → (its number, itself), of those that the peer knows."""
        self._known: list[MessageLayout] = []
        """The peer's forms, by number."""
        self._incoming: Any = None
        """What messages now come in."""
        self._unread: deque[tuple[Envelope, MessageLayout, Any, int, int]] = deque()
        """(envelope, form, what it lies in, where, position after) of messages that have come and lie where they
        came."""
        self._begun = b""
        """The beginning of a record whose end has not come."""
        self._attached: list[tuple[int, int, bytes]] = []
        """Descriptors that came with the first byte of a record, perhaps before its end."""
        self._read_generation = 0
        self._position = 0
        self._credited_position = 0
        self._quarter = 0
        self._num_read = 0
        self._num_told = 0
        self._said_away = False
        self._asked = False
        self.owes = False
        """Whether there may be something to tell the peer (``pay``): it has asked, or messages have been read."""

    @abstractmethod
    def _put(self, packed: Packed) -> tuple[int, int] | None:
        """Send a message's tensors: where they lie, and the position after them; None if there is no room now."""

    @abstractmethod
    def _get(self, layout: MessageLayout, incoming: Any, place: int) -> Any:
        """The value of a message that has come, copied from where it lies."""

    @abstractmethod
    def _free(self, position: int) -> None:
        """The peer has read everything before ``position``."""

    def send(self, packed: Packed) -> bool:
        """Send a message and say so; False if there is no room now."""
        is_full = self._num_sent - self._num_credited >= UNDER_WAY and not self.away
        placed = None if is_full else self._put(packed)
        if placed is None:
            return False
        self._num_sent += 1
        form, text = self._forms.get(id(packed.layout)), b""
        kind, number = (MESSAGE, form[0]) if form is not None else (FORM, self._number(packed.layout))
        if kind == FORM:
            text = packed.layout.text
        record = RECORD.pack(kind, self._generation, *placed, *packed.envelope, number, len(text))
        try:
            self.connection.sendall(record + text, socket.MSG_NOSIGNAL)
        except OSError as error:  # a network that is gone has many names
            raise ConnectionResetError(str(error)) from None
        return True

    def make_room(self, num_bytes: int) -> None:
        """After a message found no room: take more, or ask for credit."""
        self._ask()

    def receive(self) -> bool:
        """Hear what has come, without waiting; whether anything has. Messages stay where they are until ``read``."""
        try:
            data, attached, *_ = self.connection.recvmsg(BUFFER, _ONE_DESCRIPTOR, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            data, attached = b"", []
        if not data:
            self.gone = True
            return False
        self._attached += attached
        data, at = self._begun + data, 0
        while at + RECORD.size <= len(data):
            record = RECORD.unpack_from(data, at)
            kind, generation, first, second, form = record[0], record[1], record[2], record[3], record[9]
            after = at + RECORD.size
            end = after + record[10]
            if end > len(data):
                break
            if kind == FORM:
                self._known[form:] = [parsed(data[after:end])]
            if kind in (MESSAGE, FORM):
                envelope = addressed(Envelope, record[4:9])
                self._unread.append((envelope, self._known[form], self._incoming, first, second))
            else:
                self._heard(kind, generation, first, second)
            at = end
        self._begun = data[at:]
        return True

    def read(self) -> tuple[Envelope, Any] | None:
        """Take the next message; None where none has come. The peer is told later, by ``pay``, because this rank has
        waited for the message."""
        if not self._unread:
            return None
        envelope, layout, incoming, place, position = self._unread.popleft()
        value = self._get(layout, incoming, place)
        self._position = position
        self._num_read += 1
        self.owes = True
        return envelope, value

    def unread(self) -> Iterator[Envelope]:
        """Which messages have come and have not been read."""
        return (message[0] for message in self._unread)

    @property
    def has_unread(self) -> bool:
        return bool(self._unread)

    def drain(self, patience: float) -> bool:
        """Wait until everything that was sent has left; whether it has."""
        return True

    def leave(self) -> None:
        """Say that this rank is about to wait elsewhere."""
        if not self._said_away and not self.gone:
            self._said_away = True
            self._reply(AWAY)

    def clear(self, mail: dict[tuple[int, Envelope], Any]) -> None:
        """This rank is about to sleep: a peer that waits for room gets all there is."""
        while self._asked and (message := self.read()) is not None:
            mail[self.peer, message[0]] = message[1]
        self.pay()

    def pay(self) -> None:
        """Tell the peer how far this rank has read, where that is due. A peer that has asked is told of every message,
        until none is left."""
        num_untold = self._num_read - self._num_told
        if self._asked and not self._unread:
            self._asked = False
            self._credit()
        elif num_untold and (
            self._asked or num_untold >= UNDER_WAY // 4 or self._position - self._credited_position >= self._quarter
        ):
            self._credit()
        self.owes = self._asked

    def close(self) -> None:
        self.gone = True
        self.connection.close()
        self._unread.clear()

    def _number(self, layout: MessageLayout) -> int:
        """The number of a form that the peer is about to know; where there are too many, counting begins again."""
        if len(self._forms) >= MOST_LAYOUTS:
            self._forms.clear()
        number = len(self._forms)
        self._forms[id(layout)] = (number, layout)
        return number

    def _heard(self, kind: int, generation: int, first: int, second: int) -> None:
        """A record that is about no message."""
        if kind == CREDIT:
            self.away = False
            self._num_credited = second
            if generation == self._generation:
                self._free(first)
        elif kind == ASK:
            self._asked = self.owes = True
        elif kind == AWAY:
            self.away = True
        else:
            raise RuntimeError(f"rank {self.peer} sent a record of kind {kind}: do all ranks run the same vpipe?")

    def _credit(self) -> None:
        self._credited_position, self._num_told, self._said_away = self._position, self._num_read, False
        self._reply(CREDIT, self._position, self._num_read, self._read_generation)

    def _ask(self) -> None:
        self.connection.send(RECORD.pack(ASK, self._generation, 0, 0, *NO_MESSAGE), socket.MSG_NOSIGNAL)

    def _reply(self, kind: int, first: int = 0, second: int = 0, generation: int = 0) -> None:
        """A record for the peer's sake: one that has ended needs it no more, and what it sent is still to be read."""
        with suppress(OSError):
            self.connection.send(RECORD.pack(kind, generation, first, second, *NO_MESSAGE), socket.MSG_NOSIGNAL)
