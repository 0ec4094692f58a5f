"""Which of several ready actions goes first on a device that they share.

Threads that each carry one microbatch all want the same device. Left to itself the device serves them in turns, so that
all microbatches leave the first stage at the same late moment and the stages behind it wait.

A **policy** says who goes first and knows no device. A **backend** enforces it:

    policy                                   backend
    none          order of arrival           Turnstile              threads of this process (here)
    first-hp      microbatch 0, the rest     OrionClients           the Orion library (orion)
    fifo          microbatch 0, 1, 2, ...
    critical-path I/B before F before W
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

from vpipe.errors import UserError, nearest
from vpipe.schedule.action import Action, Kind

SortKey = tuple[int, ...]
Policy = Callable[[Action], SortKey]
"""Action → sort key: the smallest goes first, equals go in the order in which they came."""


def none(action: Action) -> SortKey:
    """Order of arrival."""
    return ()


def first_hp(action: Action) -> SortKey:
    """Microbatch 0 has high priority, the rest is best effort. What belongs to a whole stage is not held up."""
    return (int(action.microbatch > 0),)


def fifo(action: Action) -> SortKey:
    """Lower microbatches first: the strict order in which a pipeline fills and drains."""
    return (action.microbatch,)


_WAITED_FOR = {Kind.F: 1, Kind.W: 2, Kind.REDUCE: 3, Kind.AGREE: 3, Kind.STEP: 3, Kind.OUT: 3}
"""Kind → how little others wait for it; what is not listed (I, B and the transfers) is waited for most."""


def critical_path(action: Action) -> SortKey:
    """Input gradients before forwards before weight gradients: deferred W fills the gaps that the others leave."""
    return (_WAITED_FOR.get(action.kind, 0), action.microbatch)


POLICIES: dict[str, Policy] = {"none": none, "first-hp": first_hp, "fifo": fifo, "critical-path": critical_path}
"""The values of ``parallel.priority``."""


def policy(name: str) -> Policy:
    """The policy of ``parallel.priority``."""
    if name not in POLICIES:
        hint = nearest(name, POLICIES)
        raise UserError(f"there is no priority {name!r}{hint}; parallel.priority is one of {', '.join(POLICIES)}")
    return POLICIES[name]


class Backend(Protocol):
    """What enforces a policy on one device."""

    def turn(self, action: Action) -> AbstractContextManager[None]:
        """Roughly: ``with backend.turn(action): work()``, from the thread that does the work."""

    def close(self) -> None:
        """Give back what the backend holds."""


class Turnstile:
    """A device of one slot that many threads share: the one with the smallest key goes next.

    The thread that leaves hands the device over to the next one before anybody else can take it, so that the order is
    the policy's and never the operating system's.
    """

    def __init__(self, policy: Policy = none) -> None:
        self._policy = policy
        self._lock = threading.Lock()
        self._waiting: list[tuple[SortKey, int, threading.Lock]] = []
        self._arrivals = count()
        self._busy = False

    @contextmanager
    def turn(self, action: Action) -> Iterator[None]:
        """Hold the device for the body."""
        self._enter(action)
        try:
            yield
        finally:
            self._leave()

    def close(self) -> None:
        """Nothing to give back: the threads that wait own their turns."""

    def _enter(self, action: Action) -> None:
        gate = threading.Lock()
        with self._lock:
            if not self._busy:
                self._busy = True
                return
            gate.acquire()
            heappush(self._waiting, (self._policy(action), next(self._arrivals), gate))
        gate.acquire()

    def _leave(self) -> None:
        with self._lock:
            if self._waiting:
                heappop(self._waiting)[2].release()
            else:
                self._busy = False
