"""fairseq's binarised sentences: ``<prefix>.idx`` + ``<prefix>.bin``, and ``dict.<lang>.txt``.

    idx   "TNTIDX\\0\\0"  u64 version=1  u64 dtype code  u64 element size  u64 n  u64 s
          i64 dim_offsets[n+1]  i64 data_offsets[n+1]  i64 sizes[s]          (offsets count elements)
    bin   the sentences, end to end; ids are stored plus one

The newer memory-mapped form ("MMIDIDX\\0\\0", ids stored as they are) is read too. An index is checked whole when it
is opened: a wrong offset would otherwise come back as another sentence, silently.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from vpipe.data.files import existing, lines, unreadable
from vpipe.data.tokenizer import SPECIAL
from vpipe.errors import UserError

MAGIC = b"TNTIDX\0\0"
OVERWRITE = " #fairseq:overwrite"
MMAP_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<8sQQQQQ")
_MMAP_HEADER = struct.Struct("<9sQBQ")
_DTYPES: dict[int, type[np.integer[Any]]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
    9: np.uint32,
    10: np.uint64,
}


class Sentences(Sequence[NDArray[np.int64]]):
    """The sentences of one file pair, ids from 0. The ids stay on disk and are read when asked for."""

    def __init__(self, values: NDArray[Any], offsets: NDArray[np.int64], minus: int) -> None:
        self._values, self._offsets, self._minus = values, offsets, minus

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> NDArray[np.int64]: ...
    @overload
    def __getitem__(self, index: slice) -> list[NDArray[np.int64]]: ...
    def __getitem__(self, index: int | slice) -> NDArray[np.int64] | list[NDArray[np.int64]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"sentence {index} of {len(self)}")
        start, stop = self._offsets[index], self._offsets[index + 1]
        return self._values[start:stop].astype(np.int64) - self._minus

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.diff(self._offsets)

    @property
    def highest(self) -> int:
        """The highest id of all, -1 if there are no sentences."""
        return int(self._values.max()) - self._minus if self._values.size else -1


def read_sentences(prefix: Path) -> Sentences:
    """The pair ``<prefix>.idx``, ``<prefix>.bin``."""
    index, data = (prefix.with_name(prefix.name + suffix) for suffix in (".idx", ".bin"))
    existing(index)
    existing(data)
    try:
        raw = index.read_bytes()
        num_bytes = data.stat().st_size
    except OSError as error:
        raise unreadable(index, error) from None
    if raw.startswith(MMAP_MAGIC):
        offsets, dtype, minus = _mmap_offsets(index, raw)
    elif raw.startswith(MAGIC):
        offsets, dtype, minus = _offsets(index, raw)
    else:
        raise UserError(f"{index} does not begin with {MAGIC!r} but with {raw[:8]!r}; it is not a fairseq index")
    if (offsets[0] != 0) or (np.diff(offsets) < 0).any():
        where = 0 if offsets[0] != 0 else int(np.flatnonzero(np.diff(offsets) < 0)[0]) + 1
        raise _damaged(index, f"the offset of sentence {where} is {offsets[where]}, which is out of order")
    expected = int(offsets[-1]) * dtype.itemsize
    if expected != num_bytes:
        raise _damaged(data, f"it has {num_bytes} bytes, but {index.name} describes {expected}")
    values = np.asarray(np.memmap(data, dtype=dtype, mode="r")) if num_bytes else np.zeros(0, dtype=dtype)
    return Sentences(values, offsets, minus)


def _offsets(index: Path, raw: bytes) -> tuple[NDArray[np.int64], np.dtype[Any], int]:
    if len(raw) < _HEADER.size:
        raise _damaged(index, f"it has {len(raw)} bytes, fewer than the {_HEADER.size} of its header")
    _, version, code, element_size, num, num_dims = _HEADER.unpack_from(raw)
    dtype = _dtype(index, version, code)
    if element_size != dtype.itemsize:
        raise _damaged(index, f"it says {element_size} bytes per id, but its type {dtype} has {dtype.itemsize}")
    expected = _HEADER.size + 8 * (2 * (num + 1) + num_dims)
    if len(raw) != expected:
        raise _damaged(index, f"it has {len(raw)} bytes, but {num} sentences need {expected}")
    numbers = np.frombuffer(raw, dtype="<i8", offset=_HEADER.size).astype(np.int64)
    dim_offsets, offsets, sizes = np.split(numbers, [num + 1, 2 * (num + 1)])
    if num_dims != num or not np.array_equal(dim_offsets, np.arange(num + 1)):
        raise _damaged(index, f"it describes {num_dims} dimensions for {num} sentences, but a sentence has one")
    if not np.array_equal(np.diff(offsets), sizes):
        sentence = int(np.flatnonzero(np.diff(offsets) != sizes)[0])
        raise _damaged(
            index,
            f"sentence {sentence} has size {sizes[sentence]}, but its offsets are {np.diff(offsets)[sentence]} apart",
        )
    return offsets, dtype, 1


def _mmap_offsets(index: Path, raw: bytes) -> tuple[NDArray[np.int64], np.dtype[Any], int]:
    if len(raw) < _MMAP_HEADER.size:
        raise _damaged(index, f"it has {len(raw)} bytes, fewer than the {_MMAP_HEADER.size} of its header")
    _, version, code, num = _MMAP_HEADER.unpack_from(raw)
    dtype = _dtype(index, version, code)
    expected = _MMAP_HEADER.size + num * (4 + 8)
    if len(raw) != expected:
        raise _damaged(index, f"it has {len(raw)} bytes, but {num} sentences need {expected}")
    sizes = np.frombuffer(raw, dtype="<i4", count=num, offset=_MMAP_HEADER.size).astype(np.int64)
    pointers = np.frombuffer(raw, dtype="<i8", count=num, offset=_MMAP_HEADER.size + 4 * num)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
    if not np.array_equal(pointers, offsets[:-1] * dtype.itemsize):
        sentence = int(np.flatnonzero(pointers != offsets[:-1] * dtype.itemsize)[0])
        raise _damaged(
            index, f"sentence {sentence} points to byte {pointers[sentence]}, not {offsets[sentence] * dtype.itemsize}"
        )
    return offsets, dtype, 0


def _dtype(index: Path, version: int, code: int) -> np.dtype[Any]:
    if version != 1:
        raise _damaged(index, f"its version is {version}, not 1")
    if code not in _DTYPES:
        raise _damaged(index, f"its type code is {code}; codes of whole numbers are {', '.join(map(str, _DTYPES))}")
    return np.dtype(_DTYPES[code]).newbyteorder("<")


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path} is damaged: {what}; copy it again, or binarise the text again")


def read_dictionary(path: Path) -> tuple[str, ...]:
    """The symbols of one language by id: ``symbol count`` per line of the file; the first four are special and not in
    it."""
    existing(path)
    symbols = list(SPECIAL)
    known = set(symbols)
    for number, line in lines(path):
        symbol, _, count = line.removesuffix(OVERWRITE).rpartition(" ")
        if not symbol or not count.isdigit():
            raise UserError(f"{path}:{number}: {line[:40]!r} is not a symbol and its count; binarise the text again")
        if symbol in known and not line.endswith(OVERWRITE):
            raise UserError(f"{path}:{number}: the symbol {symbol!r} stands there twice; binarise the text again")
        symbols.append(symbol)  # one that is overwritten keeps its id beside the new one
        known.add(symbol)
    return tuple(symbols)
