"""The copies of all ranks: who has which, and what must travel.

A rank reads the copies of its own machine: its own, its mates', and those that ranks of another machine have sent
here. So the ranks tell each other what they see, choose the newest generation of which every part is whole somewhere,
and send each other the layers that a rank's own machine does not have.

**Why two generations are enough.** Before a rank overwrites copy t with t+2, it knows that its copy t+1 is whole on
another machine, and all ranks have told each other so: whichever machine is lost, t+1 is there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vpipe.door import SECRET
from vpipe.records import parsed
from vpipe.remote_copies import Sender
from vpipe.rundir.manifest import Standing
from vpipe.runtime.moves import layer_state
from vpipe.runtime.moves.moving import MOVE_STEP
from vpipe.runtime.pipeline import Pipeline
from vpipe.runtime.ranks import membership
from vpipe.runtime.ranks.control import EpochOrder
from vpipe.runtime.ranks.failure import PeerLost
from vpipe.runtime.transport.wire import Envelope
from vpipe.train.copies import Copier, Copy, CopyShelf

_CHANNEL = 1022
"""Of no stage, and not that of moving layers."""


@dataclass(frozen=True)
class Generation:
    """The state from which the ranks go on, wherever its parts are."""

    iteration: int
    epoch: int
    standing: Standing
    partition: tuple[int, ...]
    here: Mapping[int, Copy]
    """Number → those parts that this machine has."""
    seen_by: Mapping[int, Sequence[int]]
    """Number → ranks whose machines have it."""
    part_of: Mapping[int, int]
    """Layer → number of its part."""


def agree(shelves: Sequence[CopyShelf]) -> Generation | None:
    """The newest generation that is whole, the same on all ranks; ``None`` where there is none."""
    seen = {(copy.iteration, copy.part.epoch, copy.part.number): copy for shelf in shelves for copy in shelf.copies()}
    told = [
        [*key, copy.part.num_parts, copy.part.partition, asdict(copy.standing), sorted(copy.table)]
        for key, copy in seen.items()
    ]
    member = membership.current()
    assert member is not None
    seen_by_rank = [json.loads(facts["copies"]) for facts in member.exchange("copies", {"copies": json.dumps(told)})]
    return chosen(seen_by_rank, seen)


def chosen(
    seen_by_rank: Sequence[Sequence[Sequence[Any]]], seen: Mapping[tuple[int, int, int], Copy]
) -> Generation | None:
    """Of what all ranks see: the newest generation that has all its parts."""
    found: dict[tuple[int, int], dict[int, list[int]]] = {}
    facts: dict[tuple[int, int, int], Sequence[Any]] = {}
    for rank, copies in enumerate(seen_by_rank):
        for iteration, epoch, number, *rest in copies:
            found.setdefault((iteration, epoch), {}).setdefault(number, []).append(rank)
            facts[iteration, epoch, number] = rest
    for (iteration, epoch), seen_by in sorted(found.items(), reverse=True):
        num_parts, partition, standing, _ = facts[iteration, epoch, min(seen_by)]
        if len(seen_by) == num_parts:
            return Generation(
                iteration,
                epoch,
                parsed(Standing, standing),
                tuple(partition),
                {n: seen[iteration, epoch, n] for n in seen_by if (iteration, epoch, n) in seen},
                seen_by,
                {layer: n for n in seen_by for layer in facts[iteration, epoch, n][3]},
            )
    return None


def fetch(pipeline: Pipeline, generation: Generation) -> dict[int, Mapping[str, Tensor]]:
    """The tensors of this rank's layers, from its own machine or another. Every rank calls this at the same place."""
    rank, transport = pipeline.rank, pipeline.transport
    found: dict[int, Mapping[str, Tensor]] = {}
    number = 0
    for layer, part in sorted(generation.part_of.items()):
        havers = generation.seen_by[part]
        for target in pipeline.layout.ranks_of(layer):
            if target in havers:
                if target == rank:
                    found[layer] = generation.here[part].read(layer)
                continue
            envelope = Envelope(MOVE_STEP, _CHANNEL, _CHANNEL, number, 0)
            number += 1
            transport.begin_step(MOVE_STEP)
            if rank == havers[0]:
                transport.send(envelope, target, layer_state.packed(dict(generation.here[part].read(layer))))
            elif rank == target:
                transport.post(envelope, havers[0])
                found[layer] = layer_state.unpacked(transport.take(envelope))
            transport.end_step()
    return {layer: found[layer] for layer in pipeline.modules()}


class RemoteCopies:
    """Sends this rank's copies to another machine, by ``copier`` beside training."""

    def __init__(self, order: EpochOrder, slot: int, copier: Copier) -> None:
        host, port = (order.facts or {})["guest"]
        self._copier = copier
        try:
            self._sender = Sender((str(host), int(port)), os.environ[SECRET], slot)
        except OSError as error:
            raise PeerLost(f"{host}, which keeps copies for rank {order.rank}, cannot be reached ({error})") from None

    def settle(self, pipeline: Pipeline) -> None:
        """Until the copies that all ranks sent last are whole on other machines."""
        try:
            self._copier.settle()
        except OSError as error:
            raise PeerLost(str(error)) from None
        pipeline.gather_numbers(torch.zeros(1).tolist())

    def send(self, shelf: CopyShelf) -> None:
        """Begin to send the copy that became whole last, which stays as it is until ``settle`` has returned."""
        if (last := shelf.last()) is not None:
            self._copier.begin(partial(self._sender.send, *last))

    def close(self) -> None:
        self._sender.close()
        with suppress(OSError):
            self._copier.settle()
