"""Taking a run directory: made, locked, its config written, before anything is computed.

A directory that a run has used is only taken by one that continues it (``--resume``) or replaces it (``--overwrite``).

One writer per directory: the file ``lock`` is held by the kernel for the process that opened it, and let go however
that process ends; what is written in it is only for the sentence that the second one reads.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import time
from typing import Any

from vpipe.config import PipelineConfig
from vpipe.errors import UserError
from vpipe.process import Process
from vpipe.rundir import changes, lineage, manifest, writing
from vpipe.rundir.journal import SILENT_AFTER, Beat
from vpipe.rundir.layout import CHECKPOINTS, CONFIG, LATEST, LOCK, METRICS, OF_A_RUN, PLAN, RUN, STATE

COMMAND = "VPIPE_COMMAND"
"""The variable in which a launcher tells its ranks what its user has typed, as JSON."""


@dataclass(frozen=True)
class Claim:
    """A run directory that is ours."""

    directory: Path
    run: str
    lock: Lock | None = None
    """``None`` where the launcher holds it."""

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        if self.lock is not None:
            self.lock.release()

    def is_seen(self) -> bool:
        """True if this process sees the directory, and not another machine's of the same name."""
        beat = Beat.read(self.directory)
        return beat is not None and beat.run == self.run


def command() -> list[str]:
    """What the user has typed."""
    told = os.environ.get(COMMAND)
    return [str(word) for word in json.loads(told)] if told else [Path(sys.argv[0]).name, *sys.argv[1:]]


def take(
    config: PipelineConfig,
    text: str,
    output_dir: Path | None,
    *,
    resume: bool = False,
    source: Path | None = None,
    overwrite: bool = False,
) -> Claim:
    """A directory for a new run: ``output_dir``, or a new one of this second's name below ``observe.directory``.

    ``text`` is the config as config.yaml has it. ``resume`` says that the run continues another one, ``source`` which;
    without one there was no checkpoint yet.
    """
    run = lineage.new_id()
    path = output_dir or Path(config.observe.directory)
    plan = config.parallel.partition
    try:
        mode = 0o700 if config.observe.private else 0o777
        path = _fresh(path, mode) if output_dir is None else output_dir.resolve()
        path.mkdir(mode, parents=True, exist_ok=True)
        lock = Lock(path, run, shlex.join(command()))
        try:
            _refuse_used(path, resume, source, overwrite)
            (path / CONFIG).write_text(text, encoding="utf-8")
            if isinstance(plan, str) and plan != "auto":
                (path / PLAN).write_bytes(Path(plan).read_bytes())
            me = Process.here()
            Beat(run, writer=me, launcher=me).write(path)
            _point_latest(path, Path(config.observe.directory))
        except BaseException:
            lock.release()
            raise
    except OSError as error:
        raise UserError(
            f"the run directory {path} cannot be written: {error.strerror}; choose another with --output-dir"
        ) from None
    return Claim(path.resolve(), run, lock)


def to_resume(config: PipelineConfig, output_dir: Path | None, resume: str) -> tuple[Path | None, str]:
    """What ``--resume`` goes on from, and what is to be said of it. ``latest`` is the run of ``output_dir``; where
    there is none, the newest of this config among those of ``checkpoint.directory``, or of ``observe.directory`` for a
    user who names no place."""
    if resume != "latest":
        if not Path(resume).exists():
            raise UserError(f"there is nothing at {resume} to resume from; give a checkpoint or a run directory")
        return Path(resume).resolve(), ""
    anew = "there is no checkpoint yet; starting anew"
    kept, runs = config.checkpoint.directory, config.observe.directory
    if output_dir is not None:
        if manifest.kept_of(output_dir):
            return output_dir.resolve(), ""
        if not kept or lineage.current(output_dir):
            return None, anew
    other = ""
    for place in [Path(kept)] if kept else _runs(Path(runs)):
        there = _config_of(place)
        change = changes.another(there, config.to_dict()) if there is not None else ""
        if there is not None and not change:
            return place.resolve(), f"{place} is the latest run of this config"
        other = other or (change and f"{place} is of another config: {change}")
    if other and not kept:
        raise UserError(
            f"no run in {runs} is of this config (the latest, {other}); name the one to go on from, as in --resume "
            f"{runs}/NAME, or leave --resume out"
        )
    return None, f"{other}; starting anew" if other else anew


def _config_of(place: Path) -> Mapping[str, Any] | None:
    """The config of the newest checkpoint there of which a manifest can be read."""
    with suppress(UserError):
        if found := _newest(manifest.kept_of(place)):
            return found.config
    return None


def _newest(paths: Sequence[Path]) -> manifest.CheckpointManifest | None:
    """The first of the manifests that can be read."""
    for path in paths:
        with suppress(manifest.DamagedCheckpoint):
            return manifest.CheckpointManifest.read(path)
    return None


def _runs(parent: Path) -> list[Path]:
    """The run directories there, newest first, by when they began."""

    def age(directory: Path) -> tuple[float, str]:
        entry = lineage.current(directory)
        with suppress(ValueError):
            if entry is not None:
                return datetime.fromisoformat(entry.started).timestamp(), directory.name
        return directory.stat().st_mtime, directory.name

    found = (path for path in parent.glob("*") if path.is_dir() and not path.is_symlink())
    return sorted(found, key=age, reverse=True)


def _fresh(parent: Path, mode: int) -> Path:
    """A name that no other run of this second has: making the directory decides."""
    parent.mkdir(parents=True, exist_ok=True)
    started = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S")
    number = 1
    while True:
        path = parent / (started if number == 1 else f"{started}-{number}")
        try:
            path.mkdir(mode)
        except FileExistsError:
            number += 1
        else:
            return path.resolve()


def _point_latest(run: Path, runs: Path) -> None:
    """``runs/latest`` is the newest of the runs there, for 'vpipe report runs/latest'. A directory of that name is
    the user's own, and a file system without links has none."""
    link = runs.resolve() / LATEST
    if run.parent != link.parent or (link.exists() and not link.is_symlink()):
        return
    fresh = link.with_name(f".{LATEST}-{os.getpid()}-{run.name}")
    with suppress(OSError):
        fresh.symlink_to(run.name, target_is_directory=True)
        try:
            fresh.replace(link)
        except OSError:
            fresh.unlink()
            raise


def used(directory: Path) -> str:
    """Which traces of a run there are, in words; empty where there are none."""
    known = lineage.current(directory)
    if known is not None:
        return f"run {known.line.run} of {known.started}"
    checkpoints = directory / CHECKPOINTS
    kept = any(checkpoints.glob("iteration-*")) if checkpoints.is_dir() else False
    beat = Beat.read(directory)
    if beat is not None and not kept and not (directory / METRICS).exists():
        return ""  # one that ended before it trained: there is nothing to lose
    traces = [name for name in (RUN, METRICS, STATE) if (directory / name).exists()]
    return f"a run ({', '.join(traces or [CHECKPOINTS])})" if traces or kept else ""


def _refuse_used(directory: Path, resume: bool, source: Path | None, overwrite: bool) -> None:
    if overwrite:
        for name in OF_A_RUN:
            path = directory / name
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        return
    what = used(directory)
    if what and not resume:
        raise UserError(
            f"{directory} holds {what}; --resume {directory} continues it, --overwrite removes it and begins anew, and "
            "another --output-dir leaves it alone"
        )
    here = {entry.line.run for entry in lineage.read(directory)}
    newest = _newest(manifest.find(source)) if source is not None and here else None
    if source is not None and here and not (newest and here & newest.line.runs):
        raise UserError(
            f"{directory} holds {what}, which {source} does not continue; choose another --output-dir, or resume "
            f"{directory}"
        )


_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class Lock:
    """The right to write into a directory, until ``release`` or the end of this process."""

    def __init__(self, directory: Path, run: str, command: str) -> None:
        self._path = directory / LOCK
        self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take(directory)
        except BaseException:
            os.close(self._handle)
            raise
        me = {"run": run, "command": command, "since": time(), **Process.here().fields()}
        writing.write(self._path, json.dumps(me).encode() + b"\n", durable=False)

    def _take(self, directory: Path) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{directory} is being written by {_holder(self._path)}; wait until it has ended, or choose another "
                "directory"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _ask_the_heartbeat(directory)

    def release(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _holder(path: Path) -> str:
    """Who holds the lock, as it says itself."""
    found = writing.read(path) or {}
    process = Process.parse(found)
    if process is None:
        return "another process"
    since = found.get("since")
    began = datetime.fromtimestamp(since if isinstance(since, int | float) else 0, UTC)
    return f"run {found.get('run')} ({process} since {began:%Y-%m-%d %H:%M:%S} UTC: {found.get('command')})"


def _ask_the_heartbeat(directory: Path) -> None:
    """Where the file system knows no locks (some cluster ones), a fresh heartbeat of a living process must do."""
    beat = Beat.read(directory)
    if beat is not None and beat.writer.alive is not False and beat.silence <= SILENT_AFTER:
        raise UserError(
            f"{directory / STATE} was written {beat.silence:.0f} s ago by run {beat.run} ({beat.writer}); wait until "
            "it has ended, or choose another directory"
        )
