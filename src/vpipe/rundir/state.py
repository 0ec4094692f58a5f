"""What rank 0 writes of a run while it goes on, its heartbeat above all, and what a reader concludes from it.

state.json is rewritten every second by one thread of rank 0's process; before there is one, the process that made the
directory has written it. It says whose run it is, how far it is, what is saved, how long an update takes. So a reader
knows without asking anybody:

    summary.json has this run's ending                      → that
    no ending; the writer or its launcher is alive          → starting, or running
    no ending; both are gone (or another machine's heartbeat is older than half a minute)   → killed, or lost
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import time
from typing import Any

from vpipe.process import Process
from vpipe.rundir import endings, writing
from vpipe.rundir.endings import Ending, EndingKind
from vpipe.rundir.layout import METRICS, RUN, STATE

EVERY = 1.0
"""Seconds between two beats."""
LEAST_PATIENCE = 10.0
UNKNOWN_UPDATE = 60.0
"""Seconds for an update that nobody has measured yet."""
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
        if found is None:
            return None
        try:
            writer = Process.parse(found["writer"])
            if writer is None:
                return None
            saved, where = found["saved"], found["checkpoint"]
            return cls(
                str(found["run"]),
                str(found["phase"]),
                int(found["iteration"]),
                int(found["iterations"]),
                float(found["update_seconds"]),
                float(found["save_seconds"]),
                int(saved) if saved is not None else None,
                str(where) if where is not None else None,
                writer,
                Process.parse(found.get("launcher")),
                float(found["time"]),
            )
        except (KeyError, TypeError, ValueError):
            return None

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


class Heart:
    """Writes the beat while a run lasts. A disk that is full costs the beat, not the run."""

    def __init__(self, directory: Path, run: str) -> None:
        known = Beat.read(directory)  # whoever made the directory stays known as its launcher
        self._directory = directory
        self._beat = Beat(run, launcher=known.launcher if known is not None and known.run == run else None)
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
            change(self._beat)
        if at_once:
            self._write()

    def say(self, values: Mapping[str, Any]) -> None:
        """Let the next beats have these values."""
        with self._lock:
            for name, value in values.items():
                setattr(self._beat, name, value)

    @property
    def beat(self) -> Beat:
        return self._beat

    def _run(self) -> None:
        while not self._stopped.wait(EVERY):
            self._write()

    def _write(self) -> None:
        with self._lock, suppress(OSError):
            self._beat.write(self._directory)

    def stop(self) -> None:
        """The last beat."""
        if not self._stopped.is_set():
            self._stopped.set()
            if self._thread.is_alive():
                self._thread.join()
            self._write()


class Journal:
    """What one rank writes down for everyone: run.json, metrics.jsonl, summary.json. A full disk must not end a run:
    what cannot be written is told once, through ``say``, and left out."""

    def __init__(self, directory: Path, run: str, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._run = run
        self._say = say
        self._complained = False

    def facts(self, facts: Mapping[str, Any]) -> None:
        self._attempt(lambda: writing.replace(self._directory / RUN, {"run": self._run, **facts}))

    def metrics(self, line: Mapping[str, Any]) -> None:
        self._attempt(lambda: writing.append(self._directory / METRICS, line))

    def summary(self, summary: dict[str, Any], ending: Ending) -> None:
        self._attempt(lambda: endings.conclude(self._directory, self._run, ending, summary))

    def _attempt(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if not self._complained:
                self._complained = True
                self._say(f"warning: {error.filename or self._directory}: {error.strerror}; the run goes on without it")


@dataclass(frozen=True)
class State:
    """What a reader knows of a run: ``kind`` is starting, running, or one of the endings."""

    kind: str
    sentence: str
    beat: Beat | None = None
    ending: Ending | None = None

    @property
    def ended(self) -> bool:
        return self.ending is not None

    def to_json(self) -> dict[str, Any]:
        """For a page."""
        beat, ending = self.beat, self.ending
        return {
            "kind": self.kind,
            "sentence": self.sentence,
            "ended": self.ended,
            "code": ending.code if ending else None,
            "rank": ending.rank if ending else None,
            "details": ending.details if ending else "",
            "saved": ending.saved if ending else beat.saved if beat else None,
            "iteration": beat.iteration if beat else ending.iteration if ending else None,
            "iterations": beat.iterations if beat else None,
            "phase": beat.phase if beat else None,
            "silence": round(beat.silence, 1) if beat and not ending else None,
        }


def of(directory: Path) -> State:
    """The state of the run in a directory, at this moment."""
    beat = Beat.read(directory)
    ending = endings.read(directory, beat.run if beat else None)
    if ending is not None:
        return State(ending.kind, ending.sentence, beat, ending)
    if beat is None:
        return State("starting", "the run has not given a sign yet")
    alive = [process.alive for process in (beat.writer, beat.launcher) if process is not None]
    silent = f"no sign for {beat.silence:.0f} s"
    if True in alive or (None in alive and beat.silence <= SILENT_AFTER):
        kind = "starting" if beat.phase == "starting" else "running"
        return State(kind, beat.phase if beat.silence <= SILENT_AFTER else f"{beat.phase}, but {silent}", beat)
    kind_, where = (
        (EndingKind.KILLED, "is gone without a word") if None not in alive else (EndingKind.LOST, "is out of reach")
    )
    ending = Ending.of(kind_, f"{beat.writer} {where}; {silent}", iteration=beat.iteration)
    return State(kind_, ending.sentence, beat, ending.at(None, beat.saved, beat.checkpoint))
