"""Freeing a thread that waits for another rank, from outside.

A rank whose neighbour is gone may wait inside gloo, the store or shared memory, for a rank that is itself told to stop.
None of them can be interrupted (gloo's own ``abort`` in torch 2.13 leaves its waits waiting), but all of them wait for
sockets. So the sockets that were opened while the ranks met are remembered, and ``shut`` ends the connections: every
wait on them fails at once, and the group can be destroyed and made anew. Devices wait for no socket: the communicators
between them are ended too (``device_groups``).

gloo's listening sockets stay as they are: its accept loop ends the whole process where they are shut.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from vpipe.runtime.ranks import device_groups
from vpipe.runtime.ranks.device_groups import DeviceGroups

SocketIdentity = tuple[int, int]
"""(descriptor, inode): a descriptor alone is given to the next file."""


class Sockets:
    """The sockets that this process has opened inside ``noting``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted: set[SocketIdentity] = set()
        self._before: set[SocketIdentity] | None = None
        self._groups: DeviceGroups | None = None
        self._shut = False

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Remember what the body opens. A body that comes too late, after ``shut``, is shut when it ends."""
        with self._lock:
            self._before = open_now()
            self._groups = device_groups.current()
        try:
            yield
        finally:
            with self._lock:
                self._noted |= open_now() - self._before
                self._before = None
                late = self._shut
            if late:
                self.shut()

    def shut(self) -> None:
        """End every connection that was noted, also inside a body that is still waiting. Any thread may call this."""
        with self._lock:
            self._shut = True
            groups = self._groups
            found = self._noted | ((open_now() - self._before) if self._before is not None else set())
        if groups is not None:
            groups.ended = True
        for descriptor, inode in found:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if os.fstat(connection.fileno()).st_ino != inode:
                    continue
                listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if not listens or connection.family == socket.AF_UNIX:
                    connection.shutdown(socket.SHUT_RDWR)
        if groups is not None:
            groups.abort()


def open_now() -> set[SocketIdentity]:
    """The sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            facts = os.fstat(int(name))
            if stat.S_ISSOCK(facts.st_mode):
                found.add((int(name), facts.st_ino))
    return found
