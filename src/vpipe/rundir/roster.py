"""The processes of an elastic run, for readers outside it; and what users ask of it from there.

crew.json is written by the launcher with every change. wanted.json is written by ``vpipe scale`` (another number of
ranks, machines to give back) and ``vpipe chaos`` (another layout); the launcher takes it within a second.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vpipe.records import parsed_or_none
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
        return parsed_or_none(cls, found) if found is not None else None


@dataclass(frozen=True)
class OutsideWish:
    """What a user outside wants: another number of ranks, machines back, or layers elsewhere."""

    num_ranks: int = 0
    wish: str = ""
    """JSON for ``Trainer``: ``{"partition": layers per stage, "ranks": their order}``."""
    without: tuple[str, ...] = ()
    problem: str = ""
    """What was not understood, in a sentence."""


def want(directory: Path, num_ranks: int) -> None:
    _ask(directory, {"ranks": num_ranks})


def want_back(directory: Path, machines: Sequence[str]) -> None:
    """Ask for machines: their ranks go elsewhere, or the others go on without them."""
    _ask(directory, {"without": list(machines)})


def want_layout(directory: Path, partition: Sequence[int], ranks: Sequence[int]) -> None:
    """Ask for other layers per stage, and ``ranks[r]`` in the place of rank ``r``."""
    _ask(directory, {"layout": {"partition": list(partition), "ranks": list(ranks)}})


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
    found = writing.read(taken)
    taken.unlink(missing_ok=True)
    if found is None:
        return OutsideWish(problem=f"{WANTED} is no JSON object")
    wrong = [
        f"{key} {found[key]}, not {kind}"
        for key, (fits, kind) in _FORMS.items()
        if key in found and not fits(found[key])
    ]
    if wrong:
        return OutsideWish(problem=f"{WANTED} asks for {'; '.join(wrong)}")
    layout = json.dumps(found["layout"]) if "layout" in found else ""
    return OutsideWish(found.get("ranks", 0), layout, tuple(found.get("without", ())))


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(each) is kind for each in value)


_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "ranks": (lambda value: type(value) is int and value > 0, "a number of ranks"),
    "without": (lambda value: _is_list(value, str), "a list of machines"),
    "layout": (
        lambda value: isinstance(value, dict) and all(_is_list(value.get(key), int) for key in ("partition", "ranks")),
        "partition and ranks, two lists of whole numbers",
    ),
}
"""What may be asked for: whether a value is of its kind, and which kind that is."""
