"""How a run can end: one table, for the exit code, the terminal, summary.json and the page.

| ending | what happened | what is saved | exit code |
| --- | --- | --- | --- |
| finished | all iterations were trained | as ``checkpoint.interval`` says | 0 |
| stopped | TERM, or USR1 (a cluster's warning) | a checkpoint after the current update | 75: resume me |
| interrupted | Ctrl-C, or HUP (the terminal went) | the same; a second Ctrl-C ends at once | 130, 129 |
| failed | an exception, or a mistake in the input | nothing more | 1, 2 |
| failed | it came to its end, but its last checkpoint could not be written | what was before | 74 |
| killed | a process was killed, by the system or after the grace | nothing more | 137 (128 + signal) |
| lost | a rank fell silent, or never came | nothing more | 69 |

Whoever sees the end writes it: rank 0, then, with all reports in hand, the launcher. Where both were killed nobody
writes, and a reader concludes it from the heartbeat that stopped.
"""

from __future__ import annotations

import signal
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from time import time
from typing import Any

from vpipe.rundir import writing
from vpipe.rundir.layout import SUMMARY

RESUME_ME = 75
"""sysexits' EX_TEMPFAIL: try again, and it will go on."""
UNAVAILABLE = 69
MISTAKE = 2
UNSAVED = 74
"""sysexits' EX_IOERR."""


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
    def parse(cls, found: Any) -> Ending | None:
        """What ``fields`` wrote; ``None`` for anything else."""
        if not isinstance(found, dict) or found.get("kind") not in list(EndingKind):
            return None
        code, rank, iteration, saved, where, at = (
            found.get(key) for key in ("code", "rank", "iteration", "saved", "checkpoint", "time")
        )
        kind = EndingKind(found["kind"])
        return cls(
            kind,
            code if isinstance(code, int) else CODES[kind],
            str(found.get("sentence", "")),
            rank if isinstance(rank, int) else None,
            str(found.get("details", "")),
            iteration if isinstance(iteration, int) else None,
            saved if isinstance(saved, int) else None,
            where if isinstance(where, str) else None,
            float(at) if isinstance(at, int | float) else 0.0,
        )

    def fields(self) -> dict[str, Any]:
        return asdict(self)

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
    writing.replace(path, known | (summary or {}) | {"run": run, "ending": ending.fields()})


def read(directory: Path, run: str | None = None) -> Ending | None:
    """The ending that summary.json tells; ``run`` where only that run's counts."""
    found = writing.read(directory / SUMMARY)
    if found is None or (run is not None and found.get("run") != run):
        return None
    return Ending.parse(found.get("ending"))
