"""The event loop of a launcher and of a node: readable descriptors, one at a time, without threads.

A signal, a line of output, a report and the end of a process are all readable descriptors.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import IO, Any

from vpipe.launch.place import Connection

Source = int | socket.socket | IO[bytes]


class JsonLines:
    """Bytes in, whole messages out, one JSON object a line; the beginning of the next one waits."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.split(data)]

    def split(self, data: bytes) -> list[bytes]:
        """The lines, which may be no messages."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines

    def last(self) -> str:
        """A line that has no end yet."""
        return self._rest.decode(errors="replace")


class EventLoop:
    """Calls the function that reads a descriptor when there is something to read."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, source: Source, read: Callable[[], object]) -> None:
        self._selector.register(source, selectors.EVENT_READ, read)

    def forget(self, source: Source) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def watches(self, source: Source) -> bool:
        with suppress(ValueError):  # it is closed
            return source in self._selector.get_map()
        return False

    def turn(self, seconds: float) -> None:
        """Wait so long at most, and read what there is."""
        for key, _ in self._selector.select(min(max(seconds, 0.0), 1.0)):
            if self._selector.get_map().get(key.fd) == key:  # else an event before has closed it
                key.data()

    def wait(self, processes: Sequence[Connection], within: float, patient: Callable[[], bool]) -> None:
        """Until the processes have ended, or time or patience has; what others say is heard meanwhile."""
        until = monotonic() + within
        while any(process.poll() is None for process in processes) and monotonic() < until and patient():
            with suppress(BrokenPipeError):
                self.turn(0.05)

    @contextmanager
    def hearing(self, asked: Callable[[int], None]) -> Iterator[None]:
        """Hear signals inside the loop (in the main thread; elsewhere Python cannot)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        heeded = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        before = {number: signal.signal(number, lambda *_: None) for number in heeded}
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

        def read() -> None:
            for number in read_now(reader) or b"":
                if number in before:
                    asked(number)

        self.watch(reader, read)
        try:
            yield
        finally:
            self.forget(reader)
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(reader)
            os.close(writer)

    def close(self) -> None:
        self._selector.close()


def read_now(fd: int) -> bytes | None:
    """What there is; empty at the end of the stream, None if there is nothing yet."""
    try:
        return os.read(fd, 65536)
    except BlockingIOError:
        return None
    except OSError:
        return b""  # a terminal whose other end is closed
