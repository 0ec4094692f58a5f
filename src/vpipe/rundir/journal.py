"""What a run writes of itself: its heartbeat, its journal, its ending. One process writes it, that of rank 0.

state.json, the heartbeat, is rewritten every second by one thread of rank 0's process; before there is one, the process
that made the directory has written it. It says whose run it is, how far it is, what is saved, how long an update takes.

How a run can end is one table, for the exit code, the terminal, summary.json and the page:

| ending | what happened | what is saved | exit code |
| --- | --- | --- | --- |
| finished | all iterations were trained | as ``checkpoint.interval`` says | 0 |
| stopped | TERM, or USR1 (a cluster's warning) | a checkpoint after the current update | 75: resume me |
| interrupted | Ctrl-C, or HUP (the terminal went) | the same; a second Ctrl-C ends at once | 130, 129 |
| failed | an exception, or a mistake in the input | nothing more | 1, 2 |
| failed | it came to its end, but its last checkpoint could not be written | what was before | 74 |
| failed | loss or gradients were not finite ``training.nan_limit`` times in a row | what was before | 65 |
| killed | a process was killed, by the system or after the grace | nothing more | 137 (128 + signal) |
| lost | a rank fell silent, or never came | nothing more | 69 |

Rank 0 writes the end, then, with all reports in hand, the launcher. Where both were killed neither
writes, and a reader concludes it from the heartbeat that stopped (``state``).

Words: docs/glossary.md.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from time import time
from typing import Any

from vpipe.process import Process
from vpipe.records import parsed_or_none
from vpipe.rundir import writing
from vpipe.rundir.facts import RunFacts
from vpipe.rundir.layout import METRICS, RUN, STATE, SUMMARY

RESUME_ME = 75
"""sysexits' EX_TEMPFAIL: try again, and it will go on."""
UNAVAILABLE = 69
MISTAKE = 2
UNSAVED = 74
"""sysexits' EX_IOERR."""
DIVERGED = 65
"""sysexits' EX_DATAERR."""


class EndingKind(StrEnum):
    """The endings of the table."""

    FINISHED = "finished"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    KILLED = "killed"
    LOST = "lost"


CODES = {
    EndingKind.FINISHED: 0,
    EndingKind.STOPPED: RESUME_ME,
    EndingKind.INTERRUPTED: 128 + signal.SIGINT,
    EndingKind.FAILED: 1,
    EndingKind.KILLED: 128 + signal.SIGKILL,
    EndingKind.LOST: UNAVAILABLE,
}

BY_SIGNAL = {
    signal.SIGUSR1: EndingKind.STOPPED,
    signal.SIGTERM: EndingKind.STOPPED,
    signal.SIGINT: EndingKind.INTERRUPTED,
    signal.SIGHUP: EndingKind.INTERRUPTED,
}
"""What a request to end makes of a run."""


@dataclass(frozen=True)
class Ending:
    """How one run has ended, as summary.json has it under ``ending``."""

    kind: EndingKind
    code: int
    sentence: str
    """What to say about it, in one line."""
    rank: int | None = None
    """The rank that failed first."""
    details: str = ""
    """The traceback of the first cause."""
    iteration: int | None = None
    """How far the run came."""
    saved: int | None = None
    """The iteration of the newest checkpoint of this run or its ancestors."""
    checkpoint: str | None = None
    time: float = 0.0

    @classmethod
    def of(cls, kind: EndingKind, sentence: str, code: int | None = None, **more: Any) -> Ending:
        return cls(kind, CODES[kind] if code is None else code, sentence, time=time(), **more)

    @classmethod
    def finished(cls, iteration: int) -> Ending:
        return cls.of(EndingKind.FINISHED, f"finished after iteration {iteration}", iteration=iteration)

    @classmethod
    def asked(cls, number: signal.Signals, iteration: int) -> Ending:
        """The run ended because a signal asked for it."""
        kind = BY_SIGNAL[number]
        word = "stopped on request" if kind is EndingKind.STOPPED else "interrupted"
        code = None if kind is EndingKind.STOPPED else 128 + number
        return cls.of(kind, f"{word} ({number.name}) after iteration {iteration}", code, iteration=iteration)

    def unsaved(self, problem: str) -> Ending:
        """The run came to its end, but not to the checkpoint that belongs to it: it must not be taken for one that
        did."""
        said = f"{self.sentence}, but its checkpoint could not be written: {problem}"
        return Ending.of(EndingKind.FAILED, said, UNSAVED, iteration=self.iteration)

    @classmethod
    def diverged(cls, problem: str, iteration: int) -> Ending:
        """The run was ended because it trained no more."""
        said = f"ended after iteration {iteration}: {problem}; lower training.learning_rate, or mend that batch"
        return cls.of(EndingKind.FAILED, said, DIVERGED, iteration=iteration)

    def at(self, iteration: int | None, saved: int | None, checkpoint: str | None) -> Ending:
        """The same, with how far the run came and what is kept of it, where that was not known."""
        return replace(
            self,
            iteration=self.iteration if self.iteration is not None else iteration,
            saved=self.saved if self.saved is not None else saved,
            checkpoint=self.checkpoint or checkpoint,
        )

    def remedy(self, directory: Path) -> str:
        """What the user can do now; empty for a run that is done."""
        if self.kind is EndingKind.FINISHED:
            return ""
        if self.checkpoint is None:
            return "nothing was saved"
        return f"the checkpoint of iteration {self.saved} is whole; --resume {directory} goes on from there"


def conclude(directory: Path, run: str, ending: Ending, summary: dict[str, Any] | None = None) -> None:
    """Write the ending of ``run``; what its own rank 0 has already written about it beyond that stays."""
    path = directory / SUMMARY
    known = writing.read(path) or {}
    if known.get("run") != run:
        known = {}
    writing.replace(path, known | (summary or {}) | {"run": run, "ending": asdict(ending)})


def read_ending(directory: Path, run: str | None = None) -> Ending | None:
    """The ending that summary.json tells; ``run`` where only that run's counts."""
    found = writing.read(directory / SUMMARY)
    if found is None or (run is not None and found.get("run") != run):
        return None
    return parsed_or_none(Ending, found.get("ending"))


MOST_DETAILS = 8_000
"""Characters of a traceback that are kept: its end says what it was."""
EVERY = 1.0
"""Seconds between two beats."""
LEAST_PATIENCE = 10.0
UNKNOWN_UPDATE = 60.0
"""Seconds for an update that is not measured yet."""
ENDING = "ending"
"""The phase of a run that writes its last checkpoint and leaves."""
SILENT_AFTER = 30.0
"""Seconds without a beat from another machine, after which its run is taken for lost."""


@dataclass
class Beat:
    """state.json."""

    run: str
    phase: str = "starting"
    """starting, training, evaluating, saving or ending."""
    iteration: int = 0
    iterations: int = 0
    """How many there will be; 0 while that is not known."""
    update_seconds: float = 0.0
    """The longest of the latest updates: what a request to stop may have to wait for."""
    save_seconds: float = 0.0
    """The longest checkpoint so far."""
    saved: int | None = None
    """The iteration of the newest whole checkpoint."""
    checkpoint: str | None = None
    writer: Process = field(default_factory=Process.here)
    launcher: Process | None = None
    time: float = 0.0

    @classmethod
    def read(cls, directory: Path) -> Beat | None:
        """The last beat; ``None`` where there is none that can be read."""
        found = writing.read(directory / STATE)
        return parsed_or_none(cls, found) if found is not None and {"writer", "time"} <= found.keys() else None

    def write(self, directory: Path) -> None:
        self.time = time()
        writing.replace(directory / STATE, asdict(self))

    @classmethod
    def patience(cls, directory: Path) -> float:
        """Seconds within which a run that is asked to stop has ended its update and saved, as measured."""
        beat = cls.read(directory)
        if beat is None or not beat.update_seconds:
            return UNKNOWN_UPDATE
        return LEAST_PATIENCE + 2 * beat.update_seconds + 2 * beat.save_seconds

    @classmethod
    def more_patience(cls, directory: Path) -> float:
        """Seconds more for a run that has heard the request, when its patience is over: none unless it is on its way
        out and its heart beats. The first checkpoint of a large model takes as long as its disk takes."""
        beat = cls.read(directory)
        leaves = beat is not None and beat.phase == ENDING and beat.silence <= SILENT_AFTER
        return LEAST_PATIENCE if leaves else 0.0

    @property
    def silence(self) -> float:
        """Seconds since this beat."""
        return max(0.0, time() - self.time)


def conclude_from_outside(directory: Path, run: str, ending: Ending) -> Ending:
    """Write the ending of a run that did not come to its own, with what its heartbeat knows; that ending. One that the
    run has told of itself stays: what ends its processes afterwards, a second Ctrl-C, is not how it ended."""
    known = read_ending(directory, run)
    if known is not None and known.kind in (EndingKind.FINISHED, EndingKind.STOPPED, EndingKind.INTERRUPTED):
        return known
    beat = Beat.read(directory)
    if beat is not None and beat.run == run:
        ending = ending.at(beat.iteration, beat.saved, beat.checkpoint)
    with suppress(OSError):
        conclude(directory, run, ending)
    return ending


class Heart:
    """Writes the beat while a run lasts. A disk that is full costs the beat, not the run."""

    def __init__(self, directory: Path, run: str) -> None:
        known = Beat.read(directory)  # the process that made the directory stays known as its launcher
        self._directory = directory
        self.beat = Beat(run, launcher=known.launcher if known is not None and known.run == run else None)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vpipe-heartbeat", daemon=True)

    def start(self) -> Heart:
        self._write()
        self._thread.start()
        return self

    def tell(self, change: Callable[[Beat], None], at_once: bool = False) -> None:
        """Change what the next beat says; ``at_once`` it comes now."""
        with self._lock:
            change(self.beat)
        if at_once:
            self._write()

    def _run(self) -> None:
        while not self._stopped.wait(EVERY):
            self._write()

    def _write(self) -> None:
        with self._lock, suppress(OSError):
            self.beat.write(self._directory)

    def stop(self) -> None:
        """The last beat."""
        if not self._stopped.is_set():
            self._stopped.set()
            if self._thread.is_alive():
                self._thread.join()
            self._write()


class Journal:
    """What one rank writes down for everyone: run.json, metrics.jsonl, summary.json. A full disk must not end a run:
    what cannot be written is told once, through ``say``, and left out; at the end, how much it was."""

    def __init__(self, directory: Path, run: str, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._run = run
        self._say = say
        self._num_lost = 0

    def facts(self, facts: RunFacts) -> None:
        self._attempt(lambda: writing.replace(self._directory / RUN, asdict(facts)))

    def metrics(self, line: Mapping[str, Any]) -> None:
        self._attempt(lambda: writing.append(self._directory / METRICS, line))

    def summary(self, summary: dict[str, Any], ending: Ending) -> None:
        self._attempt(lambda: conclude(self._directory, self._run, ending, summary))
        if self._num_lost > 1:
            self._say(f"warning: {self._num_lost} lines and files of {self._directory} could not be written")

    def _attempt(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._num_lost += 1
            if self._num_lost == 1:
                self._say(f"warning: {error.filename or self._directory}: {error.strerror}; the run goes on without it")
