"""``translation``: what programs say, in English and one other language, from the gettext catalogues installed on the
machine.

A catalogue (``<localedir>/<language>/LC_MESSAGES/*.mo``) pairs each English message with its translation. They are
written as plain parallel text.
"""

from __future__ import annotations

import gettext
import struct
from collections.abc import Iterator
from pathlib import Path

from vpipe.data import tokenizer
from vpipe.data.builders import BuiltData, Request, dealt, digest, letters, shuffled
from vpipe.data.files import find_files, unreadable
from vpipe.errors import UserError

SOURCE_LANGUAGE = "en"
DEFAULT_LANGUAGE = "de"
VOCAB_SIZE = 8192
_LONGEST_RATIO = 4.0


def write(folder: Path, request: Request) -> BuiltData:
    """``{train,valid,test}.{en,<language>}`` and ``tokenizer.json``."""
    language = request.language or DEFAULT_LANGUAGE
    roots = [request.source] if request.source is not None else locale_folders()
    files = [file for root in roots for file in catalogues(root, language)]
    if not files:
        raise UserError(_no_catalogue(language, roots))
    pairs: dict[str, str] = {}
    for done, file in enumerate(files, start=1):
        for english, other in read_catalogue(file):
            if _usable(english, other):
                pairs.setdefault(english, other)
        request.progress(done, len(files))
    chosen = shuffled(list(pairs), request.seed)[: request.limit]
    splits = dealt(chosen, "sentence pairs")
    apart = {letters(side) for split in ("valid", "test") for text in splits[split] for side in (text, pairs[text])}
    splits["train"] = [text for text in splits["train"] if apart.isdisjoint(map(letters, (text, pairs[text])))]
    sides = {split: (english, [pairs[text] for text in english]) for split, english in splits.items()}
    for split, texts in sides.items():
        for name, side in zip((SOURCE_LANGUAGE, language), texts, strict=True):
            (folder / f"{split}.{name}").write_text("\n".join(side) + "\n", encoding="utf-8")
    learnt = tokenizer.train("bpe", (text for side in sides["train"] for text in side), VOCAB_SIZE)
    learnt.save(str(folder / tokenizer.FILE_NAME), pretty=False)
    return BuiltData(
        name=f"gettext catalogues of {len(files)} installed programs, {SOURCE_LANGUAGE}-{language}",
        licence="each program's own, mostly free (GPL, LGPL)",
        sha256=digest(text for english in chosen for text in (english, pairs[english])),
        counts={split: len(english) for split, english in splits.items()},
    )


def locale_folders() -> list[Path]:
    """Where gettext looks by convention: Python's default, and the system's."""
    usual = (
        gettext.bindtextdomain("vpipe"),
        "/usr/share/locale",
        "/usr/local/share/locale",
        "/usr/share/locale-langpack",
    )
    return [folder for folder in dict.fromkeys(map(Path, usual)) if folder.is_dir()]


def catalogues(root: Path, language: str) -> list[Path]:
    """The catalogues of one language under a locale folder."""
    place = root / language / "LC_MESSAGES"
    return find_files(place, (".mo",)) if place.is_dir() else []


def read_catalogue(file: Path) -> Iterator[tuple[str, str]]:
    """The messages of a ``.mo`` file with their translations, the first form of plurals, white space made single
    spaces.
    """
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise unreadable(file, error) from None
    order = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}.get(raw[:4])
    if order is None or len(raw) < 20:
        raise UserError(f"{file} is not a gettext catalogue: it begins with {raw[:4]!r}; leave it out")
    num, originals, translations = struct.unpack_from(order + "III", raw, 8)
    charset = "utf-8"
    for i in range(num):
        texts = []
        for table in (originals, translations):
            at = table + 8 * i
            length, start = struct.unpack_from(order + "II", raw, at) if at + 8 <= len(raw) else (0, len(raw) + 1)
            if start + length > len(raw):
                raise UserError(
                    f"{file} is cut short: message {i} of {num} ends at byte {start + length} of {len(raw)}; "
                    "leave it out"
                )
            texts.append(raw[start : start + length])
        if not texts[0]:
            charset = _charset(texts[1])
            continue
        english, other = (text.split(b"\0")[0] for text in texts)
        try:
            yield (
                " ".join(english.rpartition(b"\x04")[2].decode(charset).split()),
                " ".join(other.decode(charset).split()),
            )
        except (UnicodeDecodeError, LookupError):
            continue  # a few old catalogues name a charset they do not keep


def _charset(header: bytes) -> str:
    for line in header.decode("ascii", "replace").splitlines():
        if line.lower().startswith("content-type:") and "charset=" in line:
            return line.partition("charset=")[2].strip()
    return "utf-8"


def _usable(english: str, other: str) -> bool:
    """Two sentences that say the same: letters on both sides, not a name left as it was, of similar length."""
    if english == other or not any(map(str.isalpha, english)) or not any(map(str.isalpha, other)):
        return False
    return max(len(english), len(other)) <= _LONGEST_RATIO * min(len(english), len(other)) + 16


def _no_catalogue(language: str, roots: list[Path]) -> str:
    found: dict[str, int] = {}
    for root in roots:
        for place in root.glob("*/LC_MESSAGES"):
            found[place.parent.name] = found.get(place.parent.name, 0) + sum(1 for _ in place.glob("*.mo"))
    most = sorted((name for name in found if found[name]), key=lambda name: (-found[name], name))[:8]
    where = ", ".join(map(str, roots)) or "any usual folder"
    have = ", ".join(most) or "none; install a package with translations, or name --source"
    return f"no gettext catalogue of the language {language!r} in {where}; there are: {have}"
