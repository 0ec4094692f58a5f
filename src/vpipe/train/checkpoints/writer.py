"""Writing a checkpoint beside training, in two phases.

    step ─▶ copy to host memory ─▶ the next step ─▶ …          every rank
                 └─▶ thread: hash and write its layers, fsync, leave a receipt        every rank
                        └─▶ thread: all receipts are there ─▶ manifest ─▶ rename ─▶ remove what is too old    rank 0

All ranks write into one directory that only this run and iteration have. Until the rename there is no new checkpoint,
and nothing old is removed before it: a crash at any system call leaves one that is whole.

A save that fails costs itself and nothing else. Whatever goes wrong on a rank, in whichever call, is kept as the save's
``problem``; the ranks exchange it (``CheckpointManager.settle``), call the save off together and train on.
"""

from __future__ import annotations

import hashlib
import os
import re
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

from vpipe.errors import UserError
from vpipe.records import parsed
from vpipe.rundir import writing
from vpipe.rundir.layout import TOKENIZER
from vpipe.rundir.lineage import Line
from vpipe.rundir.manifest import (
    MANIFEST,
    CheckpointManifest,
    DamagedCheckpoint,
    FileFacts,
    Standing,
    free_name,
    on_line,
    parse_name,
)
from vpipe.runtime.departures import Staging, landed
from vpipe.train.checkpoints import layer_file

Layers = Mapping[int, Mapping[str, Tensor]]
"""Layer → what is kept of it."""

POLL = 0.02
"""Seconds between two looks for the receipts of other ranks."""
PATIENCE = 60.0
"""Seconds after which a file that another machine has written must be seen here."""
POLITE = 10
"""How much the writing thread yields to those that train."""
THREAD = "vpipe-save"


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
    trained: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """Layer → those of its tensors that training changes: they must be finite."""
    tokenizer: str = ""
    """The text of ``tokenizer.json``."""
    path: Path | None = None
    """Where it is, once it is whole."""
    problem: str = ""
    """Why there will be none."""
    remark: str = ""
    """What went wrong after it was whole."""
    seconds: float = 0.0
    written: threading.Event = field(default_factory=threading.Event)
    """This process has done its part, well or not."""
    all_written: threading.Event = field(default_factory=threading.Event)
    """All processes have."""
    called_off: threading.Event = field(default_factory=threading.Event)
    """Some process could not do its part."""


class Saver:
    """Writes the checkpoints of this process; at most one is on its way."""

    def __init__(self, place: CheckpointPlace, *, blocking: bool = False) -> None:
        self._place = place
        self._blocking = blocking
        self._staging: Staging | None = None
        self._thread: threading.Thread | None = None
        self.save: Save | None = None
        """The save that is on its way, or was the last."""

    def begin(self, save: Save, layers: Callable[[], Layers]) -> None:
        """Copy the tensors and return; ``blocking`` writes them before. The save before has ended: see ``end``."""
        self.save, self._thread = save, None
        self._attempt(save, lambda: self._begin(save, layers()))
        if save.problem:
            save.written.set()

    def _begin(self, save: Save, layers: Layers) -> None:
        arrivals: Sequence[torch.Event] = ()
        if self._blocking:
            self._write(save, layers)
            save.written.set()
            layers = {}
        else:
            self._staging = self._staging or Staging()
            layers, arrivals = self._staging.copy(layers)
        thread = threading.Thread(target=self._beside, args=(save, layers, arrivals), name=THREAD, daemon=True)
        thread.start()
        self._thread = thread

    def _beside(self, save: Save, layers: Layers, arrivals: Sequence[torch.Event]) -> None:
        begin = perf_counter()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), POLITE)
        if not self._blocking:
            self._attempt(save, lambda: self._write(save, layers, arrivals))
        save.written.set()
        if self._place.process == 0 and not save.problem:
            self._attempt(save, lambda: self._commit(save))
        save.seconds = perf_counter() - begin

    def _attempt(self, save: Save, action: Callable[[], object]) -> None:
        """An exception of whatever kind costs this save only."""
        try:
            action()
        except _CalledOff:
            pass
        except Exception as error:
            save.problem = in_words(error)

    def _write(self, save: Save, layers: Layers, arrivals: Sequence[torch.Event] = ()) -> None:
        """This process's part: its layers, and a receipt for them."""
        landed(arrivals)
        partial = self._partial(save)
        files: dict[str, Any] = {}
        partial.mkdir(parents=True, exist_ok=True)
        for layer, tensors in layers.items():
            _go_on(save)
            name = layer_file.name_of(layer)
            for key in sorted(save.trained.get(layer, ())):
                if not bool(torch.isfinite(tensors[key]).all()):
                    raise UserError(f"{key.partition('/')[2]} of layer {layer} is not finite")
            files[name] = asdict(layer_file.write(partial / name, tensors))
        if save.tokenizer and self._place.process == 0:
            data = save.tokenizer.encode()
            writing.write(partial / TOKENIZER, data, durable=True)
            files[TOKENIZER] = asdict(FileFacts(len(data), hashlib.sha256(data).hexdigest()))
        writing.replace(partial / _receipt(self._place.process), {"files": files})

    def _partial(self, save: Save) -> Path:
        turn = f"-{self._place.epoch}" if self._place.epoch else ""
        return self._place.directory / f".iteration-{save.standing.iteration:06d}-{save.line.run}{turn}.partial"

    def _commit(self, save: Save) -> None:
        """Wait for the files of all processes, then make them a checkpoint."""
        partial = self._partial(save)
        files: dict[str, FileFacts] = {}
        for process in range(self._place.num_processes):
            told = self._await(partial / _receipt(process), save)
            files |= {name: parsed(FileFacts, facts) for name, facts in told["files"].items()}
        for process in range(self._place.num_processes):
            (partial / _receipt(process)).unlink()
        manifest = CheckpointManifest(save.standing, save.line, files, save.config)
        writing.write(partial / MANIFEST, manifest.sealed(), durable=True)
        writing.sync(partial)
        final = free_name(self._place.directory, save.standing.iteration, save.line.run)
        os.rename(partial, final)
        save.path = final
        try:
            writing.sync(self._place.directory)
            _remove_old(self._place, save)
        except Exception as error:
            save.remark = in_words(error)

    def _await(self, receipt: Path, save: Save) -> dict[str, Any]:
        since: float | None = None
        while True:
            told = writing.read(receipt)
            if told is not None:
                return told
            _go_on(save)
            if save.all_written.is_set():
                since = since or perf_counter()
                if perf_counter() - since > PATIENCE:
                    raise OSError(None, "its rank has written it elsewhere: all need one directory", str(receipt))
            sleep(POLL)

    @property
    def in_trouble(self) -> bool:
        """Whether this process has failed to do its part; nothing is waited for."""
        return self.save is not None and self.save.written.is_set() and bool(self.save.problem)

    def problem(self) -> str:
        """Why this process could not do its part, which is waited for; empty where it could."""
        if self.save is None:
            return ""
        self.save.written.wait()
        return self.save.problem

    def call_off(self) -> None:
        """Some process could not do its part: this one stops doing its own, and waits for no receipts."""
        if self.save is not None:
            self.save.called_off.set()

    def end(self) -> str:
        """Wait until nothing is on its way, and remove what a failed save has left; why it failed."""
        save = self.save
        if save is None:
            return ""
        if self._thread is not None:
            self._thread.join()
        if self._place.process == 0 and save.path is None:
            shutil.rmtree(self._partial(save), ignore_errors=True)
        return save.problem


class _CalledOff(Exception):
    """The reason is another rank's, which tells it."""


def _go_on(save: Save) -> None:
    if save.called_off.is_set():
        raise _CalledOff


def _receipt(process: int) -> str:
    return f"receipt{process}.json"


def _remove_old(place: CheckpointPlace, save: Save) -> None:
    """What is too old of this line, but for the newest that is sound and the best, and what crashed saves have left. A
    removed one first loses its name."""
    kept = on_line(place.directory, save.line)
    sound = next((path for path in reversed(kept) if _is_sound(path)), None)
    for old in kept[: -place.keep]:
        if old == sound or ((name := parse_name(old.name)) and name.iteration == save.standing.best.iteration):
            continue
        os.rename(old, old.with_name(f".{old.name}.removed"))
    for left in (*place.directory.glob(".iteration-*.partial"), *place.directory.glob(".iteration-*.removed")):
        if not _may_be_next(left.name, place, save):
            shutil.rmtree(left, ignore_errors=True)


def _is_sound(path: Path) -> bool:
    with suppress(DamagedCheckpoint):
        return CheckpointManifest.read(path).standing.sound
    return False


_PARTIAL = re.compile(r"\.iteration-(\d+)-([0-9a-f]+)(?:-(\d+))?\.partial")


def _may_be_next(name: str, place: CheckpointPlace, save: Save) -> bool:
    """Whether other ranks of this run may have begun this one after ``save``."""
    found = _PARTIAL.fullmatch(name)
    if found is None or found[2] != save.line.run:
        return False
    return (int(found[3] or 0), int(found[1])) > (place.epoch, save.standing.iteration)


def in_words(error: Exception) -> str:
    """What went wrong, in one line."""
    if isinstance(error, UserError):
        return error.sentence
    if isinstance(error, OSError):
        told = error.strerror or str(error)
        return f"{told} ({error.filename})" if error.filename else told
    return " ".join(f"{type(error).__name__}: {error}".split())
