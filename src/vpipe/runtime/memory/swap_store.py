"""Where swapped bytes of tensors in main memory wait: a file.

The file is written and read by ``pwrite`` and ``preadv`` and not mapped: pages of the system's cache do not count as
the process's memory, and a full disk is an error that can be told, where a write to a mapped page would end the process
by a signal. The file has no name from the moment it exists, so nothing is left behind however a run ends.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections import defaultdict
from typing import IO

from torch import UntypedStorage

from vpipe.errors import UserError

PAGE = 4096


class FileStore:
    """Bytes of CPU storages in a file without a name; ``TMPDIR`` says on which disk. Units of a step have storages of
    the same sizes, so a place that is free again is given to the next of its size."""

    def __init__(self) -> None:
        self.directory = tempfile.gettempdir()
        self.end = 0
        """How long the file is, as far as it is in use."""
        self._free: dict[int, list[int]] = defaultdict(list)
        """Length → where so many bytes are free."""
        self._file: IO[bytes] | None = None

    def put(self, storage: UntypedStorage) -> tuple[int, int]:
        """Write the bytes; where they are."""
        length = -(-storage.nbytes() // PAGE) * PAGE
        if not self._free[length]:
            self._free[length].append(self.end)
            self.end += length
        offset = self._free[length].pop()
        try:
            self._write(_bytes(storage), offset)
        except OSError as error:
            self._free[length].append(offset)
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
        self._free[place[1]].append(place[0])

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
        """A step has ended, or failed: nothing that is out is wanted back."""
        self.end = 0
        self._free.clear()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _bytes(storage: UntypedStorage) -> memoryview:
    """The memory itself. Not by way of numpy, which would forbid the storage ever to be resized."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
