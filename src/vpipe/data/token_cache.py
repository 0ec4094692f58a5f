"""Large corpora are tokenized once, not once per process and run.

The real CodeSearchNet takes minutes to encode, and two ranks of every run need it. The stream of a large corpus is kept
in ``.vpipe/`` beside the data, under a name made from everything it depends on: the files, the tokenizer, the options.
It is then mapped, not read, so ranks of one machine share it. Where the folder cannot be written, or the disk is full,
the stream stays in memory: a cache must never be the reason that a run fails.

    file    "VPTOKEN2"  u64 count  u32 crc32 of the ids  i32 ids[count]

A stream whose checksum is another is made anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vpipe.data.manifest import sha256_of, umask

Tokens = NDArray[np.int32]

SMALLEST = 2**20
"""Bytes of source files below which a corpus is encoded anew each time."""
FOLDER = ".vpipe"
MOST = 2**34
"""Bytes of streams that a folder keeps, beside its newest one."""
_HEADER = struct.Struct("<8sQI")
_MAGIC = b"VPTOKEN2"
_CHUNK = 2**22
"""Ids that are summed at once."""


class TokenCache:
    """Where the stream of one corpus is kept; ``path`` is None where it is not worth keeping."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def stream(self, make: Callable[[], Iterable[Tokens]]) -> Tokens:
        """The ids of all pieces of ``make()`` end to end, from the cache if they are there."""
        if self.path is None:
            return _in_memory(make())
        kept = _read(self.path)
        if kept is None:
            try:
                _write(self.path, make())
                _tidy(self.path.parent)
            except OSError:
                return _in_memory(make())
            kept = _read(self.path)
        return _in_memory(make()) if kept is None else kept


def cache_for(root: Path, files: Sequence[Path], tokenizer: Any, *options: object) -> TokenCache:
    """The cache of the corpus ``files``, read with ``options``. Another text is another corpus, whatever its time."""
    if sum(file.stat().st_size for file in files) < SMALLEST:
        return TokenCache(None)
    states = [(str(file), sha256_of(file)) for file in files]
    key = hashlib.sha256(repr((states, options, tokenizer.to_str())).encode()).hexdigest()[:32]
    return TokenCache((root if root.is_dir() else root.parent) / FOLDER / f"{key}.tokens")


def _in_memory(pieces: Iterable[Tokens]) -> Tokens:
    collected = list(pieces)
    return np.concatenate(collected) if collected else np.zeros(0, dtype=np.int32)


def _read(path: Path) -> Tokens | None:
    """The mapped stream, or None if there is none or it is not whole."""
    try:
        with path.open("rb") as file:
            magic, count, checksum = _HEADER.unpack(file.read(_HEADER.size))
            if magic != _MAGIC or os.fstat(file.fileno()).st_size != _HEADER.size + 4 * count or count == 0:
                return None
        ids = np.asarray(np.memmap(path, dtype="<i4", mode="r", offset=_HEADER.size, shape=(count,)))
        found = 0
        for begin in range(0, count, _CHUNK):
            found = zlib.crc32(ids[begin : begin + _CHUNK].data, found)
        return ids if found == checksum else None
    except (OSError, struct.error, ValueError):
        return None


def _tidy(folder: Path) -> None:
    """Remove what writers that are dead have left, whose locks are free, and the oldest streams beyond ``MOST``."""
    for file in folder.glob("*.partial"):
        with file.open("rb") as left, suppress(BlockingIOError):
            fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.unlink(missing_ok=True)
    total = 0
    for number, file in enumerate(sorted(folder.glob("*.tokens"), key=lambda file: -file.stat().st_mtime_ns)):
        total += file.stat().st_size
        if number and total > MOST:
            file.unlink(missing_ok=True)


def _write(path: Path, pieces: Iterable[Tokens]) -> None:
    """Piece by piece, into a file of this process that takes its name when it is whole."""
    path.parent.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            count, checksum = 0, 0
            file.write(_HEADER.pack(_MAGIC, count, checksum))
            for piece in pieces:
                data = piece.astype("<i4").tobytes()
                file.write(data)
                count, checksum = count + len(piece), zlib.crc32(data, checksum)
            file.seek(0)
            file.write(_HEADER.pack(_MAGIC, count, checksum))
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o666 & ~umask())  # others who share the data share the stream
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
