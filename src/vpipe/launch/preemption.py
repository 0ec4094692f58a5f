"""The signal that says: save what you have, you must go.

SLURM sends USR1 a minute before it takes the node away or the time limit ends. A signal arrives in the middle of
anything, so the handler only takes a note; the trainer reads it between two iterations, lets all ranks agree, writes a
checkpoint and leaves with ``INTERRUPTED``. The job script reads that code and queues the job again.
"""

from __future__ import annotations

import signal
from types import FrameType

GRACE = 60
"""Seconds between the signal and the end."""

INTERRUPTED = 75
"""Exit code of a run that was interrupted and has saved its checkpoint: EX_TEMPFAIL, "try again later"."""


class Preemption:
    """Whether this process was told to save and leave; made early, before a signal can come."""

    def __init__(self) -> None:
        self._requested = False
        self._before = signal.signal(signal.SIGUSR1, self._note)

    def __call__(self) -> bool:
        """Whether the signal has come."""
        return self._requested

    def close(self) -> None:
        """Give the signal back to whoever had it."""
        signal.signal(signal.SIGUSR1, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._requested = True
