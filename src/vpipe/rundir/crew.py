"""Who is in an elastic run, for whoever looks from outside; and how many ranks its user wants.

crew.json is written by the launcher with every change. wanted.json is written by ``vpipe scale``; the launcher takes
it within a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vpipe.rundir import writing
from vpipe.rundir.layout import CREW, WANTED


@dataclass(frozen=True)
class Roster:
    """The processes of a run at a moment."""

    epoch: int
    least: int
    most: int
    by: int
    """What the number of ranks is a multiple of."""
    wanted: int
    has_stepped: bool
    """Whether a step was done in this epoch."""
    pids: Mapping[int, int]
    """Slot → pid."""
    ranks: Mapping[int, int]
    """Slot → rank, of those that train."""

    def write(self, directory: Path) -> None:
        writing.replace(directory / CREW, asdict(self))

    @classmethod
    def read(cls, directory: Path) -> Roster | None:
        """``None`` where there is none that can be read: the run is not elastic, or has not begun."""
        found = writing.read(directory / CREW)
        try:
            return cls(**_numbered(found)) if found is not None else None
        except (TypeError, ValueError, KeyError, AttributeError):
            return None


def _numbered(found: Mapping[str, Any]) -> dict[str, Any]:
    inner = {key: {int(slot): int(value) for slot, value in found[key].items()} for key in ("pids", "ranks")}
    return {**found, **inner}


def want(directory: Path, num_ranks: int) -> None:
    writing.replace(directory / WANTED, {"ranks": num_ranks})


def take_wanted(directory: Path) -> int | None:
    """How many ranks the user has asked for since the last call, if he has."""
    path = directory / WANTED
    if not path.exists():
        return None
    found = (writing.read(path) or {}).get("ranks")
    path.unlink(missing_ok=True)
    return found if isinstance(found, int) and found > 0 else None
