"""Built data appear whole or not at all, and say where they come from.

A builder that is interrupted, or meets a full disk, must not leave a folder that the next run takes for a data set.
It therefore writes into a temporary folder beside the target and renames it at the end. The manifest inside names
source, seed, counts, licence and the checksum of every file: two people can see that they train on the same data.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from threading import current_thread, main_thread

from vpipe.data.files import read_text
from vpipe.errors import UserError

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What a built data set says about itself, in ``manifest.json``."""

    name: str
    """The builder: code, bert, translation, text."""
    source: str
    """Where the text comes from, in words; no path of this machine."""
    source_sha256: str
    """Of the text that was taken from the source, in the order it was taken."""
    licence: str
    seed: int
    limit: int | None
    language: str | None
    counts: dict[str, int]
    files: dict[str, str]
    """Path inside the folder -> sha256."""

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        path = folder / MANIFEST
        try:
            value = json.loads(read_text(path))
            return cls(**{field.name: value[field.name] for field in fields(cls)})
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise UserError(f"{path} is not a manifest of vpipe ({error!r}); build the data set again") from None

    def write(self, folder: Path) -> None:
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"
        (folder / MANIFEST).write_text(text, encoding="utf-8")


def checksums(folder: Path) -> dict[str, str]:
    """The sha256 of every file under ``folder`` but the manifest, by its path inside."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in found}


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write into that becomes ``out`` when the block ends well, and vanishes when it does not."""
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise UserError(f"{out} exists already; name another --out or remove it first")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}); name another --out") from None
    before = signal.signal(signal.SIGTERM, _ended) if current_thread() is main_thread() else None
    try:
        yield temporary
        temporary.chmod(0o777 & ~umask())
        os.replace(temporary, out)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise UserError(f"{out} was made by another process meanwhile; it stays, name another --out") from None
        if _disk_is_full(error):
            raise UserError(
                f"the disk is full: {out} was not built, nothing is left of it; free space or name another --out"
            ) from None
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _ended(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _disk_is_full(error: Exception) -> bool:
    """The libraries below us have an ``errno`` or only a text."""
    full = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError) and error.errno in full:
        return True
    return any(f"errno = {code}," in str(error) or f"os error {code})" in str(error) for code in full)


def umask() -> int:
    """What this process takes away from the permissions of new files."""
    current = os.umask(0)
    os.umask(current)
    return current
