"""The last thing that is done for an elastic run whose launcher, or every rank, was killed: the copies that its ranks
left in memory become a checkpoint. It runs in a child of the zygote, when no rank lives any more."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vpipe import plugins
from vpipe.config import PipelineConfig
from vpipe.rundir import lineage
from vpipe.rundir.layout import CHECKPOINTS
from vpipe.rundir.lineage import Line
from vpipe.rundir.state import Beat
from vpipe.train import copies
from vpipe.train.checkpoints.writer import CheckpointPlace, Save, Saver
from vpipe.train.copies import SHELVES, CopyShelf
from vpipe.train.session import load_data, load_model


def save(config: dict[str, Any], directory: str, run: str, **_: Any) -> None:
    """Write the newest generation that is whole, unless it is on the disk already."""
    found = copies.newest([CopyShelf(pair) for pair in json.loads(os.environ[SHELVES])])
    where = Path(directory)
    beat = Beat.read(where)
    if not found or (beat is not None and beat.run == run and beat.saved == found[0].iteration):
        return
    checked = PipelineConfig.from_dict(config)
    plugins.load(checked.plugins)
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
    saver.begin(wanted, dict(sorted(layers.items())))
    if beat is not None and wanted.path is not None:
        beat.saved, beat.checkpoint = wanted.standing.iteration, str(wanted.path)
        beat.write(where)
