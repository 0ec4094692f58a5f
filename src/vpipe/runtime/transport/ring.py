"""Messages in memory that two processes share.

The sender decides where a message lies and tells the receiver; the receiver tells how far it has read. Nothing but
messages is in the shared memory: positions travel by socket, so no two processes ever touch the same variable.

A message lies in one piece, because tensors are copied in and out by one ``memmove`` each:

      0        tail                 head         size
      │ free   │ message │ message  │ free       │
      └────────┴─────────┴──────────┴────────────┘

Positions only grow; a place is a position modulo ``size``. A message that does not fit before the end begins at 0.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from ctypes import memmove
from typing import Any

import numpy as np

from vpipe.runtime.crossing import unflatten
from vpipe.runtime.transport.wire import ALIGN, MessageLayout, Packed, rooms


class Ring:
    """The sender's book of what is free. A message of up to half of ``size`` fits into an empty ring, anywhere."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.head = 0
        self.tail = 0

    def place(self, num_bytes: int) -> int | None:
        """Where the next message begins; ``head`` is then its end. None while there is no room."""
        begin = self.head % self.size if self.size else 0
        skipped = self.size - begin if begin + num_bytes > self.size else 0
        head = self.head + skipped + -(-num_bytes // ALIGN) * ALIGN
        if num_bytes > self.size or head - self.tail > self.size:
            return None
        self.head = head
        return 0 if skipped else begin

    def free(self, position: int) -> None:
        """The receiver has read everything before ``position``."""
        self.tail = position


class Segment:
    """Shared memory without a name: the kernel frees it with its last user, however that one ends."""

    def __init__(self, descriptor: int, size: int) -> None:
        if os.fstat(descriptor).st_size != size:
            raise RuntimeError(f"a shared segment has {os.fstat(descriptor).st_size} bytes instead of {size}")
        self.size = size
        self._memory = mmap.mmap(descriptor, size)
        self._address: int = np.frombuffer(self._memory, np.uint8).ctypes.data

    @staticmethod
    def create(size: int) -> tuple[Segment, int]:
        """A new segment and its descriptor, to be passed on and closed. Pages exist from their first write on."""
        descriptor = os.memfd_create("vpipe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return Segment(descriptor, size), descriptor

    def write(self, offset: int, packed: Packed) -> None:
        """Put the tensors of a message at ``offset``."""
        packed.write_tensors(self._address + offset)

    def read(self, offset: int, layout: MessageLayout) -> Any:
        """A copy of the message at ``offset``; the place is free afterwards."""
        if offset + layout.num_bytes > self.size:
            raise RuntimeError("a message is said to reach beyond its segment: do all ranks run the same vpipe?")
        copies = []
        for tensor, memory, begin, num_bytes in rooms(layout):
            memmove(memory.data_ptr(), self._address + offset + begin, num_bytes)
            copies.append(tensor)
        return unflatten(layout.structure, copies)
