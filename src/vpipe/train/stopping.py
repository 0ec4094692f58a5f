"""USR1 (a cluster's warning) and TERM end a run after the iteration, on all ranks together."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vpipe.runtime.pipeline import Pipeline
from vpipe.train.gathering import gather_numbers

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


class Stopping:
    """Whether somebody has asked this run to stop."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.heard = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch the signals while the body runs; where this is not the main thread, they are somebody else's."""
        try:
            before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        except ValueError:
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, _: Any) -> None:
        self.heard = number

    def agreed(self) -> str:
        """The name of the signal that any rank has heard; empty where none has. Every rank calls this."""
        heard = max(int(numbers[0]) for numbers in gather_numbers(self._pipeline, [self.heard]))
        return signal.Signals(heard).name if heard else ""
