"""Writing a checkpoint beside training, in two phases.

    step ─▶ copy to host memory ─▶ the next step ─▶ …          every rank
                 └─▶ thread: hash and write its layers, fsync, leave a receipt        every rank
                        └─▶ thread: all receipts are there ─▶ manifest ─▶ rename ─▶ remove what is too old    rank 0

All ranks write into one directory that only this run and iteration have. Until the rename there is no new checkpoint,
and nothing old is removed before it: a crash at any system call leaves one that is whole. A rank that cannot write
says so in its receipt or, where the disk takes not even that, by ``trouble``, which the ranks exchange before they wait
for the end of a save.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor

from vpipe.rundir import writing
from vpipe.rundir.lineage import Line
from vpipe.rundir.manifest import MANIFEST, CheckpointManifest, FileFacts, Standing, free_name, on_line
from vpipe.runtime.departures import Staging, landed
from vpipe.train.checkpoints import layer_file

Layers = Mapping[int, Mapping[str, Tensor]]
"""Layer → what is kept of it."""

POLL = 0.02
"""Seconds between two looks for the receipts of other ranks."""
POLITE = 10
"""How much the writing thread yields to those that train."""


@dataclass(frozen=True)
class CheckpointPlace:
    """Where checkpoints go, and who writes them."""

    directory: Path
    process: int
    """Which of the processes this is; 0 leads."""
    num_processes: int
    keep: int
    epoch: int = 0
    """Of an elastic run: what ranks that are gone have left of a save is not taken for a part of this one."""


@dataclass
class Save:
    """One checkpoint on its way."""

    standing: Standing
    line: Line
    config: Mapping[str, Any]
    path: Path | None = None
    """Where it is, once it is whole."""
    problem: str = ""
    seconds: float = 0.0
    written: threading.Event = field(default_factory=threading.Event)
    """This process has done its part, well or not."""
    called_off: threading.Event = field(default_factory=threading.Event)
    """Another process could not do its part."""


class Saver:
    """Writes the checkpoints of this process; at most one is on its way."""

    def __init__(self, place: CheckpointPlace, *, blocking: bool = False) -> None:
        self._place = place
        self._blocking = blocking
        self._staging: Staging | None = None
        self._thread: threading.Thread | None = None
        self._save: Save | None = None

    def begin(self, save: Save, layers: Layers) -> None:
        """Copy the tensors and return. The save before has ended: see ``wait``."""
        self._save = save
        if self._blocking:
            self._run(save, layers)
            return
        self._staging = self._staging or Staging()
        copied, arrivals = self._staging.copy(layers)
        self._thread = threading.Thread(
            target=self._beside, args=(save, copied, arrivals), name="vpipe-save", daemon=True
        )
        self._thread.start()

    def _beside(self, save: Save, layers: Layers, arrivals: Sequence[torch.Event]) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), POLITE)
        landed(arrivals)
        self._run(save, layers)

    def _run(self, save: Save, layers: Layers) -> None:
        begin = perf_counter()
        partial = self._partial(save)
        files: dict[str, FileFacts] = {}
        save.problem = attempt(lambda: files.update(_write_layers(partial, layers)))
        unreceipted = attempt(lambda: self._leave_receipt(partial, save, files))
        save.problem = save.problem or unreceipted
        save.written.set()
        if self._place.process == 0:
            save.problem = save.problem or attempt(lambda: self._commit(partial, save))
            shutil.rmtree(partial, ignore_errors=True)
        save.seconds = perf_counter() - begin

    def _partial(self, save: Save) -> Path:
        turn = f"-{self._place.epoch}" if self._place.epoch else ""
        return self._place.directory / f".iteration-{save.standing.iteration:06d}-{save.line.run}{turn}.partial"

    def _leave_receipt(self, partial: Path, save: Save, files: Mapping[str, FileFacts]) -> None:
        told = {"problem": save.problem, "files": {name: asdict(facts) for name, facts in files.items()}}
        writing.replace(partial / _receipt(self._place.process), told)

    def _commit(self, partial: Path, save: Save) -> None:
        """Wait for everybody's files, then make them a checkpoint."""
        files: dict[str, FileFacts] = {}
        for process in range(self._place.num_processes):
            told = self._await(partial / _receipt(process), save)
            if told["problem"]:
                raise OSError(None, str(told["problem"]))
            files |= {name: FileFacts.parse(facts) for name, facts in told["files"].items()}
        for process in range(self._place.num_processes):
            (partial / _receipt(process)).unlink()
        manifest = CheckpointManifest(save.standing, save.line, files, save.config)
        writing.write(partial / MANIFEST, manifest.sealed(), durable=True)
        writing.sync(partial)
        final = free_name(self._place.directory, save.standing.iteration, save.line.run)
        os.rename(partial, final)
        writing.sync(self._place.directory)
        save.path = final
        _remove_old(self._place, save)

    def _await(self, receipt: Path, save: Save) -> dict[str, Any]:
        while True:
            told = writing.read(receipt)
            if told is not None:
                return told
            if save.called_off.is_set():
                raise OSError(None, "another rank could not write")
            sleep(POLL)

    def trouble(self) -> bool:
        """Whether this process could not do its part, which is waited for."""
        if self._save is None:
            return False
        self._save.written.wait()
        return bool(self._save.problem)

    def call_off(self) -> None:
        """Some process could not do its part: nobody waits for its receipt."""
        if self._save is not None:
            self._save.called_off.set()

    def done(self) -> Save | None:
        """The save that has ended since the last call; ``None`` where there is none."""
        save = self._save
        if save is None or (self._thread is not None and self._thread.is_alive()):
            return None
        self._thread = self._save = None
        return save

    def wait(self) -> None:
        """Until nothing is on its way."""
        if self._thread is not None:
            self._thread.join()


def _receipt(process: int) -> str:
    return f"receipt{process}.json"


def _write_layers(partial: Path, layers: Layers) -> dict[str, FileFacts]:
    partial.mkdir(parents=True, exist_ok=True)
    return {
        layer_file.name_of(layer): layer_file.write(partial / layer_file.name_of(layer), tensors)
        for layer, tensors in layers.items()
    }


def _remove_old(place: CheckpointPlace, save: Save) -> None:
    """What is too old of this line, and what crashed saves have left. A removed one first loses its name."""
    for old in on_line(place.directory, save.line)[: -place.keep]:
        with suppress(OSError):
            os.rename(old, old.with_name(f".{old.name}.removed"))
    for left in (*place.directory.glob(".iteration-*.partial"), *place.directory.glob(".iteration-*.removed")):
        if save.line.run not in left.name or left.suffix == ".removed":  # other ranks may have begun the next one
            shutil.rmtree(left, ignore_errors=True)


def attempt(action: Callable[[], object]) -> str:
    """What went wrong with the disk, in words; empty where nothing did."""
    try:
        action()
    except (OSError, json.JSONDecodeError, ValueError) as error:
        told = getattr(error, "strerror", None) or str(error)
        name = getattr(error, "filename", None)
        return f"{told} ({name})" if name else str(told)
    return ""
