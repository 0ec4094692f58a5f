"""Which transport a run takes: what its user asked for, and where its ranks are."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch.distributed as dist

from vpipe.errors import UserError
from vpipe.runtime.ranks.meeting import COME_WITHIN
from vpipe.runtime.transport.distributed import DistributedTransport
from vpipe.runtime.transport.link import Link
from vpipe.runtime.transport.linked import LinkedTransport
from vpipe.runtime.transport.neighbours import Card, Door
from vpipe.runtime.transport.ring_link import RingLink
from vpipe.runtime.transport.stream_link import StreamLink

RING_BYTES = 8 * 1024 * 1024
"""How large a ring grows before its sender waits; it holds at least four of the largest message. So many bytes may be
under way in a stream, too."""
Wanted = Literal["auto", "inprocess", "shm", "distributed"]


def check(wanted: str, in_process: bool, num_ranks: int, threads: bool = False) -> str:
    """Refuse a transport that these ranks cannot have. Of several ``threads``, only gloo serves more than one."""
    if wanted not in get_args(Wanted):
        raise UserError(f"there is no transport {wanted!r}; give one of {', '.join(get_args(Wanted))}")
    if wanted == "inprocess" and not in_process:
        raise UserError(
            f"transport='inprocess' runs all ranks in one process, but a launcher has started {num_ranks}; "
            "give transport='auto', or start the script without a launcher"
        )
    if wanted in ("shm", "distributed") and in_process and num_ranks > 1:
        raise UserError(
            f"transport={wanted!r} needs a process for every rank; start the script with "
            f"'vpipe run --nproc {num_ranks}', or give transport='auto'"
        )
    if threads and wanted == "shm":
        raise UserError(
            "transport='shm' serves one thread of a rank, but the threaded executor has one per microbatch; "
            "give transport='distributed' or 'auto', or executor='plain'"
        )
    return "distributed" if threads and wanted == "auto" and not in_process else wanted


def between_processes(
    wanted: str, *, blocking: bool, timeout: float, threads: bool = False, ring_bytes: int = RING_BYTES
) -> DistributedTransport:
    """The transport of this process, one of several. Every rank calls this at the same time. Where sends wait
    (``blocking``), and where several ``threads`` of a rank send, messages go over gloo."""
    plain = DistributedTransport(blocking=blocking, timeout=timeout)
    if dist.get_world_size() == 1:
        return plain
    door = Door(wanted)
    try:
        door.open(plain.num_ranks)
        cards = door.exchange(plain)
        shares = _shares(cards)
        if blocking or threads:
            return plain
        near = door.connect(plain.rank, cards, min(timeout, COME_WITHIN)) if shares else {}
        far = [rank for rank in range(plain.num_ranks) if rank != plain.rank and rank not in near]
        streams: Mapping[int, Sequence[socket.socket]] = {}
        if not shares or len({card.machine for card in cards}) > 1:  # the same answer on every rank
            streams = door.streams.connect(plain, [card.stream for card in cards], far)
    finally:
        door.close()
    links: dict[int, Link] = {peer: RingLink(peer, connection, ring_bytes) for peer, connection in near.items()}
    for peer, (records, tensors) in streams.items():
        links[peer] = StreamLink(peer, records, tensors, ring_bytes, plain.patience.total_seconds())
    return LinkedTransport(links, timeout=timeout) if links else plain


def _shares(cards: list[Card]) -> bool:
    """Whether messages go through shared memory: where it is asked for, else where all ranks are on one machine."""
    for rank, card in enumerate(cards):
        if card.wanted != cards[0].wanted:
            raise UserError(
                f"rank {rank} has transport={card.wanted!r}, but rank 0 has {cards[0].wanted!r}; give all the same"
            )
    machines = {card.machine for card in cards}
    if cards[0].wanted == "shm":
        if machines == {""}:
            raise UserError("transport='shm' needs Linux; give transport='auto'")
        return True
    return cards[0].wanted == "auto" and len(machines) == 1 and machines != {""}
