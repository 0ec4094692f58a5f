"""The store at which the ranks of a run meet: names and values in the memory of one process, behind a ``Door``.

torch's own store asks no guest who it is, tells each of them all names, and some of its servers wait for one guest
while all others wait for them. This one serves all that know the run's secret, at once.

    guest → store   [what, arguments…]      store → guest   the answer; null where it did not come in time

Values are text in which a character is a byte.
"""

from __future__ import annotations

import select
import socket
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple

from vpipe.door import Door, Letters

STORE = "VPIPE_STORE"
"""The variable in which a launcher that keeps the store says where: host:port."""
PURPOSE = "store"


class _Waiting(NamedTuple):
    letters: Letters
    keys: list[str]
    until: float


class Store:
    """Serves at a listening socket."""

    def __init__(self, listener: socket.socket, secret: str) -> None:
        self._listener = listener
        self.port = int(listener.getsockname()[1])
        self._door = Door(listener, secret, PURPOSE)
        self._values: dict[str, str] = {}
        self._guests: dict[int, Letters] = {}
        self._waiting: list[_Waiting] = []
        self._events = select.epoll()
        self._events.register(self._door, select.EPOLLIN)

    def stop(self) -> None:
        """End ``serve``, from another thread."""
        with suppress(OSError):  # it has ended
            self._listener.shutdown(socket.SHUT_RDWR)

    def serve(self) -> None:
        try:
            while True:
                late = min((waiting.until for waiting in self._waiting), default=None)
                for descriptor, _ in self._events.poll(None if late is None else max(0.0, late - monotonic())):
                    if descriptor == self._door.fileno():
                        self._welcome()
                    else:
                        self._read(descriptor)
                self._answer_waiting()
        except ConnectionAbortedError:
            for letters in self._guests.values():
                letters.connection.close()
            self._door.close()
            self._events.close()

    def _welcome(self) -> None:
        for guest in self._door.guests():
            guest.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._guests[guest.connection.fileno()] = Letters(guest, host=True)
            self._events.register(guest.connection, select.EPOLLIN)

    def _read(self, descriptor: int) -> None:
        letters = self._guests[descriptor]
        try:
            for what, *arguments in letters.receive():
                if what == "wait":
                    keys, seconds = arguments
                    self._waiting.append(_Waiting(letters, keys, monotonic() + seconds))
                else:
                    letters.send(self._answer(what, *arguments))
        except (OSError, EOFError, ValueError, TypeError):
            self._waiting = [waiting for waiting in self._waiting if waiting.letters is not letters]
            del self._guests[descriptor]
            letters.connection.close()

    def _answer_waiting(self) -> None:
        now, still = monotonic(), []
        for waiting in self._waiting:
            there = all(key in self._values for key in waiting.keys)
            if there or now >= waiting.until:
                try:
                    waiting.letters.send([self._values[key] for key in waiting.keys] if there else None)
                except OSError:
                    continue  # its end is the next that is heard of it
            else:
                still.append(waiting)
        self._waiting = still

    def _answer(self, what: str, *arguments: Any) -> Any:
        values = self._values
        match what, arguments:
            case "set", (key, value):
                values[key] = value
            case "add", (key, number):
                values[key] = str(int(values.get(key, "0")) + number)
                return int(values[key])
            case "compare_set", (key, expected, value):
                if values.get(key, "") == expected:
                    values[key] = value
                return values.get(key, expected)
            case "check", (keys,):
                return all(key in values for key in keys)
            case "delete", (key,):
                return values.pop(key, None) is not None
            case _:
                raise ValueError(what)
        return True
