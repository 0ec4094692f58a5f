"""How much a plan may cost: what is asked by everything that searches."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from time import monotonic


@dataclass
class Limits:
    """How long a search may go on: an effort that every machine counts alike, and a time."""

    effort: float = 1.0
    deadline: float = inf

    @property
    def over(self) -> bool:
        return monotonic() > self.deadline


NO_LIMITS = Limits()
