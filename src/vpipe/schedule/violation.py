"""What ``verify`` finds: a place in a program and a reason, in words."""

from __future__ import annotations

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
