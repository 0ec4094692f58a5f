"""Ranks as processes: messages through shared memory on one machine, by streams between any (``link.py``).

A message over gloo costs a rendezvous, two threads and their locks. Here it is one copy into a ring that both processes
see, or into the network's buffers, and one record on a socket. The receiver copies it out when it takes it; while it
waits for another, it copies out the first few of each neighbour's ring, whose time then costs nothing.
A few numbers from each of several ranks (losses, norms) are gathered the same way: the first of them takes all and
tells all. Large collective operations, and messages that are too large for a stream, go through ``torch.distributed``.

Messages of all channels between two ranks come in the order in which they were sent; a rank that waits for one of them
puts the others into a mailbox. Of one channel they are sent in the order of the posted receives. So a rank that is
about to sleep and finds there, of the channel it waits for, what it has not posted, knows that the ranks disagree.

One thread at a time uses a transport. A killed peer closes its sockets, so a rank that waits for it knows at once.
"""

from __future__ import annotations

import os
import select
from collections import defaultdict
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from vpipe.runtime.ranks.crowding import CrowdedCores
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


class LinkedTransport(DistributedTransport):
    """One process's end. To ranks without a link messages go over gloo."""

    def __init__(self, links: Mapping[int, Link], cores: CrowdedCores, *, timeout: float = 1800.0) -> None:
        super().__init__(timeout=timeout)
        self._cores = cores
        self.links = dict(links)
        self._patience = self.patience.total_seconds()
        self._spin = SPIN if cores.has_room else 0.0
        self._expected: dict[Envelope, Link] = {}
        self._mail: dict[tuple[int, Envelope], Any] = {}
        """(peer, envelope) → value, of messages that came while this rank waited for others."""
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
        self._cores.begin()
        for link in self.links.values():
            link.pay()
            for (source, target, backward), num_bytes in link.too_large.items():
                channel = Channel(source, target, backward, link.peer)
                self._wanted[channel] = num_bytes
                self._large.add(channel)
            link.too_large.clear()
        super().begin_step(step)
        self._step = step
        unread = [(link.peer, found) for link in self.links.values() for found in link.unread()]
        for peer, envelope in [*self._mail, *unread]:
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
        self._expected[envelope] = link
        if link.owes:
            link.pay()

    def _is_large(self, envelope: Envelope, peer: int) -> bool:
        return Channel(envelope.source, envelope.target, envelope.backward, peer) in self._large

    def take(self, envelope: Envelope) -> Any:
        link = self._expected.pop(envelope, None)
        if link is None:
            return super().take(envelope)
        if self._mail and (link.peer, envelope) in self._mail:
            return self._mail.pop((link.peer, envelope))
        try:
            return self._await(link, envelope)
        except _BROKEN as error:
            raise self._gone(link, f"waits for {envelope}", error) from None

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
        self._cores.end()

    def fail(self, error: BaseException) -> None:
        self._cores.end()
        super().fail(error)

    def all_gather(self, value: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None) -> list[Tensor]:
        unlinked = any(rank not in self.links and rank != self.rank for rank in ranks)
        if sizes is None or unlinked or max(sizes) * value.element_size() > FEW_BYTES:
            return super().all_gather(value, ranks, sizes)
        mine = value.detach().flatten().clone()
        number = self._num_gathered[tuple(ranks)]
        self._num_gathered[tuple(ranks)] = number + 1
        given, told = (Envelope(self._step, _GATHERING, _GATHERING, number % 2**31, back) for back in (0, 1))
        first, *others = ranks
        if self.rank != first:
            self.post(told, first)
            self.send(given, first, mine)
            return _parted(self.take(told), sizes)
        found = [mine]
        for rank in others:  # one after the other: they share an envelope
            self.post(given, rank)
            found.append(self.take(given))
        # One tensor is described, written and read sooner than one a rank, by all ranks, while all others wait.
        everything = (torch.cat(found),) if len({block.dtype for block in found}) == 1 else tuple(found)
        for rank in others:
            self.send(told, rank, everything)
        return found

    def _await(self, link: Link, envelope: Envelope) -> Any:
        """Read the link up to a message; sleep where it has not come."""
        until = 0.0
        while True:
            while (message := link.read()) is not None:
                found, value = message
                if found == envelope:
                    return value
                self._mail[link.peer, found] = value
            if self._mail:
                if (link.peer, envelope) in self._mail:  # it was copied out while this rank made room
                    return self._mail.pop((link.peer, envelope))
                self._refuse_strangers(link, envelope)
            until = until or monotonic() + self._patience
            self._read(link, "waits for", envelope, until)

    def _refuse_strangers(self, link: Link, envelope: Envelope) -> None:
        """What was sent before the message that is waited for, on its channel, has been posted before it."""
        _, source, target, _, backward = envelope
        for peer, found in self._mail:
            same = peer == link.peer and (found.source, found.target, found.backward) == (source, target, backward)
            if same and found not in self._expected:
                del self._mail[peer, found]  # told of once
                raise mismatch(envelope, found)

    def _read(self, link: Link, doing: str, envelope: Envelope, until: float) -> None:
        """Wait until anything has come from any rank, for the sake of ``link``, and hear it. What others have sent is
        copied out where ``link`` has sent nothing."""
        if link.gone:
            raise self._gone(link, f"{doing} {envelope}", None)
        for other in self.links.values():
            if other.owes:
                other.clear(self._mail)
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
            num_held = sum(peer == ready.peer for peer, _ in self._mail) if ready.eager else 0
            while ready is not link and num_held < ready.eager and (message := ready.read()) is not None:
                self._mail[ready.peer, message[0]] = message[1]
                num_held += 1

    def _look(self, patience: float) -> list[tuple[int, int]]:
        if self._spin:
            until = monotonic() + self._spin
            while monotonic() < until:
                if events := self._events.poll(0):
                    return events
        return self._events.poll(max(0.0, patience), self._most_events)

    def _gone(self, link: Link, doing: str, error: OSError | None) -> PeerLost:
        if isinstance(error, TimeoutError):
            return self._silent(link, doing)
        return PeerLost(f"rank {self.rank} {doing}, but rank {link.peer} has closed the connection", link.peer)

    def _silent(self, link: Link, doing: str) -> PeerLost:
        what = f"rank {self.rank} {doing}, but rank {link.peer} does not answer: nothing for {self._patience:g} s"
        others = f"; but {next(iter(self._mail))[1]} has come" if self._mail else ""
        return PeerLost(what + others, link.peer)

    def _leave(self) -> None:
        """Before a wait that reads no links: those from whom something is expected must not wait for room."""
        for envelope, link in self._expected.items():
            if (link.peer, envelope) not in self._mail:
                link.leave()

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


def _parted(everything: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Of all ranks what each gave, from the one tensor in which it came, or as it came."""
    return list(everything[0].split_with_sizes(list(sizes)) if len(everything) == 1 else everything)


_open: WeakSet[LinkedTransport] = WeakSet()


def _forget() -> None:
    """A forked child (a worker of a data loader) must not keep a killed rank's connections open."""
    for transport in list(_open):
        transport.close()


os.register_at_fork(after_in_child=_forget)
