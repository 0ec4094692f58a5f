"""More ranks on a machine than it has cores: a rank that is woken waits for its turn.

A message wakes its receiver. By default the kernel then takes the core from the rank that runs there, often the
sender, in the middle of its next action; both go on with the other's data in the caches, and the core changes hands
twice for one message. Where ranks share cores, a step therefore asks for ``SCHED_BATCH``: a rank that is woken gets the
core when the one that runs there waits for something itself. That is soon, because ranks wait for each other.

With a core for every rank nothing is asked for: no rank would gain. The user's own policy stays: what is not the
kernel's default is left alone, and outside of a step the default is back.
"""

from __future__ import annotations

import os
from contextlib import suppress


class CrowdedCores:
    """The cores of this process, which ``num_ranks`` ranks share."""

    def __init__(self, num_ranks: int) -> None:
        self.is_crowded = num_ranks > len(os.sched_getaffinity(0))
        self.has_room = num_ranks < len(os.sched_getaffinity(0))
        """Whether a rank that looks again and again takes no other's core."""
        self._changed = False

    def begin(self) -> None:
        """This thread begins a step."""
        if self.is_crowded and not self._changed:
            with suppress(OSError):  # where the kernel does not allow it, cores change hands more often
                if os.sched_getscheduler(0) == os.SCHED_OTHER:
                    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
                    self._changed = True

    def end(self) -> None:
        """The step is over, or has failed."""
        if self._changed:
            self._changed = False
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
