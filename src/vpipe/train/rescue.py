"""The last thing that is done for an elastic run whose launcher, or every rank, was killed: the copies that its ranks
left in memory become a checkpoint. It runs when no rank lives any more, in a child of the zygote, or by itself where
that was killed.

Where the run was on several machines, none of them has all copies. Each leaves what it has in the run directory, and
the one that finds a whole generation there makes the checkpoint."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from vpipe.config import PipelineConfig
from vpipe.registry import load_plugins
from vpipe.rundir import lineage
from vpipe.rundir.journal import Beat
from vpipe.rundir.layout import CHECKPOINTS, LEFT, SAVED
from vpipe.rundir.lineage import Line
from vpipe.train import copies
from vpipe.train.checkpoints.writer import CheckpointPlace, Save, Saver
from vpipe.train.copies import PIECE, SHELVES, Copy, CopyShelf
from vpipe.train.session import load_data, load_model


def save(config: dict[str, Any], directory: str, run: str, **_: Any) -> None:
    """Write the newest generation that is whole, unless it is on the disk already."""
    _write(copies.newest(_shelves()), config, Path(directory), run)


def save_together(config: dict[str, Any], directory: str, run: str, **_: Any) -> None:
    """The same by several machines, one after the other: who finds the parts of all others makes the checkpoint."""
    folder = Path(directory, LEFT, run)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(_alone(folder))
        if (folder / SAVED).exists():
            return
        for shelf in _shelves():
            shelf.leave(folder)
        pieces = sorted(folder.glob(f"*{PIECE}"))
        files = [stack.enter_context(piece.open("r+b")) for piece in pieces]
        if _write(copies.newest([CopyShelf([file.fileno()]) for file in files]), config, Path(directory), run):
            (folder / SAVED).touch()
            for piece in pieces:
                piece.unlink()


def _shelves() -> list[CopyShelf]:
    return [CopyShelf(pair) for pair in json.loads(os.environ[SHELVES])]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One machine at a time, where the file system knows locks; without them two may write the same checkpoint."""
    with (folder / "lock").open("w") as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(found: Sequence[Copy], config: dict[str, Any], where: Path, run: str) -> bool:
    """Make a checkpoint of a generation, if there is one; whether it is on the disk."""
    if not found:
        return False
    checked = PipelineConfig.from_dict(config)
    beat = Beat.read(where)
    if beat is not None and beat.run == run and beat.saved == found[0].iteration:
        return True
    load_plugins(checked.plugins)
    values = checked.to_dict()
    vocabulary = load_model(checked, load_data(checked).vocab_size).vocab_size
    if vocabulary > 0:  # a checkpoint must stand without the data set
        values["model"]["vocab_size"] = vocabulary
    entry = lineage.current(where)
    line = entry.line if entry is not None and entry.line.run == run else Line(run)
    section = checked.checkpoint
    folder = Path(section.directory).resolve() if section.directory else where / CHECKPOINTS
    layers = {layer: copy.read(layer) for copy in found for layer in copy.table}
    epoch = max(copy.part.epoch for copy in found) + 1
    saver = Saver(CheckpointPlace(folder, 0, 1, section.keep, epoch), blocking=True)
    wanted = Save(found[0].standing, line, values)
    saver.begin(wanted, lambda: dict(sorted(layers.items())))
    saver.end()
    if beat is not None and wanted.path is not None:
        beat.saved, beat.checkpoint = wanted.standing.iteration, str(wanted.path)
        beat.iteration = max(beat.iteration, beat.saved)
        beat.write(where)
    return wanted.path is not None


if __name__ == "__main__":
    {"save": save, "save_together": save_together}[sys.argv[1]](**json.loads(sys.argv[2]))
