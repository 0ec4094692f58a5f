"""The directory of a run: made once, by one rank, before anything is computed.

<observe.directory>/<ISO time>/
  config.yaml  plan.json  run.json  metrics.jsonl  summary.json  events/  checkpoints/  logs/
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vpipe.config import PipelineConfig
from vpipe.errors import UserError

COMMAND = "VPIPE_COMMAND"
"""The variable in which a launcher tells its ranks what its user has typed, as JSON."""


def command() -> list[str]:
    """What the user has typed."""
    told = os.environ.get(COMMAND)
    return [str(word) for word in json.loads(told)] if told else [Path(sys.argv[0]).name, *sys.argv[1:]]


def create(config: PipelineConfig, output_dir: Path | None) -> Path:
    """A new run directory with the resolved config in it, and the plan that it names."""
    started = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S")
    path = output_dir or Path(config.observe.directory) / started
    number = 1
    try:
        while output_dir is None and path.exists():
            number += 1
            path = path.with_name(f"{started}-{number}")
        path.mkdir(parents=True, exist_ok=True)
        config.to_yaml(path / "config.yaml")
        plan = config.parallel.partition
        if isinstance(plan, str) and plan != "auto":
            (path / "plan.json").write_bytes(Path(plan).read_bytes())
    except OSError as error:
        raise UserError(
            f"the run directory {path} cannot be written: {error.strerror}; choose another with --output-dir"
        ) from None
    return path.resolve()


class Journal:
    """What one rank writes down for everyone: ``run.json``, ``metrics.jsonl``, ``summary.json``.

    A full disk must not end a run: what cannot be written is told once, through ``say``, and left out.
    """

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._say = say
        self._complained = False

    def facts(self, facts: Mapping[str, Any]) -> None:
        self._attempt(lambda: _replace(self._directory / "run.json", facts))

    def metrics(self, line: Mapping[str, Any]) -> None:
        self._attempt(lambda: _append(self._directory / "metrics.jsonl", line))

    def summary(self, summary: Mapping[str, Any]) -> None:
        self._attempt(lambda: _replace(self._directory / "summary.json", summary))

    def close(self) -> None:
        """Nothing is held open."""

    def _attempt(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if not self._complained:
                self._complained = True
                self._say(f"warning: {error.filename or self._directory}: {error.strerror}; the run goes on without it")


def _append(path: Path, line: Mapping[str, Any]) -> None:
    """Whole lines only: one write."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, (json.dumps(line) + "\n").encode())
    finally:
        os.close(handle)


def _replace(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
