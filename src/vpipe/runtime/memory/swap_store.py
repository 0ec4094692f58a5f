"""Where swapped bytes of tensors in main memory wait: a file.

The file is written and read by ``pwrite`` and ``preadv`` and not mapped: pages of the system's cache do not count as
the process's memory, and a full disk is an error that can be told, where a write to a mapped page would end the process
by a signal. The file has no name from the moment it exists, so nothing is left behind however a run ends.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from bisect import bisect_left
from typing import IO

from torch import UntypedStorage

from vpipe.errors import UserError

PAGE = 4096


class Extents:
    """Which parts of a file are free: the first gap that is large enough is taken, neighbouring gaps become one."""

    def __init__(self) -> None:
        self.end = 0
        self._gaps: list[tuple[int, int]] = []
        """(offset, length), by offset; the last one never touches ``end``."""

    def take(self, length: int) -> int:
        """The offset of ``length`` bytes that nobody has."""
        for index, (offset, room) in enumerate(self._gaps):
            if room >= length:
                self._gaps[index : index + 1] = [(offset + length, room - length)] if room > length else []
                return offset
        offset, self.end = self.end, self.end + length
        return offset

    def give_back(self, offset: int, length: int) -> None:
        index = bisect_left(self._gaps, (offset, length))
        if index < len(self._gaps) and self._gaps[index][0] == offset + length:
            length += self._gaps.pop(index)[1]
        if index and sum(self._gaps[index - 1]) == offset:
            index -= 1
            offset, more = self._gaps.pop(index)
            length += more
        if offset + length == self.end:
            self.end = offset
        else:
            self._gaps.insert(index, (offset, length))


class FileStore:
    """Bytes of CPU storages in a file without a name; ``TMPDIR`` says on which disk."""

    def __init__(self) -> None:
        self.directory = tempfile.gettempdir()
        self.extents = Extents()
        self._file: IO[bytes] | None = None

    def put(self, storage: UntypedStorage) -> tuple[int, int]:
        """Write the bytes; where they are."""
        length = -(-storage.nbytes() // PAGE) * PAGE
        offset = self.extents.take(length)
        try:
            self._write(_bytes(storage), offset)
        except OSError as error:
            self.extents.give_back(offset, length)
            raise UserError(
                f"the swap file in {self.directory} cannot be written at byte {offset} for {storage.nbytes()} more "
                f"({error.strerror}); set TMPDIR to a directory on a larger disk, or swap fewer layers"
            ) from None
        return offset, length

    def look(self, place: tuple[int, int], storage: UntypedStorage) -> None:
        """Read the bytes into ``storage``; they also stay where they are."""
        self._read(_bytes(storage), place[0])

    def get(self, place: tuple[int, int], storage: UntypedStorage) -> None:
        """Read the bytes back into ``storage``; their place is free again."""
        self.look(place, storage)
        self.extents.give_back(*place)

    def _write(self, view: memoryview, offset: int) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="vpipe-swap-", dir=self.directory)  # noqa: SIM115 - until close
        while view:
            done = os.pwrite(self._file.fileno(), view, offset)
            view, offset = view[done:], offset + done

    def _read(self, view: memoryview, offset: int) -> None:
        assert self._file is not None
        while view:
            done = os.preadv(self._file.fileno(), [view], offset)
            if not done:
                raise OSError(f"the swap file in {self.directory} ends at byte {offset}, in the middle of a tensor")
            view, offset = view[done:], offset + done

    def clear(self) -> None:
        """Forget everything that is out: the step has failed."""
        self.extents = Extents()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _bytes(storage: UntypedStorage) -> memoryview:
    """The memory itself. Not by way of numpy, which would forbid the storage ever to be resized."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
