"""Who is in an elastic run, for whoever looks from outside; and what is wanted of it from there.

crew.json is written by the launcher with every change. wanted.json is written by ``vpipe scale`` (another number of
ranks, machines to give back) and ``vpipe chaos`` (another layout); the launcher takes it within a second.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True)
class OutsideWish:
    """What somebody outside wants: another number of ranks, machines back, or layers elsewhere (JSON, see
    ``Trainer``)."""

    num_ranks: int = 0
    wish: str = ""
    without: tuple[str, ...] = ()


def want(directory: Path, num_ranks: int) -> None:
    _ask(directory, {"ranks": num_ranks})


def want_back(directory: Path, machines: Sequence[str]) -> None:
    """Ask for machines: their ranks go elsewhere, or the others go on without them."""
    _ask(directory, {"without": list(machines)})


def want_layout(directory: Path, partition: Sequence[int], ranks: Sequence[int]) -> None:
    """Ask for other layers per stage, and ``ranks[r]`` in the place of rank ``r``."""
    wish = json.dumps({"partition": list(partition), "ranks": list(ranks)})
    _ask(directory, {"wish": wish})


def _ask(directory: Path, wish: dict[str, Any]) -> None:
    """Beside what was asked for and not taken yet; of the same kind the last one counts."""
    path = directory / WANTED
    writing.replace(path, (writing.read(path) or {}) | wish)


def take_wanted(directory: Path) -> OutsideWish | None:
    """What was asked for since the last call, if anything was."""
    path, taken = directory / WANTED, directory / f".{WANTED}.taken"
    try:
        path.rename(taken)  # what is asked for from now on is another wish
    except OSError:
        return None
    found = writing.read(taken) or {}
    taken.unlink(missing_ok=True)
    ranks, wish, without = found.get("ranks", 0), found.get("wish", ""), found.get("without", [])
    return OutsideWish(
        ranks if isinstance(ranks, int) and ranks > 0 else 0,
        wish if isinstance(wish, str) else "",
        tuple(name for name in without if isinstance(name, str)) if isinstance(without, list) else (),
    )
