"""A table of words that stays within the terminal: the widest columns are wrapped first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from textwrap import wrap

GAP = 2
NARROWEST = 4


def table(rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Columns under each other; ``width`` is that of the terminal, ``None`` where lines may be long."""
    widths = _widths(rows, width)
    lines = []
    for row in rows:
        cells = [wrap(cell, most, break_on_hyphens=False) for cell, most in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            padded = (part.ljust(most) for part, most in zip(parts, widths, strict=True))
            lines.append((" " * GAP).join(padded).rstrip())
    return "\n".join(lines)


def paragraph(text: str, width: int | None) -> str:
    return text if width is None else "\n".join("\n".join(wrap(line, width)) for line in text.split("\n"))


def _widths(rows: Sequence[Sequence[str]], width: int | None) -> list[int]:
    """The columns' natural widths, or what fits: a word is cut only where nothing else is left to give."""
    columns = list(zip(*rows, strict=True))
    widths = [max(1, *map(len, column)) for column in columns]
    if width is None:
        return widths
    words = [max((len(word) for cell in column for word in cell.split()), default=1) for column in columns]
    room = width - GAP * (len(widths) - 1)
    for floors in (words, [NARROWEST] * len(widths)):
        while sum(widths) > room:
            spare = [have - floor for have, floor in zip(widths, floors, strict=True)]
            if max(spare) <= 0:
                break
            widest = max(range(len(widths)), key=lambda each: (spare[each] > 0, widths[each]))
            widths[widest] -= 1
    return widths
