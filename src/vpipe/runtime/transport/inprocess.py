"""Ranks as threads of one process: the same engine without a launcher, for notebooks, tests and debugging.

Values are handed over as copies, because a stage may change its input in place. Routes keep their order as they do
between devices, so that a program which pairs messages wrongly fails here too, and in the same words.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vpipe.runtime.crossing import copied_value
from vpipe.runtime.transport.base import Transport
from vpipe.runtime.transport.routes import Route, route_of
from vpipe.runtime.transport.wire import Envelope, mismatch


class PeerFailed(RuntimeError):
    """Another rank failed first; its own error is the one to read."""


class Hub:
    """What the ranks of one process share."""

    def __init__(self, num_ranks: int, blocking: bool = False) -> None:
        self.num_ranks = num_ranks
        self.blocking = blocking
        self.changed = threading.Condition()
        self.reset()

    def reset(self) -> None:
        """Forget what a failed step has left."""
        self.mail: dict[tuple[Route, int], tuple[Envelope, Any]] = {}
        self.num_sent: Counter[Route] = Counter()
        self.num_posted: Counter[Route] = Counter()
        self.posted: dict[tuple[int, Envelope], tuple[Route, int]] = {}
        self.gathered: dict[tuple[tuple[int, ...], int], dict[int, Tensor]] = defaultdict(dict)
        self.rounds: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self.failure: BaseException | None = None

    def transports(self) -> list[InProcessTransport]:
        return [InProcessTransport(self, rank) for rank in range(self.num_ranks)]

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Call with ``changed`` held."""
        while not ready():
            if self.failure is not None:
                raise PeerFailed("another rank failed")
            self.changed.wait()


class InProcessTransport(Transport):
    """One rank's end of the hub."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub = hub
        self.rank = rank
        self.num_ranks = hub.num_ranks

    def post(self, envelope: Envelope, source_rank: int) -> None:
        hub = self.hub
        route = route_of(envelope, source_rank, self.rank)
        with hub.changed:
            hub.posted[self.rank, envelope] = (route, hub.num_posted[route])
            hub.num_posted[route] += 1
            hub.changed.notify_all()

    def take(self, envelope: Envelope) -> Any:
        hub = self.hub
        with hub.changed:
            place = hub.posted.pop((self.rank, envelope))
            hub.wait_until(lambda: place in hub.mail)
            found, value = hub.mail.pop(place)
        if found != envelope:
            raise mismatch(envelope, found)
        return self._arrived(value)

    def send(self, envelope: Envelope, target_rank: int, value: Any) -> None:
        copy = self._leaving(target_rank, value)
        hub = self.hub
        route = route_of(envelope, self.rank, target_rank)
        with hub.changed:
            number = hub.num_sent[route]
            hub.num_sent[route] += 1
            hub.mail[route, number] = (envelope, copy)
            hub.changed.notify_all()
            if hub.blocking:
                hub.wait_until(lambda: hub.num_posted[route] > number)

    def _leaving(self, target_rank: int, value: Any) -> Any:
        """What is handed over."""
        return copied_value(value)

    def _arrived(self, value: Any) -> Any:
        """What the engine gets of it."""
        return value

    def all_gather(self, value: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None) -> list[Tensor]:
        group = tuple(ranks)
        hub = self.hub
        with hub.changed:
            number = hub.rounds[self.rank, group]
            hub.rounds[self.rank, group] += 1
            found = hub.gathered[group, number]
            found[self.rank] = value.detach().flatten().clone()
            hub.changed.notify_all()
            hub.wait_until(lambda: len(found) == len(group))
            found_all = [found[rank] for rank in group]
            hub.gathered.pop((group, number - 2), None)  # two rounds ago: everyone has read it
        return found_all

    def all_reduce(self, value: Tensor, ranks: Sequence[int]) -> None:
        first, *rest = self.all_gather(value, ranks)
        total = first.clone()
        for other in rest:
            total += other
        value.copy_(total.view_as(value))

    def barrier(self) -> None:
        self.all_gather(torch.empty(0), range(self.num_ranks))

    def fail(self, error: BaseException) -> None:
        with self.hub.changed:
            if self.hub.failure is None and not isinstance(error, PeerFailed):
                self.hub.failure = error
            self.hub.changed.notify_all()
