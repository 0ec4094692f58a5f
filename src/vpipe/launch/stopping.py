"""A request to stop a run: which signal, how long the ranks may take, and what became of it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from vpipe.launch.first_cause import IN_ORDER, Verdict
from vpipe.rundir.journal import BY_SIGNAL, Ending, EndingKind


@dataclass(frozen=True)
class Grace:
    """How long a run that was asked to stop may take."""

    first: Callable[[], float]
    """Seconds from the request on."""
    more: Callable[[], float] = lambda: 0.0
    """Seconds more, asked whenever the time is over: 0 ends the ranks."""


class Stopping:
    """What the user has asked for, and until when it is waited for."""

    def __init__(self, grace: Grace) -> None:
        self._grace = grace
        self.signum = 0
        """The signal that asked the run to stop."""
        self.kill_at = float("inf")
        """When ranks that are left are killed."""
        self.num_extensions = 0
        self._waited = 0.0
        self._out_of_patience = False

    def asked(self, signum: int) -> float | None:
        """The seconds that the ranks may take; ``None`` where it was asked before: then they end at once."""
        if self.signum:
            self.kill_at, self._waited = 0.0, 0.0
            return None
        self.signum, self._waited = signum, self._grace.first()
        return self._waited

    def is_over(self, now: float) -> bool:
        """At ``kill_at``: whether patience is. Else they have heard the request and are about to leave, and what they
        write is what it was for."""
        more = self._grace.more() if self._waited else 0.0
        self._out_of_patience = not more
        self.num_extensions += bool(more)
        self.kill_at = now + more if more else float("inf")
        self._waited += more
        return not more

    @property
    def out_of_patience(self) -> bool:
        """Whether the ranks were killed because their time was over."""
        return self._out_of_patience and self._waited > 0

    def ending(self, verdict: Verdict, begun: bool) -> tuple[int, Ending | None]:
        """The exit code, and what the ranks could not say themselves. ``begun``: there were ranks."""
        codes = set(verdict.statuses.values())
        if verdict.all_ended and codes == {0}:
            return 0, None  # they were done
        in_order = next((code for code in IN_ORDER if code in codes), None)
        if in_order is not None and codes <= {0, *IN_ORDER}:
            return in_order, None
        name, asked = signal.Signals(self.signum).name, BY_SIGNAL[signal.Signals(self.signum)]
        if not begun:
            code = None if asked is EndingKind.STOPPED else 128 + self.signum
            ending = Ending.of(asked, f"{name} came before the ranks began", code)
            return ending.code, ending
        why = f"{name} ended the ranks before their update was complete"
        if self.out_of_patience:
            why = f"the ranks did not end within {self._waited:.3g} s of {name} and were killed; raise launch.grace"
        kind = EndingKind.INTERRUPTED if asked is EndingKind.INTERRUPTED else EndingKind.KILLED
        ending = Ending.of(kind, why, 128 + self.signum)
        return ending.code, ending
