"""Copies are written beside training.

    main thread   … update t │ forwards and backwards of step t+1 ……… │ agree on update t+1 …
    copier                   └─ copy weights, optimizer state, sum ─┘ ▲ waits here, if it must

Weights and optimizer state are written by updates alone, so a copy may take until the next one. Ranks wait for
neighbours in every step, and the copy fits into that time. The thread asks for the interpreter a few times a copy and
not for every tensor.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from vpipe.runtime.engine import Engine


class Copier:
    """Does one job at a time in a thread of its own."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._problem: BaseException | None = None
        threading.Thread(target=self._run, name="vpipe-copier", daemon=True).start()

    def begin(self, job: Callable[[], object]) -> None:
        """Start a job; the one before is done, or is awaited."""
        self.settle()
        self._idle.clear()
        self._jobs.put(job)

    def settle(self) -> None:
        """Until the job is done: before anything writes what it reads. Its failure is raised here."""
        if not self._idle.is_set():
            self._idle.wait()
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem

    def watch(self, engine: Engine) -> None:
        """Let an engine wait for the job before its updates."""
        engine.updater.before_update = self.settle

    def _run(self) -> None:
        while True:
            try:
                self._jobs.get()()
            except BaseException as error:
                self._problem = error
            self._idle.set()
