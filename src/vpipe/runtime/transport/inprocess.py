"""Ranks as threads of one process: the same engine without a launcher, for notebooks, tests and debugging.

Values are handed over as copies, because a stage may change its input in place.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vpipe.runtime.wire import Envelope, flatten, unflatten


class PeerFailed(RuntimeError):
    """Another rank failed first; its own error is the one to read."""


class Hub:
    """What the ranks of one process share."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.changed = threading.Condition()
        self.mail: dict[Envelope, Any] = {}
        self.gathered: dict[tuple[tuple[int, ...], int], dict[int, Tensor]] = defaultdict(dict)
        self.failure: BaseException | None = None

    def transports(self) -> list[InProcessTransport]:
        return [InProcessTransport(self, rank) for rank in range(self.num_ranks)]

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Call with ``changed`` held."""
        while not ready():
            if self.failure is not None:
                raise PeerFailed("another rank failed")
            self.changed.wait()


class InProcessTransport:
    """One rank's end of the hub."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub = hub
        self.rank = rank
        self.num_ranks = hub.num_ranks
        self._rounds: dict[tuple[int, ...], int] = defaultdict(int)

    def begin_step(self, step: int) -> None:
        pass

    def post(self, envelope: Envelope, source_rank: int) -> None:
        pass

    def take(self, envelope: Envelope) -> Any:
        hub = self.hub
        with hub.changed:
            hub.wait_until(lambda: envelope in hub.mail)
            return hub.mail.pop(envelope)

    def send(self, envelope: Envelope, target_rank: int, value: Any) -> None:
        tensors: list[Tensor] = []
        structure = flatten(value, tensors)
        copies = iter([tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors])
        copy = unflatten(structure, lambda: next(copies))
        with self.hub.changed:
            self.hub.mail[envelope] = copy
            self.hub.changed.notify_all()

    def end_step(self) -> None:
        pass

    def all_gather(self, value: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None) -> list[Tensor]:
        group = tuple(ranks)
        hub, key = self.hub, (group, self._rounds[group])
        self._rounds[group] += 1
        with hub.changed:
            found = hub.gathered[key]
            found[self.rank] = value.detach().flatten().clone()
            hub.changed.notify_all()
            hub.wait_until(lambda: len(found) == len(group))
            found_all = [found[rank] for rank in group]
            hub.gathered.pop((group, key[1] - 2), None)  # two rounds ago: everyone has read it
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

    def close(self) -> None:
        pass
