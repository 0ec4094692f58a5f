"""Requests to end a run: USR1 (a cluster's warning), TERM, Ctrl-C and HUP end it after the update, on all ranks
together, with a checkpoint. A second Ctrl-C ends it at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vpipe.rundir.endings import BY_SIGNAL
from vpipe.runtime.pipeline import Pipeline


class Stopping:
    """Whether somebody has asked this run to stop."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.heard = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch the signals while the body runs; where this is not the main thread, they are somebody else's."""
        try:
            before = {number: signal.signal(number, self._hear) for number in BY_SIGNAL}
        except ValueError:
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, _: Any) -> None:
        if number == signal.SIGINT and self.heard == signal.SIGINT:
            raise KeyboardInterrupt
        self.heard = number

    def agreed(self) -> signal.Signals | None:
        """The signal that any rank has heard. Every rank calls this."""
        heard = max(int(numbers[0]) for numbers in self._pipeline.gather_numbers([self.heard]))
        return signal.Signals(heard) if heard else None
