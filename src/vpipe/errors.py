"""What goes wrong, in two kinds.

A ``UserError`` is a sentence for the person at the keyboard: the place, both values, the remedy. The command line
prints it without a traceback and exits with 2. Everything else is our bug, or an exception of the user's own model, and
keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice
from pathlib import Path


class UserError(ValueError):
    """Input that vpipe cannot use. The message is one sentence that says where, what, and how to mend it."""

    @property
    def sentence(self) -> str:
        """The message as it is printed: on one line, whatever was quoted in it."""
        return " ".join(str(self).split())


def printable(text: str, most: int = 2000) -> str:
    """Text from elsewhere, for a terminal: on one line, without characters that a terminal obeys."""
    shown = "".join(letter if letter.isprintable() else " " if letter.isspace() else "\ufffd" for letter in text[:most])
    return " ".join(shown.split())


def on_one_line(text: str) -> str:
    """A heading and its lines as one: the lines are numbered, so that they stay apart."""
    heading, *lines = text.splitlines() or [""]
    return " ".join([heading.strip(), *(f"({number}) {line.strip()}" for number, line in enumerate(lines, 1))])


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as ``; did you mean 'zb-h1'?``, or an empty string where nothing is near."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


MOST_FILES = 2000
"""How many are looked at for a hint."""


def nearest_file(path: Path) -> str:
    """A hint such as ``; did you mean configs/default.yaml?`` for a file that does not exist, or an empty string.

    Its folder is searched and those in it; where that does not exist either, the folders beside it.
    """
    kinds = (".yaml", ".yml") if path.suffix in ("", ".yaml", ".yml") else (path.suffix,)
    folder = path.parent if path.parent.is_dir() else path.parent.parent
    try:
        inside = [each for each in sorted(folder.iterdir()) if each.is_dir() and not each.name.startswith(".")]
        files = (each for place in (folder, *inside) for each in sorted(place.iterdir()) if each.suffix in kinds)
        found = {str(each): each.stem for each in islice(files, MOST_FILES)}
    except OSError:
        return ""
    stems = set(get_close_matches(path.stem, set(found.values()), n=3, cutoff=0.6))
    close = get_close_matches(str(path), [name for name, stem in found.items() if stem in stems], n=1, cutoff=0)
    return f"; did you mean {close[0]}?" if close else ""
