"""What one rank writes down for everyone: run.json, metrics.jsonl, summary.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vpipe.rundir import endings, writing
from vpipe.rundir.endings import Ending
from vpipe.rundir.layout import METRICS, RUN


class Journal:
    """A full disk must not end a run: what cannot be written is told once, through ``say``, and left out."""

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
