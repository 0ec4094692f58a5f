"""Writing so that a reader, or the next run after a crash, finds the old or the new, never half of one."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

MAX_BYTES = 16 * 2**20
"""Of the small files of this room: a larger one was not written here."""


_SEAL = (b',\n "sha256": "', b'"\n}\n')


def in_json(value: Any, indent: int | None = None) -> bytes:
    """JSON as all read it: a number that is not finite is null."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False).encode()
    except ValueError:
        return json.dumps(_finite(value), indent=indent, allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def sealed(value: Mapping[str, Any]) -> bytes:
    """JSON that ends with the sha256 of all its bytes before that: any flipped bit is noticed."""
    text = in_json(value, 1).removesuffix(b"\n}")
    return text + _SEAL[0] + hashlib.sha256(text).hexdigest().encode() + _SEAL[1]


def unsealed(data: bytes) -> dict[str, Any]:
    """What ``sealed`` has written; ``ValueError`` for anything else."""
    before, after = _SEAL
    begin = max(0, len(data) - len(before) - 64 - len(after))
    if data[begin:] != before + hashlib.sha256(data[:begin]).hexdigest().encode() + after:
        raise ValueError("it does not match its checksum")
    found: dict[str, Any] = json.loads(data)
    return found


def replace(path: Path, value: Mapping[str, Any], *, durable: bool = False, seal: bool = False) -> None:
    """Put JSON in the place of a file."""
    put(path, sealed(value) if seal else in_json(value, 1) + b"\n", durable=durable)


def put(path: Path, data: bytes, *, durable: bool = False, mode: int = 0o644) -> None:
    """Write beside ``path`` and put it in its place; ``durable`` survives a power cut as well."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        write(fresh, data, durable=durable, mode=mode)
        os.replace(fresh, path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def write(path: Path, data: bytes, *, durable: bool, mode: int = 0o644) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]
        if durable:
            os.fsync(handle)
    finally:
        os.close(handle)


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Whole lines only: one write. Half a line, left by a crash or a full disk, costs itself and not the next one."""
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(handle).st_size
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        data = b"\n" * torn + in_json(line) + b"\n"
        if os.write(handle, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    """Bring a file, or the entries of a directory, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def tail(path: Path, most_bytes: int) -> str:
    """The last whole lines of a file; nothing where it cannot be read."""
    try:
        with path.open("rb") as file:
            skipped = max(0, file.seek(0, 2) - most_bytes)
            file.seek(skipped)
            text = file.read(most_bytes).decode("utf-8", errors="replace")
    except OSError:
        return ""
    return text.partition("\n")[2] if skipped else text


def read(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; ``None`` where there is no readable one."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
