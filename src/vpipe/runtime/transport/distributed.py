"""Ranks as processes: messages over ``torch.distributed``.

One message is one block of bytes. Its receive must be posted before its size is known, so both ends of a channel agree
on a capacity: what the largest message of an earlier step needed. A message that is larger sends its description first
and its tensors after; from the next step on the capacity covers it. In a steady state every message is one transfer.

gloo has no way to ask whether a send is done short of waiting for it, so a bounded number of sends may be under way on
a channel; the next one waits for the oldest. That cannot deadlock: the verifier accepts only programs that run even if
every send waits.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe.runtime.ranks import membership
from vpipe.runtime.ranks.failure import PeerLost, reason
from vpipe.runtime.transport.base import Transport
from vpipe.runtime.transport.wire import Envelope, Packed, pack, unpack, unpack_head

START_CAPACITY = 16 * 1024
SENDS_UNDER_WAY = 4
_STAGES = 1024


class Channel(NamedTuple):
    """Everything that flows from one stage to another in one direction, between two ranks."""

    source: int
    target: int
    backward: int
    peer: int

    def __str__(self) -> str:
        return f"{'gradients' if self.backward else 'activations'} of stage {self.source} to stage {self.target}"

    @property
    def tag(self) -> int:
        """Equal at both ends; different for the channels between two ranks."""
        return 1 + (self.source % _STAGES * _STAGES + self.target % _STAGES) * 2 + self.backward

    def tail_tag(self, microbatch: int) -> int:
        """The tag of the tensors of one large message: units may be taken in another order than they were sent in."""
        return self.tag + 2 * _STAGES**2 * (1 + microbatch % 256)


class DistributedTransport(Transport):
    """One process's end, over an initialised process group."""

    def __init__(self, *, blocking: bool = False, timeout: float = 1800.0) -> None:
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self._sends_under_way = 0 if blocking else SENDS_UNDER_WAY
        self.patience = timedelta(seconds=timeout + membership.SLACK)
        self._capacity: dict[Channel, int] = defaultdict(lambda: START_CAPACITY)
        self._wanted: dict[Channel, int] = {}
        self._posted: dict[Envelope, tuple[Channel, Tensor, Any]] = {}
        self._sent: dict[Channel, deque[tuple[Any, Tensor]]] = defaultdict(deque)
        """What is under way of a channel: a transfer and its memory."""
        self._tails: dict[Channel, list[tuple[Any, Tensor]]] = defaultdict(list)
        self._groups: dict[tuple[int, ...], Any] = {}
        self._latest: Any = None
        """The latest collective operation since a step ended. gloo's thread lets go of what is done a little later, and
        who is last frees its tensors: in a thread of gloo's, while the interpreter ends, that aborts the process."""

    @cached_property
    def _gloo(self) -> Any:
        """Who carries messages of main memory. (The process group finds it anew for every call, by the dispatcher.)"""
        world: Any = dist.group.WORLD
        return world._get_backend(torch.device("cpu"))

    def begin_step(self, step: int) -> None:
        for channel, wanted in self._wanted.items():
            self._capacity[channel] = max(self._capacity[channel], wanted)
        self._wanted.clear()

    def post(self, envelope: Envelope, source_rank: int) -> None:
        channel = Channel(envelope.source, envelope.target, envelope.backward, source_rank)
        block = torch.empty(self._capacity[channel], dtype=torch.uint8)
        self._posted[envelope] = (channel, block, self._begin("recv", block, channel, channel.tag))

    def take(self, envelope: Envelope) -> Any:
        channel, block, work = self._posted.pop(envelope)
        self._wait(work, f"waits for {envelope}", channel.peer)
        layout = unpack_head(block, envelope)
        if layout.num_bytes <= block.numel():
            return unpack(block, layout)
        self._wanted[channel] = max(layout.num_bytes, self._wanted.get(channel, 0))
        base = layout.offsets[0] if layout.offsets else layout.num_bytes
        tail = torch.empty(layout.num_bytes - base, dtype=torch.uint8)
        if tail.numel():
            work = self._begin("recv", tail, channel, channel.tail_tag(envelope.microbatch))
            self._wait(work, f"waits for {envelope}", channel.peer)
        return unpack(tail, layout, base)

    def send(self, envelope: Envelope, target_rank: int, value: Any) -> None:
        channel = Channel(envelope.source, envelope.target, envelope.backward, target_rank)
        packed = pack(envelope, value)
        capacity = self._capacity[channel]
        if packed.layout.num_bytes <= capacity:
            block = torch.empty(packed.layout.num_bytes, dtype=torch.uint8)
            packed.write(block.data_ptr())
            self._start(channel, block)
        else:
            self._send_large(channel, packed)

    def _send_large(self, channel: Channel, packed: Packed) -> None:
        layout, head = packed.layout, packed.head()
        if len(head) > self._capacity[channel]:
            raise RuntimeError(
                f"the description of {packed.envelope} takes {len(head)} bytes; too many separate tensors"
            )
        self._wanted[channel] = max(layout.num_bytes, self._wanted.get(channel, 0))
        self._start(channel, torch.frombuffer(bytearray(head), dtype=torch.uint8))
        if layout.offsets:
            tail = torch.empty(layout.num_bytes - layout.offsets[0], dtype=torch.uint8)
            packed.write_tensors(tail.data_ptr() - layout.offsets[0])
            # The peer asks for the tensors when it needs them, not when the program posts: waiting here could deadlock.
            work = self._begin("send", tail, channel, channel.tail_tag(packed.envelope.microbatch))
            self._tails[channel].append((work, tail))

    def _start(self, channel: Channel, block: Tensor) -> None:
        under_way = self._sent[channel]
        under_way.append((self._begin("send", block, channel, channel.tag), block))
        while len(under_way) > self._sends_under_way:
            self._wait(under_way.popleft()[0], f"sends {channel}", channel.peer)

    def end_step(self) -> None:
        for channel, under_way in (*self._sent.items(), *self._tails.items()):
            for work, _ in under_way:
                self._wait(work, f"sends {channel}", channel.peer)
            under_way.clear()
        self._latest = None

    def _begin(self, way: Literal["send", "recv"], block: Tensor, channel: Channel, tag: int) -> Any:
        """Start a transfer; gloo refuses at once where it knows that the peer is gone. (``dist.isend`` and ``irecv``
        call the same, after checks of what is always so here.)"""
        try:
            return getattr(self._gloo, way)([block], channel.peer, tag)
        except RuntimeError as error:
            doing = "sends" if way == "send" else "expects"
            raise self._lost(f"{doing} {channel}", channel.peer, error) from None

    def _wait(self, work: Any, doing: str, peer: int) -> None:
        try:
            work.wait(self.patience)
        except RuntimeError as error:
            raise self._lost(doing, peer, error) from None

    def _lost(self, doing: str, peer: int, error: RuntimeError) -> PeerLost:
        return PeerLost(f"rank {self.rank} {doing}, but rank {peer} does not answer: {reason(error)}", peer)

    def all_gather(self, value: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None) -> list[Tensor]:
        group = self._group(ranks)
        flat = value.detach().contiguous().view(-1)
        if sizes is None:
            found = [torch.empty(1, dtype=torch.int64) for _ in ranks]
            self._collective(lambda: dist.all_gather(found, torch.tensor([flat.numel()]), group=group, async_op=True))
            sizes = [int(size) for size in found]
        longest = max(sizes)
        mine = torch.zeros(longest, dtype=value.dtype)
        mine[: flat.numel()] = flat
        blocks = [torch.empty(longest, dtype=value.dtype) for _ in ranks]
        self._collective(lambda: dist.all_gather(blocks, mine, group=group, async_op=True))
        return [block[:size] for block, size in zip(blocks, sizes, strict=True)]

    def all_reduce(self, value: Tensor, ranks: Sequence[int]) -> None:
        group = self._group(ranks)
        self._collective(lambda: dist.all_reduce(value, group=group, async_op=True))

    def _group(self, ranks: Sequence[int]) -> Any:
        """The process group of ``ranks``; ``prepare_groups`` has made it."""
        key = tuple(ranks)
        return None if key == tuple(range(self.num_ranks)) else self._groups[key]

    def prepare_groups(self, groups: Sequence[Sequence[int]]) -> None:
        """Make process groups: every rank calls this with the same list, as torch demands."""
        for ranks in groups:
            key = tuple(ranks)
            if key not in self._groups and key != tuple(range(self.num_ranks)):
                member, make = membership.current(), partial(_new_group, list(key))
                self._groups[key] = member.grouped(make, sorted(key)) if member is not None else make("")

    def _collective(self, call: Callable[[], Any]) -> None:
        """Begin an operation and wait for it."""
        try:
            self._latest = call()
            self._latest.wait()
        except RuntimeError as error:
            raise PeerLost(f"rank {self.rank} lost another rank in a collective: {reason(error)}") from None

    def barrier(self) -> None:
        self._collective(lambda: dist.barrier(async_op=True))

    def fail(self, error: BaseException) -> None:
        membership.failed(error)


def _new_group(ranks: list[int], _: str) -> Any:
    return dist.new_group(ranks)
