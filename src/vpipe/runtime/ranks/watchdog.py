"""Two small threads that end a rank whose run has failed elsewhere.

A rank that waits inside gloo cannot be interrupted: the only way out is to leave the process. The *heart* says twice a
second that this rank lives and what it is doing, reads the board for a cause, and watches the next rank's beat. The
*guard* touches no store: it sees when the heart itself hangs, because the store's host was stopped.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep
from typing import NoReturn

from vpipe.runtime.ranks.failure import DONE, Board, Cause, PeerLost

INTERVAL = 0.5
MOMENT = 1.0
"""Seconds between reading another rank's cause and leaving: the failing rank speaks first."""
PATIENCE = 2.0
"""Seconds to wait for the real cause after losing a rank; a living rank beats several times meanwhile."""
OWN_GRACE = 5.0
"""Seconds that a failing rank gets to end by itself."""
FOLLOWER_GRACE = 2.0
"""The same for a rank that ends because another one has failed."""
FAREWELL = 10.0
"""Seconds that the keeper of the store waits for the others when all went well, and a rank for its own threads: on a
busy machine they come late."""
NAP = 5.0
"""A gap in our own time from which we conclude that it was this process that was stopped."""


class Watchdog:
    """Watches over one rank. ``keeper`` is the rank that keeps the store, None if a launcher does; ``report_fd`` is
    where a launcher of ours reads."""

    def __init__(
        self, board: Board, rank: int, num_ranks: int, silence: float, keeper: int | None, report_fd: int | None
    ) -> None:
        self._board = board
        self._rank = rank
        self._num_ranks = num_ranks
        self._silence = silence
        self._keeper = keeper
        self._report_fd = report_fd
        self._process = os.getpid()
        self._stopped = threading.Event()
        self._said = threading.Event()
        self._threads: list[threading.Thread] = []
        self._parted = False
        self._cause: Cause | None = None
        self._leave_at = float("inf")
        self._round = monotonic()
        self._seen = (self._next(rank), "", monotonic())
        self.doing: Callable[[], str] = lambda: ""
        self.end_silent: Callable[[int], None] = lambda rank: None
        self.leaving: Callable[[Cause], None] = lambda cause: None
        """Called when this process is about to end because of another rank."""

    def start(self) -> None:
        loops = {"vpipe-heart": self._heart, "vpipe-guard": self._guard}
        self._threads = [threading.Thread(target=loop, name=name, daemon=True) for name, loop in loops.items()]
        for thread in self._threads:
            thread.start()

    def failed(self, error: BaseException) -> Cause:
        """An exception ends this rank: tell the others, or find out what it is the consequence of."""
        if self._cause is None or not isinstance(error, PeerLost):
            try:
                if isinstance(error, PeerLost):
                    self._cause = self._find(error)
                else:
                    self._cause = self._board.post(Cause.of(self._rank, error))
            except RuntimeError:
                self._cause = self._store_lost() if isinstance(error, PeerLost) else Cause.of(self._rank, error)
            self._leave_within(FOLLOWER_GRACE if isinstance(error, PeerLost) else OWN_GRACE)
        if isinstance(error, PeerLost):
            error.cause = self._cause.fields()
        return self._cause

    def _find(self, error: PeerLost) -> Cause:
        """Wait for the real cause; if none comes, a rank that does not beat any more is it."""
        if error.cause is not None:
            return Cause(**error.cause)
        before = {rank: self._board.beat_of(rank) for rank in range(self._num_ranks) if rank != self._rank}
        until = monotonic() + PATIENCE
        while monotonic() < until:
            cause = self._board.read()
            if cause is not None and cause.kind != DONE:
                return cause
            sleep(0.1)
        gone = [rank for rank, beat in before.items() if self._board.beat_of(rank) == beat]
        rank = gone[0] if gone and error.peer not in gone else error.peer
        if rank is None:
            rank = self._next(self._rank)
        if before.get(rank) == DONE:
            what = f"rank {rank} had finished when {error}; do all ranks make the same calls?"
        elif error.peer in (rank, None):
            what = f"rank {rank} is gone: killed, or ended without a word; {error}"
        else:
            what = f"rank {rank} is gone, and {error}"
        return self._board.post(Cause(rank, "gone", what, self._rank))

    def finish(self) -> None:
        """This rank ends; if it keeps the store, the others first read what they must know."""
        if os.getpid() != self._process:
            return
        if not self._stopped.is_set():
            self._stopped.set()
            with suppress(RuntimeError):  # the store has gone before us
                self._say_done()
        # A thread that comes back from the store while the interpreter ends is unwound through C++: the process aborts.
        # On a busy machine it may come back late: the keeper of the store is ending too, and answers no more.
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(FAREWELL)

    def _say_done(self) -> None:
        if self._cause is None:
            self._board.beat(DONE)
            if self._keeper == self._rank:
                self._board.post(Cause(self._rank, DONE, "", self._rank))
        self._part()

    def _part(self) -> None:
        """Say that this rank needs the store no more; its keeper waits until all others have said so."""
        if self._keeper != self._rank:
            if not self._parted:
                self._parted = True
                self._board.acknowledge()
            return
        until = monotonic() + (FAREWELL if self._cause is None else FOLLOWER_GRACE)
        while self._board.num_acknowledged() < self._num_ranks - 1 and monotonic() < until:
            sleep(0.02)

    def _leave_within(self, seconds: float) -> None:
        """Let the main thread end by itself for a while.

        An interpreter that shuts down runs no thread of ours any more, so a timer in C stands behind the guard.
        """
        self._leave_at = monotonic() + seconds
        with suppress(OSError, RuntimeError):
            nowhere = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
            faulthandler.dump_traceback_later(seconds + 1.0, exit=True, file=nowhere)
            self._nowhere = nowhere

    def _heart(self) -> None:
        number = 0
        while not self._stopped.wait(INTERVAL):
            number += 1
            try:
                self._board.beat(f"{number} {self.doing()}")
                cause = self._board.read()
                if cause is None:
                    cause = self._look_at_next()
            except RuntimeError:
                if self._stopped.wait(MOMENT):
                    return  # this rank has finished meanwhile
                self.leave(self._cause or self._store_lost())
            self._round = monotonic()
            if cause is not None:
                self._heard(cause)
                return

    def _heard(self, cause: Cause) -> None:
        if self._keeper != self._rank:
            with suppress(RuntimeError):
                self._part()
        if cause.kind == DONE:
            self._stopped.set()  # the keeper of the store ended well: from now on no rank watches
        elif cause.by != self._rank or cause.kind not in ("error", "user", "interrupt"):
            self._cause = self._cause or cause
            if not self._stopped.wait(MOMENT):
                self.leave(cause)

    def _look_at_next(self) -> Cause | None:
        rank, seen, since = self._seen
        now = monotonic()
        beat = self._board.beat_of(rank)
        if beat == DONE:
            following = self._next(rank)
            self._seen = (following if following != self._rank else rank, "", now)
        elif beat != seen or now - self._round > NAP:
            self._seen = (rank, beat, now)
        elif now - since > self._silence:
            doing = beat.partition(" ")[2]
            seen_at = f"; it was last seen at {doing}" if doing else ""
            what = f"rank {rank} has been silent for {self._silence:g} s{seen_at}"
            cause = self._board.post(Cause(rank, "silent", what, self._rank))
            self.say(cause)  # before the launcher sees a rank that was killed and wonders why
            self.end_silent(rank)
            return cause
        return None

    def _guard(self) -> None:
        last = monotonic()
        while not self._stopped.wait(1.0):
            now = monotonic()
            if now - last > NAP:
                self._round = now
            last = now
            if now > self._leave_at and self._cause is not None:
                self.leave(self._cause)
            if now - self._round > self._silence + INTERVAL and not self._stopped.is_set():
                who = f"rank {self._keeper}, which keeps the store," if self._keeper is not None else "the store"
                what = f"{who} has been silent for {self._silence:g} s"
                if self._keeper is not None:
                    self.end_silent(self._keeper)
                self.leave(Cause(self._keeper or 0, "silent", what, self._rank))

    def _store_lost(self) -> Cause:
        who = f"rank {self._keeper}, which keeps the store," if self._keeper is not None else "the launcher's store"
        return Cause(self._keeper or 0, "gone", f"{who} is gone: killed, or ended without a word", self._rank)

    def leave(self, cause: Cause) -> NoReturn:
        """Say why in one line and end the process, wherever its main thread is."""
        self.say(cause)
        with suppress(Exception):
            self.leaving(cause)
        if self._keeper == self._rank:
            with suppress(RuntimeError):
                self._part()
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(0.5)  # the main thread may hold the stream
        os._exit(1)

    def say(self, cause: Cause) -> None:
        """To the launcher if it is ours, else to stderr; once."""
        if self._said.is_set() or (cause.rank == self._rank and cause.kind in ("error", "user")):
            return
        self._said.set()
        if self._report_fd is not None:
            found = {"rank": self._rank, "kind": "lost", "sentence": str(cause), "cause": cause.fields()}
            os.write(self._report_fd, json.dumps(found).encode() + b"\n")
        else:
            os.write(2, f"vpipe: rank {self._rank} ends because {cause}\n".encode())

    def _next(self, rank: int) -> int:
        return (rank + 1) % self._num_ranks


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
