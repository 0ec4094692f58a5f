"""What a reader concludes of a run from what it has written of itself.

summary.json has this run's ending                      → that
no ending; the writer or its launcher is alive          → starting, or running
no ending; both are gone (or another machine's heartbeat is older than half a minute)   → killed, or lost
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vpipe.rundir.journal import SILENT_AFTER, Beat, Ending, EndingKind, read_ending


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


def of(directory: Path) -> State:
    """The state of the run in a directory, at this moment."""
    beat = Beat.read(directory)
    ending = read_ending(directory, beat.run if beat else None)
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
