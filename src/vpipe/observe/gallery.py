"""Many runs: which lie in a directory, and what one line tells of each."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from vpipe.errors import UserError
from vpipe.rundir.layout import CONFIG, RUN
from vpipe.rundir.reader import open_run
from vpipe.rundir.story import begun, story

MOST = 200
"""Runs that are listed: the newest."""
TAIL = 4096


def runs(directory: Path) -> dict[str, Path]:
    """Name → run directory, the newest first. A directory that is a run is its own and only one."""
    if is_run(directory):
        return {directory.resolve().name: directory}
    with suppress(OSError):
        found = [path for path in directory.iterdir() if path.is_dir() and not path.is_symlink() and is_run(path)]
        newest = sorted(found, key=lambda path: (_started(path), path.name), reverse=True)[:MOST]
        return {path.name: path for path in newest}
    return {}


def is_run(path: Path) -> bool:
    return (path / RUN).is_file() or begun(path)


def lines(directory: Path) -> list[dict[str, Any]]:
    """What the list shows: one line per run."""
    return [_line(name, path) for name, path in runs(directory).items()]


def _line(name: str, path: Path) -> dict[str, Any]:
    told = story(path)
    found: dict[str, Any] = {"name": name, "state": {key: told[key] for key in ("kind", "sentence", "bad")}}
    try:
        run = open_run(path)
    except UserError:
        return found
    facts = run.facts
    found |= {
        "schedule": facts.schedule,
        "num_ranks": facts.num_ranks,
        "num_stages": facts.num_stages,
        "num_microbatches": facts.num_microbatches,
        "started": facts.started,
        "model": facts.model.name,
    }
    last: dict[str, Any] = next((line for line in reversed(run.metrics(TAIL)) if line.get("kind") == "train"), {})
    return found | {key: last.get(key) for key in ("iteration", "loss", "tokens_per_second")}


def _started(path: Path) -> float:
    for name in (CONFIG, RUN):
        with suppress(OSError):
            return (path / name).stat().st_mtime
    return 0.0
