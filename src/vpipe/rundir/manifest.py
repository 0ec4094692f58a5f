"""The manifest of a checkpoint: where the run stood, of which line it is, and size and sha256 of every file.

    iteration-000150/
      manifest.json            ends with the sha256 of all its bytes before that: any flipped bit is noticed
      layer-0000.safetensors
      tokenizer.json           where the data have one
      …

Everything that is read is checked for its type before it is believed. A name is a number, not a text: 1000000 follows
999999. Where another line has taken the name already, the run's id is added to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MinLen
from pydantic import StringConstraints

from vpipe.errors import UserError
from vpipe.records import EXACT, Amount, Natural, parsed
from vpipe.rundir import lineage, writing
from vpipe.rundir.layout import CHECKPOINTS
from vpipe.rundir.lineage import Line

MANIFEST = "manifest.json"
FORMAT = 3
_NAME = re.compile(r"iteration-(\d{6,})(?:-([0-9a-f]{12})(?:-(\d+))?)?\Z")


class DamagedCheckpoint(Exception):
    """A checkpoint that is not what was written."""


@dataclass(frozen=True)
class Best:
    """The best value of ``checkpoint.best`` so far."""

    metric: str = ""
    value: float | None = None
    iteration: Natural = 0
    """That of its checkpoint, which is kept."""
    since: Natural = 0
    """How often it was not better since then."""

    def after(self, value: float, iteration: int) -> Best:
        """With a value that was seen then; one that is not finite is no better than any."""
        better = self.value is None or (
            value > self.value if self.metric.endswith("per_second") else value < self.value
        )
        if better and isfinite(value):
            return Best(self.metric, value, iteration)
        return replace(self, since=self.since + 1)


NONE = Best()


@dataclass(frozen=True)
class Standing:
    """Where a run stands: all it takes to go on as if nothing had happened."""

    __pydantic_config__ = EXACT

    iteration: Natural
    epoch: Natural
    batch: Natural
    """Iterations of this epoch before."""
    read: tuple[tuple[Natural, Natural], ...]
    """What they have read of it, as ``data.order`` says it: of a run that goes on with other batches, more than one
    part."""
    examples: Natural
    """Examples trained on since the run began."""
    num_units: Natural
    num_updates: Natural
    loss_scale: Amount
    good_steps: Natural
    seed: int
    optimizer: str
    model: str
    """A fingerprint: a checkpoint of another model is refused."""
    sound: bool = True
    """Whether the loss of its iteration was finite."""
    lowered: Amount = 1.0
    """What its learning rate is multiplied by, since the run went back."""
    data: str = "{}"
    """What tells its data from others, as JSON: a run on others is refused."""
    best: Best = NONE


@dataclass(frozen=True)
class FileFacts:
    """What a file must be."""

    bytes: Natural
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


FileName = Annotated[str, StringConstraints(pattern=r"^(layer-\d{4,}\.safetensors|tokenizer\.json)$")]


@dataclass(frozen=True)
class CheckpointManifest:
    """What manifest.json says."""

    standing: Standing
    line: Line
    files: Annotated[Mapping[FileName, FileFacts], MinLen(1)]
    config: Mapping[str, Any]

    def sealed(self) -> bytes:
        """The text, with its own checksum at its end."""
        body = {
            "format": FORMAT,
            "run": self.line.run,
            "ancestors": self.line.ancestors,
            "position": asdict(self.standing),
            "files": {name: asdict(self.files[name]) for name in sorted(self.files)},
            "config": self.config,
        }
        return writing.sealed(body)

    @classmethod
    def read(cls, directory: Path) -> CheckpointManifest:
        """The manifest of a checkpoint; ``DamagedCheckpoint`` where it is not what was written."""
        path = directory / MANIFEST
        try:
            told = writing.unsealed(path.read_bytes())
            if told.get("format") != FORMAT:
                raise ValueError(f"its format is {told.get('format')!r}, not {FORMAT}")
            found = parsed(cls, {**told, "standing": told["position"], "line": told})
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            why = " ".join(str(error).split())
            raise DamagedCheckpoint(f"{path} cannot be read ({type(error).__name__}: {why})") from None
        named = parse_name(directory.name)
        if named is not None and named.iteration != found.standing.iteration:
            raise DamagedCheckpoint(f"{path} is of iteration {found.standing.iteration}, which its directory is not")
        return found


@dataclass(frozen=True, order=True)
class Name:
    """What the name of a checkpoint says."""

    iteration: int
    run: str = ""
    number: int = 0

    def __str__(self) -> str:
        more = f"-{self.run}" if self.run else ""
        return f"iteration-{self.iteration:06d}{more}{f'-{self.number}' if self.number else ''}"


def parse_name(text: str) -> Name | None:
    found = _NAME.match(text)
    return Name(int(found[1]), found[2] or "", int(found[3] or 0)) if found else None


def free_name(directory: Path, iteration: int, run: str) -> Path:
    """A name that nothing has: a checkpoint that is there is never overwritten."""
    names = [Name(iteration), *(Name(iteration, run, number) for number in range(100))]
    return next(path for path in (directory / str(name) for name in names) if not path.exists())


def checkpoints(directory: Path) -> list[Path]:
    """The finished checkpoints of a directory, of whatever line, in the order of their numbers."""
    found = [(name, path) for path in directory.glob("iteration-*") if (name := parse_name(path.name)) is not None]
    return [path for _, path in sorted(found) if (path / MANIFEST).is_file()]


def on_line(directory: Path, line: Line, until: int | None = None) -> list[Path]:
    """The checkpoints of a line, oldest first. One whose manifest cannot be read is among them: it may be of this line,
    and its reader says what is wrong with it."""
    found = []
    for path in checkpoints(directory):
        name = parse_name(path.name)
        assert name is not None
        if until is not None and name.iteration > until:
            continue
        try:
            place = line.place(CheckpointManifest.read(path).line.run, name.iteration)
        except DamagedCheckpoint:
            place = -1
        if place is not None:
            found.append(((name.iteration, place, name.number), path))
    return [path for _, path in sorted(found)]


def find(where: Path) -> list[Path]:
    """The checkpoints to try, newest first: of a checkpoint and its line before it, of a directory, of a run."""
    found = kept_of(where)
    if not found:
        raise UserError(
            f"{where} holds no checkpoint; give a directory with {MANIFEST}, or a run directory with {CHECKPOINTS}/"
        )
    return found


def kept_of(where: Path) -> list[Path]:
    """The same, or none."""
    if (where / MANIFEST).is_file():
        rest = _before(where)
        return [where, *reversed(rest)]
    for directory, entry in _places(where):
        kept = checkpoints(directory)
        if not kept:
            continue
        line = entry.line if entry is not None else _only_line(where, kept)
        found = on_line(directory, line) if line is not None else kept
        if found:
            return found[::-1]
    return []


def _before(where: Path) -> list[Path]:
    """The checkpoints before one, of its line."""
    name = parse_name(where.name)
    try:
        line = CheckpointManifest.read(where).line
    except DamagedCheckpoint:
        known = lineage.current(where.parent) or lineage.current(where.parent.parent)
        if known is None or name is None:
            return []
        line = known.line
    until = name.iteration if name is not None else None
    return [path for path in on_line(where.parent, line, until) if path != where]


def _places(where: Path) -> list[tuple[Path, lineage.LineageEntry | None]]:
    """Where the checkpoints of a directory may lie, with the run whose line counts there."""
    own = lineage.current(where)
    places: list[tuple[Path, lineage.LineageEntry | None]] = [(where, own or lineage.current(where.parent))]
    if own is not None and own.checkpoints is not None:
        places.append((Path(own.checkpoints), own))
    return [*places, (where / CHECKPOINTS, own)]


def _only_line(where: Path, kept: list[Path]) -> Line | None:
    """The line of the newest checkpoint, where nothing says which run came last; ``None`` where no manifest can be
    read. Refused where others are of another line: they may be what followed, and the newest what was given up."""
    found = []
    for path in reversed(kept):
        try:
            found.append((path, CheckpointManifest.read(path)))
        except DamagedCheckpoint:
            continue
    line = found[0][1].line if found else None
    for path, manifest in found:
        if line is not None and line.place(manifest.line.run, manifest.standing.iteration) is None:
            raise UserError(
                f"{where} has no lineage.json that can be read, and its checkpoints are of several runs: "
                f"{found[0][0].name} of {line.run}, {path.name} of {manifest.line.run}; name the one to go on from, as "
                f"in --resume {path}"
            )
    return line
