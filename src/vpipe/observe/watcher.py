"""A run directory as messages for browsers: the whole once, then what has changed.

Files are read anew at each change, but a step that was read and explained once is not read again: what a live page
costs depends on what is new, not on how much there is.
"""

from __future__ import annotations

import threading
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from vpipe.observe.diagnosis import verdict
from vpipe.observe.measured import Measured, join
from vpipe.observe.payload import payload, unstarted
from vpipe.rundir import state as states
from vpipe.rundir.layout import METRICS, PLAN, RUN, STEPS, SUMMARY
from vpipe.rundir.reader import NotStarted, RunDirectory, open_run

LIVE_STEPS = 10
"""Steps of a running job that are sent with each change; the page remembers older ones."""
LIVE_BYTES = 2**16
"""Of the files of short lines that are read with each change."""
ADVISE = 10.0
"""Seconds after which a running job's verdict is asked for again."""
STATIC = ("config", "kinds", "colours", "textures", "causes", "title", "format")
"""What does not change while a run goes on."""


class Watcher:
    """One run; the newest message is shared by all browsers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen: Any = None
        self._whole: dict[str, Any] = {}
        self._steps: dict[int, Measured] = {}
        self._program = ""
        self._advice: dict[str, Any] | None = None
        self._advised = 0.0
        self.cost = 0.0
        """Seconds that the last message took."""

    def stamp(self) -> Any:
        """Changes whenever one of the files does, or the run's processes are gone."""
        names = [RUN, METRICS, SUMMARY, PLAN]
        files = [self._path / name for name in names] + sorted(self._path.glob(STEPS.format("*[0-9]")))
        found = []
        for file in files:
            try:
                stat = file.stat()
                found.append((file.name, stat.st_mtime_ns, stat.st_size))
            except OSError:
                continue
        return (*found, states.of(self._path).kind)

    def whole(self) -> dict[str, Any]:
        """Everything, computed once per change."""
        with self._lock:
            stamp = self.stamp()
            if stamp != self._seen or not self._whole:
                began = perf_counter()
                self._whole = self._read()
                self._seen, self.cost = stamp, perf_counter() - began
            return self._whole

    def _read(self) -> dict[str, Any]:
        try:
            run = open_run(self._path)
        except NotStarted:
            return unstarted(self._path)
        steps = self._recorded(run)
        if run.ended:
            return payload(run, steps)
        if self._advice is None or monotonic() - self._advised > ADVISE:
            self._advice, self._advised = verdict(run, steps), monotonic()
        return payload(run, steps, advice=self._advice, most_bytes=LIVE_BYTES)

    def measured(self) -> tuple[RunDirectory, list[Measured]]:
        """The run and its steps, for questions about them."""
        with self._lock:
            run = open_run(self._path)
            return run, self._recorded(run)

    def change(self) -> dict[str, Any]:
        return {key: value for key, value in self.whole().items() if key not in STATIC}

    def _recorded(self, run: RunDirectory) -> list[Measured]:
        """All steps of a run that has ended, the newest of one that goes on; read once each."""
        identity = f"{run.facts.started} {run.facts.program}"
        if identity != self._program:
            self._program, self._steps = identity, {}
        last = None if run.ended else LIVE_STEPS
        fresh = run.common_steps(last, known=self._steps)
        self._steps |= {ranks[0].step: join(run.program, ranks) for ranks in fresh}
        newest = sorted(self._steps)[-(last or len(self._steps)) :]
        self._steps = {number: self._steps[number] for number in newest}
        return list(self._steps.values())
