"""How a run fares: its state, and where it ended badly, the first cause and the last lines that were printed.

The state comes from the heartbeat, the ending and the processes themselves (``rundir.state``); a run of an older vpipe
has no heartbeat, and its state is what its files tell.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from vpipe.rundir import layout, writing
from vpipe.rundir import state as states
from vpipe.rundir.journal import EndingKind

BAD = (EndingKind.FAILED, EndingKind.KILLED, EndingKind.LOST)
LINES = 14
"""Of a log that a page shows."""
TAIL = 64 * 1024
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def ended(directory: Path) -> bool:
    """Whether nothing more will be written."""
    found = states.of(directory)
    return found.ended or (found.beat is None and (directory / layout.SUMMARY).is_file())


def begun(directory: Path) -> bool:
    """Whether a run has ever lived here, even if it failed before it could say what it runs."""
    found = states.of(directory)
    return found.beat is not None or found.ending is not None


def story(directory: Path) -> dict[str, Any]:
    """For the page: ``kind``, ``sentence``, first cause and log lines."""
    state = states.of(directory)
    beat, ending, kind, sentence, done = state.beat, state.ending, state.kind, state.sentence, state.ended
    if beat is None and ending is None:
        done = (directory / layout.SUMMARY).is_file()
        sentence = "" if done else "it has no heartbeat: it is starting, or was written by an older vpipe"
        kind = "finished" if done else "unknown"
    rank = ending.rank if ending else None
    details = _clean(ending.details)[-6000:] if ending else ""
    log = last_lines(directory, rank) if kind in BAD else []
    return {
        "kind": kind,
        "sentence": sentence,
        "ended": done,
        "bad": kind in BAD,
        "code": ending.code if ending else None,
        "rank": rank,
        "details": details,
        "log": log if "\n".join(log) not in details else [],  # a rank that died of it said it, too
        "remedy": ending.remedy(directory) if ending else "",
        "saved": ending.saved if ending else beat.saved if beat else None,
        "iteration": beat.iteration if beat else ending.iteration if ending else None,
        "iterations": beat.iterations if beat else None,
        "phase": beat.phase if beat else None,
        "silence": round(beat.silence, 1) if beat and not ending else None,
    }


def last_lines(directory: Path, rank: int | None) -> list[str]:
    """What the rank said last, or rank 0; without what would move a terminal."""
    logs = directory / layout.LOGS
    for name in (f"rank{rank or 0}.log", "rank0.log"):
        lines = [line for line in _clean(writing.tail(logs / name, TAIL)).splitlines() if line.strip()]
        if lines:
            return lines[-LINES:]
    return []


def _clean(text: str) -> str:
    return _CONTROL.sub("", text)
