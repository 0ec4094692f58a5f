"""How a run fares: its state, and where it ended badly, the first cause and the last lines that were printed.

The state comes from the heartbeat, the ending and the processes themselves (``rundir.state``); a run of an older vpipe
has no heartbeat, and its state is what its files tell.
"""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from typing import Any

from vpipe.rundir import layout
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
    found = state.to_json()
    if state.beat is None and state.ending is None:
        done = (directory / layout.SUMMARY).is_file()
        sentence = "" if done else "it has no heartbeat: it is starting, or was written by an older vpipe"
        found |= {"kind": "finished" if done else "unknown", "sentence": sentence, "ended": done}
    found["bad"] = found["kind"] in BAD
    found["details"] = _clean(str(found.get("details") or ""))[-6000:]
    log = last_lines(directory, found["rank"]) if found["bad"] else []
    found["log"] = log if "\n".join(log) not in found["details"] else []  # a rank that died of it said it, too
    found["remedy"] = state.ending.remedy(directory) if state.ending else ""
    return found


def last_lines(directory: Path, rank: int | None) -> list[str]:
    """What the rank said last, or rank 0; without what would move a terminal."""
    logs = directory / layout.LOGS
    for name in (f"rank{rank or 0}.log", "rank0.log"):
        try:
            with (logs / name).open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - TAIL))
                text = file.read(TAIL).decode("utf-8", errors="replace")
        except OSError:
            continue
        if found := list(deque((line for line in _clean(text).splitlines() if line.strip()), LINES)):
            return found
    return []


def _clean(text: str) -> str:
    return _CONTROL.sub("", text)
