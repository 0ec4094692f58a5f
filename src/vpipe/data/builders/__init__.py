"""Data sets from text that is on this machine already: nothing is downloaded, nothing is shipped.

Each builder is one module with one function, ``write(folder, request) -> Source``. What they share stands here: the
target appears whole or not at all, with a manifest. No builder imports torch.

Words: docs/glossary.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import cast

from vpipe.data.files import existing
from vpipe.data.manifest import Manifest, checksums, new_folder
from vpipe.errors import UserError, nearest

Progress = Callable[[int, int], None]
"""Called with how much is done and how much there is, in the builder's unit; both begin anew with another phase."""

BUILDERS = ("bert", "code", "text", "translation")


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    seed: int
    limit: int | None
    """The most items to take: functions, documents or pairs."""
    source: Path | None
    language: str | None
    progress: Progress


@dataclass(frozen=True)
class BuiltData:
    """What a builder found and how much it wrote."""

    name: str
    licence: str
    sha256: str
    counts: dict[str, int] = field(default_factory=dict)


def build(
    name: str,
    out: Path,
    *,
    seed: int = 0,
    limit: int | None = None,
    source: Path | None = None,
    language: str | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Builds the data set ``name`` in the new folder ``out``. The same source, seed and limit give the same bytes.

    ``source`` is a folder of text (bert, text), of Python files (code), or of gettext catalogues (translation); by
    default what the machine has. ``language`` is the target language of translation.
    """
    if name not in BUILDERS:
        raise UserError(f"there is no builder {name!r}: choose from {', '.join(BUILDERS)}{nearest(name, BUILDERS)}")
    if limit is not None and limit < 1:
        raise UserError(f"--limit is {limit}; it must be 1 or more")
    if seed < 0:
        raise UserError(f"--seed is {seed}; it must be 0 or more")
    if language is not None and name != "translation":
        raise UserError(
            f"the builder {name!r} has no language, so --language {language} means nothing; only translation has one"
        )
    if source is not None:
        existing(source)
    request = Request(seed, limit, source, language, progress or (lambda done, total: None))
    write = cast("Callable[[Path, Request], BuiltData]", import_module(f"vpipe.data.builders.{name}").write)
    with new_folder(out) as folder:
        found = write(folder, request)
        manifest = Manifest(
            name=name,
            source=found.name,
            source_sha256=found.sha256,
            licence=found.licence,
            seed=seed,
            limit=limit,
            language=language,
            counts=found.counts,
            files=checksums(folder),
        )
        manifest.write(folder)
    return manifest


def digest(texts: Iterable[str]) -> str:
    """One sha256 over texts in order."""
    total = hashlib.sha256()
    for text in texts:
        total.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return total.hexdigest()


def shuffled(items: list[str], seed: int) -> list[str]:
    """``items`` in an order that depends on each item and the seed only: one more item does not move the others."""
    return sorted(items, key=lambda item: hashlib.sha256(f"{seed}\0{item}".encode("utf-8", "surrogatepass")).digest())


def letters(text: str) -> str:
    """What two texts have in common that say the same: held-out text must not stand in train, however it is written."""
    return "".join(filter(str.isalnum, text.casefold())) or text


def dealt(items: list[str], what: str) -> dict[str, list[str]]:
    """A tenth to valid and to test each, at least one, the rest to train; with ``what`` they are in a sentence."""
    share = max(1, len(items) // 10)
    if len(items) < 3:
        raise UserError(
            f"{len(items)} {what} are too few for train, valid and test; raise --limit or name more with --source"
        )
    return {"train": items[2 * share :], "valid": items[:share], "test": items[share : 2 * share]}
