"""gloo's process groups, made so that no stranger is in them.

While ranks connect, gloo takes whatever comes to its ports first and says a small number. So each connection of a new
group must prove the run's secret, at both ends; a group that a stranger came into is made anew. Then its ports let
nothing in any more.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from hmac import digest
from typing import Any

import torch
import torch.distributed as dist

from vpipe.runtime.ranks.failure import PeerLost
from vpipe.runtime.ranks.sockets import SocketIdentity, open_now

FEW_QUESTIONS = {"GLOO_ENABLE_STORE_V2_API": "1", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1"}
"""A rank asks the store once for the addresses of 128 others, not twice for each; an address is of one size."""
PROVE_WITHIN = 30.0
"""Seconds for the proofs of all ranks on a busy machine; less if the timeout is less."""
TRIES = 6
_ATTACH_FILTER = 26
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A filter of packets that keeps no byte of any."""

Exchange = Callable[[str, Mapping[str, Any]], Sequence[Mapping[str, Any]]]
_types: Any = dist
"""torch's type stubs leave its options out."""


def grouped(
    make: Callable[[str], Any],
    name: str,
    ranks: Sequence[int],
    rank: int,
    secret: str,
    within: float,
    exchange: Exchange,
    together: Callable[[str], object],
) -> Any:
    """The group of ``ranks`` that all ranks of the run make; ``exchange`` tells what each says under a key, and
    ``together`` lets all begin at one moment: the others are at a port as soon as it can be seen."""
    for attempt in range(TRIES):
        before, key = open_now(), f"{name}/{attempt}"
        together(key)
        group = make(key)
        is_ours = rank not in ranks or _proves(group, ranks, rank, f"{secret} {key}".encode(), within)
        if all(said["ours"] for said in exchange(key, {"ours": is_ours})):
            _deafen(open_now() - before)
            return group
        if rank in ranks:
            dist.destroy_process_group(group)
    raise PeerLost(f"{TRIES} times a stranger was at gloo's ports before the ranks, or some did not answer", rank)


def _proves(group: Any, ranks: Sequence[int], rank: int, key: bytes, within: float) -> bool:
    """Whether each of the others says over its connection what only it can know."""

    def proofs(pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
        said = b"".join(digest(key, f"{one} to {other}".encode(), "sha256") for one, other in pairs)
        return torch.frombuffer(bytearray(said), dtype=torch.uint8)

    mine, theirs = proofs([(rank, other) for other in ranks]), proofs([(other, rank) for other in ranks])
    heard, options = torch.zeros_like(mine), _types.AllToAllOptions()
    options.timeout = timedelta(seconds=min(PROVE_WITHIN, within / 2))
    world: Any = dist.group.WORLD
    try:
        (group or world).alltoall_base(heard, mine, [], [], options).wait()
    except RuntimeError:
        return False
    return torch.equal(heard, theirs)


def _deafen(sockets: Collection[SocketIdentity]) -> None:
    """Let nothing more in by those that listen: gloo keeps whatever connects, and ends the process when it has no more
    descriptors, or where its socket is shut."""
    rule = ctypes.create_string_buffer(_DROP)
    for descriptor, _ in sockets:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as each:
            if each.family != socket.AF_UNIX and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                each.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(rule)))
