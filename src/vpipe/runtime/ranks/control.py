"""A rank of an elastic run and the launcher that leads it.

The launcher alone decides who trains with whom: there is one such decision at a time, numbered by its *epoch*, so two
groups can never both go on. One socket a rank, which only its own process inherits, carries lines of JSON:

    rank → launcher   {"ready": true}                     it has left whatever it was in and waits for an order
                      {"lost": epoch, "sentence": …}      it lost a connection and has left that epoch
                      {"stepped": epoch, "iteration": n}  the first step of an epoch is done, then one a second at most
                      {"finished": epoch, "code": n}      it has trained to the end
                      {"beat": n}                         it lives; from a thread, four times a second
    launcher → rank   {"epoch": e, "rank": r, "num_ranks": n, …}    train so
                      {"abort": e}                                  leave epoch e, whatever you are doing
                      {"wish": text}                                a user asks this run for something
                      {"leave": true}                               all have finished

An abort reaches the main thread through its sockets (``sockets``), and through a signal where it computes or waits for
something else.
"""

from __future__ import annotations

import json
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from types import FrameType
from typing import Any

from vpipe.runtime.ranks.sockets import Sockets

CONTROL = "VPIPE_CONTROL_FD"
"""The variable in which a launcher tells an elastic rank the descriptor of its control socket."""
SLOT = "VPIPE_SLOT"
"""Which place of the launcher's list this process has; a rank's number changes, its slot does not."""
BEAT = 0.25
INSIST = 0.5
"""Seconds from shutting the sockets to the first signal, and between two."""
TELL_EVERY = 1.0
_IMPORTS = "<frozen importlib._bootstrap>"
"""The file of the functions by which Python imports a module."""


class Aborted(BaseException):
    """This epoch is over: leave it. No ``Exception``, so that nothing in between takes it for a failure of its own."""


@dataclass(frozen=True)
class EpochOrder:
    """Train as ``rank`` of ``num_ranks`` in ``epoch``; or leave, where ``epoch`` is 0."""

    epoch: int
    rank: int = 0
    num_ranks: int = 0
    facts: Mapping[str, Any] | None = None
    """What the launcher tells about the recovery that this order is part of."""


class Control:
    """This rank's end of the control socket."""

    def __init__(self, connection: socket.socket, slot: int) -> None:
        self.slot = slot
        self.heard = 0
        """The signal that asks the run to stop, where it came between two epochs."""
        self.sockets = Sockets()
        self.wished: Callable[[str], None] = lambda text: None
        """Told what is asked for, by a thread."""
        self._connection = connection
        self._orders: queue.SimpleQueue[EpochOrder | None] = queue.SimpleQueue()
        self._epoch = 0
        self._aborted = threading.Event()
        self._inside = False
        self._protected = 0
        self._told = 0.0
        self._lock = threading.Lock()
        signal.signal(signal.SIGUSR2, self._signalled)
        for loop in (self._listen, self._beat):
            threading.Thread(target=loop, name=f"vpipe-control{loop.__name__}", daemon=True).start()

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Control:
        return cls(socket.socket(fileno=int(environ[CONTROL])), int(environ[SLOT]))

    def next(self) -> EpochOrder | None:
        """Wait for an order; ``None`` means that the run is over."""
        while True:
            order = self._orders.get()
            if order is None or order.epoch >= self._epoch:
                return order

    def tell(self, **message: Any) -> None:
        """Say something to the launcher; one that is gone has ended us anyway."""
        with suppress(OSError), self._lock:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def stepped(self, iteration: int) -> None:
        """A step is done: what the launcher takes for progress."""
        if monotonic() - self._told > TELL_EVERY:
            self._told = monotonic()
            self.tell(stepped=self._epoch, iteration=iteration)

    @contextmanager
    def epoch(self, order: EpochOrder) -> Iterator[None]:
        """Around everything that is done for an order: only in here does an abort reach the main thread."""
        with self._lock:
            if self._epoch < order.epoch:  # else it was aborted before it began
                self._aborted.clear()
                self.sockets = Sockets()
            self._epoch = order.epoch
        self._told = 0.0
        self._inside = True
        try:
            if self._aborted.is_set():
                raise Aborted
            yield
        finally:
            self._inside = False

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Around what must not be torn: an abort waits until the body is done."""
        self._protected += 1
        try:
            yield
        finally:
            self._protected -= 1
        if self._inside and self._aborted.is_set() and not self._protected:
            raise Aborted

    def aborted(self, within: float) -> bool:
        """Whether this epoch is over, or is said to be over soon."""
        return self._aborted.wait(within)

    def _signalled(self, _: int, frame: FrameType | None) -> None:
        if self._inside and self._aborted.is_set() and not self._protected and not _tears(frame):
            raise Aborted

    def _listen(self) -> None:
        unread = b""
        while data := self._receive():
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                self._obey(json.loads(line))
        self._orders.put(None)

    def _receive(self) -> bytes:
        try:
            return self._connection.recv(65536)
        except OSError:
            return b""

    def _obey(self, message: dict[str, Any]) -> None:
        if "abort" in message:
            self._abort(int(message["abort"]))
        elif "wish" in message:
            self.wished(str(message["wish"]))
        elif "leave" in message:
            self._orders.put(None)
        else:
            known = {key: int(message.pop(key)) for key in ("epoch", "rank", "num_ranks")}
            self._orders.put(EpochOrder(**known, facts=message))

    def _abort(self, epoch: int) -> None:
        with self._lock:
            if epoch < self._epoch:
                return
            self._epoch = epoch
            self._aborted.set()
            sockets = self.sockets
        sockets.shut()
        threading.Thread(target=self._insist, args=(epoch, sockets), name="vpipe-control-insist", daemon=True).start()

    def _insist(self, epoch: int, sockets: Sockets) -> None:
        """Until the main thread has left the epoch. A signal may be lost: what a destructor raises is swallowed."""
        quiet = threading.Event()
        while not quiet.wait(INSIST) and self._inside and self._epoch == epoch:
            sockets.shut()
            with suppress(ProcessLookupError):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)

    def _beat(self) -> None:
        pause, number = threading.Event(), 0
        while not pause.wait(BEAT):
            number += 1
            self.tell(beat=number)


def _tears(frame: FrameType | None) -> bool:
    """Whether an exception would break what outlives an epoch: a module that is torn while it is imported stays half
    for ever, and a context that is torn while it is entered or left (autocast, no_grad) is never left. The next signal
    comes soon."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTS or frame.f_code.co_name in ("__enter__", "__exit__"):
            return True
        frame = frame.f_back
    return False
