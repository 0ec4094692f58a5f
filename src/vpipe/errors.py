"""What goes wrong, in two kinds.

A ``UserError`` is a sentence for the person at the keyboard: the place, both values, the remedy. The command line
prints it without a traceback and exits with 2. Everything else is our bug, or an exception of the user's own model, and
keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


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


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as ``; did you mean 'zb-h1'?``, or an empty string where nothing is near."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
