"""Which run is this, and which one does it continue?

A run has an id. One that goes on from a checkpoint has a parent, and with it a line: its parent's checkpoints up to the
one it began with, its parent's parent's up to the one that one began with, and so on.

    run a   10 ── 20 ── 30 ── 35 ── 40         35 and 40 are not on the line of b: never resumed, counted or
    run b               └──── 32 ── 34         removed for it, although they are later

lineage.json lists the runs of a directory; the last one is the directory's own. It has a checksum: a list that has lost
its last run would send the next one back to what was given up.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vpipe.rundir import writing
from vpipe.rundir.layout import LINEAGE

_ID = re.compile(r"[0-9a-f]{12}\Z")


def new_id() -> str:
    return secrets.token_hex(6)


def is_id(text: object) -> bool:
    return isinstance(text, str) and _ID.match(text) is not None


@dataclass(frozen=True)
class Ancestor:
    """A run whose checkpoints up to an iteration belong to a line."""

    run: str
    until: int


@dataclass(frozen=True)
class Line:
    """A run and its ancestors, the oldest first."""

    run: str
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

    def to_json(self) -> list[list[Any]]:
        return [[each.run, each.until] for each in self.ancestors]

    @classmethod
    def parse(cls, run: Any, ancestors: Any) -> Line:
        """``ValueError`` for what ``to_json`` has not written."""
        if not is_id(run) or not isinstance(ancestors, list):
            raise ValueError("no run id, or no list of ancestors")
        found = []
        for each in ancestors:
            if not (isinstance(each, list) and len(each) == 2 and is_id(each[0]) and type(each[1]) is int):
                raise ValueError(f"{each!r} is no ancestor")
            found.append(Ancestor(each[0], each[1]))
        return cls(run, tuple(found))


@dataclass(frozen=True)
class LineageEntry:
    """A run in lineage.json."""

    line: Line
    checkpoint: str | None
    """Where the run went on from; ``None`` where it began."""
    started: str
    command: list[str]
    checkpoints: str | None = None
    """The directory of its checkpoints, where that is not checkpoints/ beside this file."""

    @classmethod
    def now(
        cls, line: Line, checkpoint: str | None, command: list[str], checkpoints: str | None = None
    ) -> LineageEntry:
        return cls(line, checkpoint, datetime.now(UTC).isoformat(timespec="milliseconds"), command, checkpoints)

    def to_json(self) -> dict[str, Any]:
        parent = self.line.ancestors[-1] if self.line.ancestors else None
        return {
            "run": self.line.run,
            "parent": {"run": parent.run, "iteration": parent.until, "checkpoint": self.checkpoint} if parent else None,
            "ancestors": self.line.to_json(),
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
            parent, where = each.get("parent") or {}, each.get("checkpoints")
            entry = LineageEntry(
                Line.parse(each["run"], each["ancestors"]),
                parent.get("checkpoint"),
                str(each["started"]),
                [str(word) for word in each["command"]],
                where if isinstance(where, str) else None,
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            continue
        found.append(entry)
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
