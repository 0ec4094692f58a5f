"""Prose that is on the machine: documents for the ``bert`` and ``text`` builders.

A folder that the user names comes first. Without one: Debian's package descriptions in the apt lists (25 million
characters where the long descriptions were fetched), and else the descriptions of the installed packages, the
language reference that Python carries for ``help()``, and the docstrings of the standard library.
"""

from __future__ import annotations

import ast
import bz2
import gzip
import lzma
import pydoc_data.topics
import re
import subprocess
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vpipe.data.builders import Progress
from vpipe.data.files import find_files, read_paragraphs, text_files
from vpipe.errors import UserError

APT_LISTS = Path("/var/lib/apt/lists")
DPKG_STATUS = Path("/var/lib/dpkg/status")
APT_HELPER = Path("/usr/lib/apt/apt-helper")
_UNPACK: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.decompress, ".xz": lzma.decompress, ".bz2": bz2.decompress}
_SHORTEST = 80
"""Characters below which a docstring or a description is a label, not prose."""


@dataclass(frozen=True)
class Corpus:
    """Documents with where they are from. A document is one text; blank lines part its paragraphs."""

    name: str
    licence: str
    documents: list[str]


def collect(source: Path | None, progress: Progress) -> Corpus:
    """The documents of ``source``, or of this machine, without duplicates, in a fixed order."""
    if source is not None:
        found = _folder(source, progress)
        if not found:
            raise UserError(f"{source} holds no words: 0 documents; name a folder with text in it")
        return Corpus(f"text of the folder {source.name or source.resolve().name}", "that of the source text", found)
    debian = "each package's own (Debian's copyright files), mostly free"
    described = _unique(_apt_descriptions(progress))
    if described:
        return Corpus("Debian package descriptions (apt lists, Translation-en)", debian, described)
    installed = _unique(_descriptions(_read(DPKG_STATUS), "Description")) if DPKG_STATUS.is_file() else []
    python = "Python's language reference and docstrings"
    documents = _unique([*installed, *_topics(), *_docstrings(progress)])
    if installed:
        return Corpus(f"descriptions of the installed Debian packages; {python}", f"{debian}; PSF-2.0", documents)
    return Corpus(python, "PSF-2.0 (Python Software Foundation Licence)", documents)


def _unique(documents: Iterator[str] | list[str]) -> list[str]:
    return list(dict.fromkeys(text for text in documents if len(text) >= _SHORTEST))


def _folder(source: Path, progress: Progress) -> list[str]:
    """Every paragraph of every text file; a folder of many small files has documents enough without cutting them."""
    files = text_files(source)
    documents: list[str] = []
    for done, file in enumerate(files, start=1):
        documents += (paragraph for paragraph in read_paragraphs(file) if any(map(str.isalnum, paragraph)))
        progress(done, len(files))
    return list(dict.fromkeys(documents))


def _apt_descriptions(progress: Progress) -> Iterator[str]:
    files = sorted(APT_LISTS.glob("*_i18n_Translation-en*")) if APT_LISTS.is_dir() else []
    for done, file in enumerate(files, start=1):
        yield from _descriptions(_read(file), "Description-en")
        progress(done, len(files))


def _read(file: Path) -> str:
    """A package list. apt may keep it packed; lz4 is unpacked by apt's own helper, the others by Python."""
    try:
        if file.suffix == ".lz4":
            if not APT_HELPER.is_file():
                return ""
            command = [str(APT_HELPER), "cat-file", str(file)]
            raw = subprocess.run(command, capture_output=True, check=True).stdout
        else:
            raw = _UNPACK.get(file.suffix, bytes)(file.read_bytes())
    except (OSError, EOFError, lzma.LZMAError, subprocess.CalledProcessError):
        return ""  # not ours to read, or being rewritten by apt just now: there are other sources
    return raw.decode("utf-8", "replace")


def _descriptions(text: str, field: str) -> Iterator[str]:
    """The long descriptions of a Debian control file: lines that begin with a space, `` .`` for a blank one."""
    for match in re.finditer(rf"^{field}: (.*)\n((?: .*\n?)+)", text, re.MULTILINE):
        body = re.sub(r"^ \.$", "", match[2], flags=re.MULTILINE)
        yield f"{match[1].strip()}.\n\n{textwrap.dedent(body).strip()}"


def _topics() -> Iterator[str]:
    """The sections of the language reference, without its code and tables, which are indented or drawn."""
    for topic in sorted(pydoc_data.topics.topics):
        paragraphs = pydoc_data.topics.topics[topic].split("\n\n")
        prose = [p for p in paragraphs if not p.startswith((" ", "\n", "*")) and not re.search(r"[=*+-]{4}|::=", p)]
        for start in range(0, len(prose), 8):
            yield "\n\n".join(prose[start : start + 8])


def _docstrings(progress: Progress) -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    files = find_files(root, (".py",), frozenset({"site-packages", "dist-packages", "test", "tests"}))
    for done, file in enumerate(files, start=1):
        progress(done, len(files))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if ">>>" not in text:
                    yield text
