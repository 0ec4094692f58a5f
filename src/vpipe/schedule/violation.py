"""What ``verify`` finds: a place in a program and a reason, in words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Violation:
    """Something wrong at ``rows[rank][index]``; index -1 is the row as a whole, or an action that lowering added."""

    rank: int
    index: int
    action: str
    reason: str

    def __str__(self) -> str:
        named = f", {self.action}" if self.action else ""
        place = f", action {self.index} ({self.action})" if self.index >= 0 else named
        return f"rank {self.rank}{place}: {self.reason}"


@dataclass(frozen=True)
class Fold:
    """Violations of one kind: the first, and how many there are."""

    first: Violation
    count: int

    def __str__(self) -> str:
        return f"{self.first}{self.more}"

    @property
    def more(self) -> str:
        return f" (and {self.count - 1} more of this kind)" if self.count > 1 else ""


_NAMED = re.compile(r"\d+[A-Z][A-Z_]*\d*|[-+]?\d+(\.\d+)?")


def folded(violations: Iterable[Violation]) -> list[Fold]:
    """A hundred violations of one kind are one line: those whose reasons differ only in actions and numbers."""
    kinds: dict[str, list[Violation]] = {}
    for each in violations:
        kinds.setdefault(_NAMED.sub("#", each.reason), []).append(each)
    return [Fold(same[0], len(same)) for same in kinds.values()]
