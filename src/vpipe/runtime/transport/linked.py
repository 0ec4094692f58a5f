"""Ranks as processes: messages through shared memory on one machine, by streams between any (``link.py``).

A message over gloo costs a rendezvous, two threads and their locks. Here it is one copy into a ring that both processes
see, or into the network's buffers, and one record on a socket. The receiver copies it out when it takes it; while it
waits for another, it copies out the first few of each neighbour's ring, whose time then costs nothing.
A few numbers from each of several ranks (losses, norms) are gathered the same way: the first of them takes all and
tells all. Large collective operations, and messages that are too large for a stream, go through ``torch.distributed``.

Messages of all channels between two ranks come in the order in which they were sent; a rank that waits for one of them
puts the others into a mailbox. Of one channel, the message that comes n-th answers the receive that was posted n-th.

One thread at a time uses a transport. A killed peer closes its sockets, so whoever waits for it knows at once.
"""

from __future__ import annotations

import os
import select
from collections import defaultdict
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any
from weakref import WeakSet

from torch import Tensor

from vpipe.runtime.ranks.failure import PeerLost
from vpipe.runtime.transport.distributed import Channel, DistributedTransport
from vpipe.runtime.transport.link import Link
from vpipe.runtime.transport.wire import Envelope, mismatch, pack

SPIN = 20e-6
"""Seconds for which a rank looks again before it sleeps, where the machine has more cores than ranks."""
FEW_BYTES = 16 * 1024
"""Up to here, what a rank gives to a collective operation goes through shared memory."""
_GATHERING = -1
"""The stage that messages of such an operation name as source and target."""
_BROKEN = (BrokenPipeError, ConnectionResetError, TimeoutError)
"""What a socket says of a peer that is gone or silent."""

Place = tuple[int, int, int, int, int]
"""(peer, source stage, target stage, backward, number within this channel)."""


class LinkedTransport(DistributedTransport):
    """One process's end. To ranks without a link messages go over gloo."""

    def __init__(self, links: Mapping[int, Link], *, timeout: float = 1800.0) -> None:
        super().__init__(timeout=timeout)
        self.links = dict(links)
        self._patience = self.patience.total_seconds()
        self._spin = SPIN if len(os.sched_getaffinity(0)) > len(links) + 1 else 0.0
        self._expected: dict[Envelope, Place] = {}
        self._mail: dict[Place, tuple[Envelope, Any]] = {}
        self._num_expected: dict[tuple[int, int, int, int], int] = defaultdict(int)
        self._num_arrived: dict[tuple[int, int, int, int], int] = defaultdict(int)
        self._large: set[Channel] = set()
        """What the links carry no more: earlier messages were too large."""
        self._step = 0
        self._num_gathered: dict[tuple[int, ...], int] = defaultdict(int)
        self._events = select.epoll()
        self._most_events = max(1, len(self.links))
        self._link_of = {link.connection.fileno(): link for link in self.links.values()}
        for descriptor in self._link_of:
            self._events.register(descriptor, select.EPOLLIN)
        _open.add(self)

    def begin_step(self, step: int) -> None:
        for link in self.links.values():
            link.pay()
            for (source, target, backward), num_bytes in link.too_large.items():
                channel = Channel(source, target, backward, link.peer)
                self._wanted[channel] = num_bytes
                self._large.add(channel)
            link.too_large.clear()
        super().begin_step(step)
        self._step = step
        came = [(peer, envelope) for (peer, *_), (envelope, _) in self._mail.items()]
        for peer, envelope in came + [(link.peer, found) for link in self.links.values() for found in link.unread()]:
            if envelope.step < step:
                raise RuntimeError(
                    f"rank {peer} sent {envelope}, but no action of rank {self.rank} took it: "
                    "the ranks run different programs or steps"
                )

    def post(self, envelope: Envelope, source_rank: int) -> None:
        link = self.links.get(source_rank)
        if link is None or (self._large and self._is_large(envelope, source_rank)):
            super().post(envelope, source_rank)
            return
        channel = (source_rank, envelope.source, envelope.target, envelope.backward)
        number = self._num_expected[channel]
        self._num_expected[channel] = number + 1
        self._expected[envelope] = (*channel, number)
        if link.owes:
            link.pay()

    def _is_large(self, envelope: Envelope, peer: int) -> bool:
        return Channel(envelope.source, envelope.target, envelope.backward, peer) in self._large

    def take(self, envelope: Envelope) -> Any:
        place = self._expected.pop(envelope, None)
        if place is None:
            return super().take(envelope)
        if place in self._mail:
            found, value = self._mail.pop(place)
        else:
            link = self.links[place[0]]
            try:
                found, value = self._await(link, place, envelope)
            except _BROKEN as error:
                raise self._gone(link, f"waits for {envelope}", error) from None
        if found != envelope:
            raise mismatch(envelope, found)
        return value

    def send(self, envelope: Envelope, target_rank: int, value: Any) -> None:
        link = self.links.get(target_rank)
        if link is None or (self._large and self._is_large(envelope, target_rank)):
            super().send(envelope, target_rank, value)
            return
        packed = pack(envelope, value)
        try:
            if link.send(packed):
                return
            link.receive()  # perhaps credit has come
            if link.send(packed):
                return
            link.make_room(packed.layout.num_bytes)
            until = monotonic() + self._patience
            while not link.send(packed):
                self._read(link, "sends", envelope, until)
        except _BROKEN as error:
            raise self._gone(link, f"sends {envelope}", error) from None

    def end_step(self) -> None:
        super().end_step()
        for link in self.links.values():
            if not link.drain(self._patience):
                what = f"rank {self.rank} ends its step, but rank {link.peer} does not read what was sent to it"
                raise PeerLost(what, link.peer)

    def all_gather(self, value: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None) -> list[Tensor]:
        few = sizes is not None and max(sizes) * value.element_size() <= FEW_BYTES
        if not few or any(rank not in self.links and rank != self.rank for rank in ranks):
            return super().all_gather(value, ranks, sizes)
        mine = value.detach().flatten().clone()
        number = self._num_gathered[tuple(ranks)]
        self._num_gathered[tuple(ranks)] = number + 1
        given, told = (Envelope(self._step, _GATHERING, _GATHERING, number % 2**31, back) for back in (0, 1))
        first, *others = ranks
        if self.rank != first:
            self.post(told, first)
            self.send(given, first, mine)
            return list(self.take(told))
        found = [mine]
        for rank in others:  # one after the other: they share an envelope
            self.post(given, rank)
            found.append(self.take(given))
        for rank in others:
            self.send(told, rank, found)
        return found

    def _await(self, link: Link, place: Place, envelope: Envelope) -> tuple[Envelope, Any]:
        """Read the link up to the message of ``place``; sleep where it has not come."""
        until = 0.0
        while True:
            while (message := link.read()) is not None:
                arrived = self._place(link.peer, message[0])
                if arrived == place:
                    return message
                self._mail[arrived] = message
            if place in self._mail:  # it was copied out while this rank made room
                return self._mail.pop(place)
            until = until or monotonic() + self._patience
            self._read(link, "waits for", envelope, until)

    def _read(self, link: Link, doing: str, envelope: Envelope, until: float) -> None:
        """Wait until anything has come from any rank, for the sake of ``link``, and hear it. What others have sent is
        copied out where ``link`` has sent nothing."""
        if link.gone:
            raise self._gone(link, f"{doing} {envelope}", None)
        for other in self.links.values():
            if other.owes:
                other.clear(self._deliver)
        events = self._look(until - monotonic())
        if not events:
            raise self._silent(link, f"{doing} {envelope}")
        for descriptor, _ in events:
            ready = self._link_of[descriptor]
            ready.receive()
            if ready.gone:
                self._events.unregister(descriptor)
        for descriptor, _ in () if link.has_unread else events:
            ready = self._link_of[descriptor]
            num_held = sum(place[0] == ready.peer for place in self._mail) if ready.eager else 0
            while ready is not link and num_held < ready.eager and (message := ready.read()) is not None:
                self._deliver(ready.peer, *message)
                num_held += 1

    def _look(self, patience: float) -> list[tuple[int, int]]:
        if self._spin:
            until = monotonic() + self._spin
            while monotonic() < until:
                if events := self._events.poll(0):
                    return events
        return self._events.poll(max(0.0, patience), self._most_events)

    def _deliver(self, peer: int, envelope: Envelope, value: Any) -> None:
        self._mail[self._place(peer, envelope)] = (envelope, value)

    def _place(self, peer: int, envelope: Envelope) -> Place:
        """Which receive a message answers that has just come."""
        _, source, target, _, backward = envelope
        channel = (peer, source, target, backward)
        number = self._num_arrived[channel]
        self._num_arrived[channel] = number + 1
        return (peer, source, target, backward, number)

    def _gone(self, link: Link, doing: str, error: OSError | None) -> PeerLost:
        if isinstance(error, TimeoutError):
            return self._silent(link, doing)
        return PeerLost(f"rank {self.rank} {doing}, but rank {link.peer} has closed the connection", link.peer)

    def _silent(self, link: Link, doing: str) -> PeerLost:
        what = f"rank {self.rank} {doing}, but rank {link.peer} does not answer: nothing for {self._patience:g} s"
        others = f"; but {next(iter(self._mail.values()))[0]} has come" if self._mail else ""
        return PeerLost(what + others, link.peer)

    def _leave(self) -> None:
        """Before a wait that reads no links: those from whom something is expected must not wait for room."""
        for place in self._expected.values():
            if place not in self._mail:
                self.links[place[0]].leave()

    def _wait(self, work: Any, doing: str, peer: int) -> None:
        self._leave()
        super()._wait(work, doing, peer)

    def _collective(self, call: Any) -> None:
        self._leave()
        super()._collective(call)

    def close(self) -> None:
        """Close the connections. What this rank has sent can still be read."""
        _open.discard(self)
        self._events.close()
        for link in self.links.values():
            link.close()
        super().close()


_open: WeakSet[LinkedTransport] = WeakSet()


def _forget() -> None:
    """A forked child (a worker of a data loader) must not keep a killed rank's connections open."""
    for transport in list(_open):
        transport.close()


os.register_at_fork(after_in_child=_forget)
