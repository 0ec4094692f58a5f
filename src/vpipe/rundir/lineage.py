"""Which run is this, and which one does it continue?

A run has an id. One that goes on from a checkpoint has a parent, and with it a line: its parent's checkpoints up to the
one it began with, its parent's parent's up to the one that one began with, and so on.

    run a   10 ── 20 ── 30 ── 35 ── 40         35 and 40 are not on the line of b: never resumed, counted or
    run b               └──── 32 ── 34         removed for it, although they are later

lineage.json lists the runs of a directory; the last one is the directory's own. It has a checksum: a list that has lost
its last run would send the next one back to what was given up.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import StringConstraints

from vpipe.records import parsed
from vpipe.rundir import writing
from vpipe.rundir.layout import LINEAGE

RunId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{12}$")]


def new_id() -> str:
    return secrets.token_hex(6)


class Ancestor(NamedTuple):
    """A run whose checkpoints up to an iteration belong to a line."""

    run: RunId
    until: int


@dataclass(frozen=True)
class Line:
    """A run and its ancestors, the oldest first."""

    run: RunId
    ancestors: tuple[Ancestor, ...] = ()

    def place(self, run: str, iteration: int) -> int | None:
        """How late in the line a checkpoint is; ``None`` for one that is not on it."""
        if run == self.run:
            return len(self.ancestors)
        places = [n for n, each in enumerate(self.ancestors) if each.run == run and iteration <= each.until]
        return places[-1] if places else None

    def child(self, run: str, iteration: int) -> Line:
        """The line of ``run``, which goes on from this one's checkpoint of ``iteration``."""
        kept = tuple(Ancestor(each.run, min(each.until, iteration)) for each in self.ancestors)
        return Line(run, (*kept, Ancestor(self.run, iteration)))

    @property
    def runs(self) -> set[str]:
        return {self.run, *(each.run for each in self.ancestors)}


@dataclass(frozen=True)
class LineageEntry:
    """A run in lineage.json."""

    line: Line
    checkpoint: str | None
    """Where the run went on from; ``None`` where it began."""
    command: list[str]
    checkpoints: str | None = None
    """The directory of its checkpoints, where that is not checkpoints/ beside this file."""
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))

    def to_json(self) -> dict[str, Any]:
        parent = self.line.ancestors[-1] if self.line.ancestors else None
        return {
            "run": self.line.run,
            "parent": {"run": parent.run, "iteration": parent.until, "checkpoint": self.checkpoint} if parent else None,
            "ancestors": self.line.ancestors,
            "started": self.started,
            "command": self.command,
            "checkpoints": self.checkpoints,
        }


def read(directory: Path) -> list[LineageEntry]:
    """The runs of a directory, the first one first; none where the file is not as it was written."""
    try:
        listed = writing.unsealed((directory / LINEAGE).read_bytes()).get("runs")
    except (OSError, ValueError, AttributeError, RecursionError):
        return []
    found = []
    for each in listed if isinstance(listed, list) else ():
        try:
            checkpoint = (each.get("parent") or {}).get("checkpoint")
            found.append(parsed(LineageEntry, each | {"line": each, "checkpoint": checkpoint}))
        except (AttributeError, KeyError, TypeError, ValueError):
            continue
    return found


def enter(directory: Path, entry: LineageEntry) -> None:
    """From now on the directory is this run's; call where its lock is held."""
    runs = [each for each in read(directory) if each.line.run != entry.line.run]
    writing.replace(directory / LINEAGE, {"runs": [each.to_json() for each in (*runs, entry)]}, durable=True, seal=True)


def is_damaged(directory: Path) -> bool:
    """Whether a list is there that says nothing."""
    return (directory / LINEAGE).exists() and not read(directory)


def current(directory: Path) -> LineageEntry | None:
    """The run whose directory this is."""
    entries = read(directory)
    return entries[-1] if entries else None
