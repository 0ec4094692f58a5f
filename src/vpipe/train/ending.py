"""How a run comes to its end: requests to stop, which all ranks follow together; and what the end of a rank means for
its run, an exception or what the watchdog found, as an ending of the table."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vpipe.errors import UserError
from vpipe.rundir import endings
from vpipe.rundir.endings import BY_SIGNAL, MISTAKE, UNSAVED, Ending, EndingKind
from vpipe.rundir.state import Beat
from vpipe.runtime.pipeline import Pipeline
from vpipe.runtime.ranks.failure import Cause, PeerLost

MOST_DETAILS = 8_000
"""Characters of a traceback that are kept: its end says what it was."""


class StopRequests:
    """Whether somebody has asked this run to stop: USR1 (a cluster's warning), TERM, Ctrl-C and HUP end it after the
    update, on all ranks together, with a checkpoint. A second Ctrl-C ends it at once."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.heard = 0
        self.wish = ""
        """What else this rank was asked for, as text; all ranks hear of it at the same place."""
        self.granted = ""

    @contextmanager
    def listening(self, to_the_end: bool = False) -> Iterator[None]:
        """Catch the signals while the body runs; where this is not the main thread, they are somebody else's.
        ``to_the_end``: this process ends with the run, and until it is gone nothing but Ctrl-C ends it earlier. Signals
        reach ranks one after the other: for the last one to hear, the run may be over because others have heard."""
        try:
            before = {number: signal.signal(number, self._hear) for number in BY_SIGNAL}
        except ValueError:
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                # An interpreter that ends gives every handler up, but goes on ignoring what is ignored.
                deaf = to_the_end and number != signal.SIGINT
                signal.signal(number, signal.SIG_IGN if deaf else handler)

    def _hear(self, number: int, _: Any) -> None:
        if number == signal.SIGINT and self.heard == signal.SIGINT:
            raise KeyboardInterrupt
        self.heard = number

    def agreed(self) -> signal.Signals | None:
        """The signal that any rank has heard; ``granted`` is what any has been asked for. Every rank calls this."""
        if self._pipeline.in_process:  # nobody else is asked
            self.granted, self.wish = self.wish, ""
            return signal.Signals(self.heard) if self.heard else None
        wish = self.wish
        told = self._pipeline.gather_numbers([self.heard, bool(wish)])
        self.granted = self._pipeline.gather_first(wish) if any(numbers[1] for numbers in told) else ""
        self.wish = "" if self.granted else self.wish
        heard = max(int(numbers[0]) for numbers in told)
        return signal.Signals(heard) if heard else None


def asked(number: signal.Signals, iteration: int) -> Ending:
    """The run ended because somebody asked for it."""
    kind = BY_SIGNAL[number]
    word = "stopped on request" if kind is EndingKind.STOPPED else "interrupted"
    code = None if kind is EndingKind.STOPPED else 128 + number
    return Ending.of(kind, f"{word} ({number.name}) after iteration {iteration}", code, iteration=iteration)


def finished(iteration: int) -> Ending:
    return Ending.of(EndingKind.FINISHED, f"finished after iteration {iteration}", iteration=iteration)


def unsaved(ended: Ending, problem: str) -> Ending:
    """The run came to its end, but not to the checkpoint that belongs to it: nobody may take it for one that did."""
    said = f"{ended.sentence}, but its checkpoint could not be written: {problem}"
    return Ending.of(EndingKind.FAILED, said, UNSAVED, iteration=ended.iteration)


def of_error(error: BaseException) -> Ending:
    """The run ended by an exception of this rank."""
    if isinstance(error, UserError):
        return Ending.of(EndingKind.FAILED, error.sentence, MISTAKE)
    if isinstance(error, KeyboardInterrupt):
        return Ending.of(EndingKind.INTERRUPTED, "interrupted at once")
    if isinstance(error, PeerLost):
        return (
            of_cause(Cause(**error.cause)) if error.cause else Ending.of(EndingKind.LOST, str(error), rank=error.peer)
        )
    told = "".join(traceback.format_exception(error))[-MOST_DETAILS:]
    return Ending.of(EndingKind.FAILED, "".join(traceback.format_exception_only(error)).splitlines()[0], details=told)


def of_cause(cause: Cause) -> Ending:
    """The run ended because of another rank."""
    kind = {
        "gone": EndingKind.KILLED,
        "silent": EndingKind.LOST,
        "missing": EndingKind.LOST,
        "interrupt": EndingKind.INTERRUPTED,
    }
    code = MISTAKE if cause.kind == "user" else None
    return Ending.of(kind.get(cause.kind, EndingKind.FAILED), str(cause), code, rank=cause.rank)


def conclude(directory: Path, run: str, ending: Ending) -> None:
    """Write the ending of a run that did not come to its own; what the heartbeat knows is added."""
    beat = Beat.read(directory)
    if beat is not None and beat.run == run:
        ending = ending.at(beat.iteration, beat.saved, beat.checkpoint)
    endings.conclude(directory, run, ending)
