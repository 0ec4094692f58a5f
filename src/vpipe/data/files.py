"""Reading files that others wrote: every fault becomes one sentence with the file, the place in it, and the remedy.

All readers and builders of this room open their files here, so that a missing folder, a link that leads back to
itself, a picture among the texts or a broken line is found once, in one way, in the first second of a run and not in
its third hour.
"""

from __future__ import annotations

import errno
import gzip
import importlib
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vpipe.errors import UserError

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".txt.gz")

SPLITS = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "dev": "valid",
    "test": "test",
    "testing": "test",
}


def require(module: str) -> Any:
    """An optional library, or the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f'this data needs the library {package}; install it with: pip install "vpipe[data]"') from None


def existing(path: Path | None, builder: str | None = None) -> Path:
    """``path``, if it is there; else how to make it."""
    if path is None:
        place, problem = Path("data") / (builder or "set"), "no data directory is set; name one in dataset.path"
    else:
        place, problem = path, f"there is no data at {path}"
        try:
            os.stat(path)
            return path
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise unreadable(path, error) from None
    remedy = f"; build it with: vpipe data build {builder} --out {place}" if builder else "; check the path"
    raise UserError(problem + remedy)


def unreadable(path: Path, error: OSError) -> UserError:
    """What the operating system says about ``path``, as our sentence."""
    if error.errno == errno.ELOOP:
        return _loop(path)
    return UserError(f"{path} cannot be read ({error.strerror or error}); check its permissions, or remove it")


def _loop(path: Path) -> UserError:
    return UserError(f"{path} is a symbolic link that leads back to itself; remove the link or name another folder")


def find_files(root: Path, suffixes: tuple[str, ...], leave_out: frozenset[str] = frozenset()) -> list[Path]:
    """The files under ``root`` with one of ``suffixes``, sorted by path; ``root`` itself if it is a file.

    Follows links to folders; hidden files and folders, and those named in ``leave_out``, are not looked at.
    """
    return [root] if root.is_file() else sorted(_walk(root, suffixes, leave_out, ()))


def _walk(
    folder: Path, suffixes: tuple[str, ...], leave_out: frozenset[str], above: tuple[tuple[int, int], ...]
) -> Iterator[Path]:
    try:
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in above:
            raise _loop(folder)
        above = (*above, (status.st_dev, status.st_ino))
        with os.scandir(folder) as found:
            entries = [entry for entry in found if not entry.name.startswith(".") and entry.name not in leave_out]
    except OSError as error:
        raise unreadable(folder, error) from None
    for entry in entries:
        path = folder / entry.name
        try:
            is_folder = stat.S_ISDIR(entry.stat().st_mode) if entry.is_symlink() else entry.is_dir()
        except OSError as error:
            raise unreadable(path, error) from None
        if is_folder:
            yield from _walk(path, suffixes, leave_out, above)
        elif entry.name.endswith(suffixes):
            yield path


def split_of(path: Path, root: Path) -> str | None:
    """``train``, ``valid`` or ``test``, if a word of the file's name says so, or a folder above it."""
    words = re.split(r"[^a-z]+", path.name.lower())
    folders = () if path == root else reversed(path.relative_to(root).parts[:-1])
    return next((SPLITS[word] for word in (*words, *(each.lower() for each in folders)) if word in SPLITS), None)


def named_split(path: Path) -> str | None:
    """The split that a whole part of the file's name says, as in ``train.txt`` or ``wiki.valid.txt``; nothing looser,
    for a folder of texts may well hold a ``training-guide.md``."""
    return next((SPLITS[part] for part in path.name.lower().split(".") if part in SPLITS), None)


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file, gzipped or not, numbered from 1, without their ends."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            position, number, ends_in_cr = 0, 0, False
            for raw in stream:
                text = _decode(raw, path, position).rstrip("\r\n")
                ends_in_cr = ends_in_cr or (position == 0 and "\r" in text)  # as old files of one kind of machine do
                for line in text.split("\r") if ends_in_cr else [text]:
                    number += 1
                    yield number, line
                position += len(raw)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path} is not a whole gzip file ({error}); copy it again") from None
    except OSError as error:
        raise unreadable(path, error) from None


def read_text(path: Path) -> str:
    """A whole text file in UTF-8."""
    try:
        return _decode(path.read_bytes(), path, 0)
    except OSError as error:
        raise unreadable(path, error) from None


def _decode(raw: bytes, path: Path, position: int) -> str:
    nul = raw.find(b"\0")
    if nul >= 0:
        raise UserError(f"{path} is a binary file, not text (byte 0x00 at {position + nul}); leave it out")
    try:
        return raw.decode("utf-8" if position else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte 0x{raw[error.start]:02x} at {position + error.start}); "
            "convert it with iconv, or leave it out"
        ) from None


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON-lines file with their line numbers."""
    for number, line in lines(path):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path}:{number}: not JSON ({error.msg} at column {error.colno}); mend the line or remove it"
            ) from None
        except RecursionError:
            raise UserError(f"{path}:{number}: JSON nested too deeply to be read; remove the line") from None
        except ValueError:  # an integer of thousands of digits
            raise UserError(f"{path}:{number}: a number too long to be read; mend the line or remove it") from None
        if not isinstance(value, dict):
            raise UserError(
                f"{path}:{number}: a JSON {type(value).__name__}, but each line must be an object in braces"
            )
        if "\\ud" in line.lower() and not _can_be_written(value):
            raise UserError(f"{path}:{number}: half of a surrogate pair, which is no text; mend the line or remove it")
        yield number, value


def _can_be_written(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def text_files(root: Path) -> list[Path]:
    """The text files under ``root``; ``root`` itself, whatever its suffix, if it is a file."""
    files = find_files(root, TEXT_SUFFIXES)
    if not files:
        raise UserError(
            f"{root} holds no text: no file ends in {', '.join(TEXT_SUFFIXES)}; name another folder or a single file"
        )
    return files


def read_paragraphs(file: Path) -> Iterator[str]:
    """What stands between blank lines, line ends kept."""
    paragraph: list[str] = []
    for _, line in lines(file):
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield "\n".join(paragraph)
            paragraph = []
    if paragraph:
        yield "\n".join(paragraph)
