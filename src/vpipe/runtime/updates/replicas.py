"""What the replicas of a stage tell each other: how they start, their buffers, and gradients that are sent ahead.

Each replica sees its own units, so running statistics (BatchNorm) would drift apart, and an evaluation would depend on
who makes it. The rule is that of torch's ``DistributedDataParallel``: those of replica 0 are everybody's. Here they go
around at the end of every training step.

Gradients go ahead (``SEND_W``) as messages, which every transport carries beside the work: ``REDUCE`` takes what has
come, and adds in the order of replicas, as it does without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from vpipe.runtime.stage import Stage
from vpipe.runtime.transport.base import Transport
from vpipe.runtime.transport.wire import Envelope
from vpipe.runtime.updates.tied_gradients import dense
from vpipe.schedule.placement import Placement

AT_ONCE = 1 << 20
"""Numbers that replicas exchange at a time."""
AMONG_REPLICAS = "between the replicas of a stage"
"""Why gradients are exchanged."""


GradientMessage = tuple[Tensor, Tensor]
"""Which parameters have a gradient, and all gradients, one behind the other."""


class GradientsAhead:
    """One rank's gradients on their way to the other replicas of its stages, and theirs to it, in one step."""

    def __init__(self, transport: Transport, placement: Placement) -> None:
        self._transport, self._placement = transport, placement
        self._under_way: dict[int, list[list[Envelope | None]]] = {}
        """Stage → per message and replica what brings its gradients; none for this rank."""
        self._number: Counter[int] = Counter()

    def send(self, stage: Stage, step: int) -> None:
        """Give this rank's gradients to the other replicas, and make room for theirs."""
        ranks, index, me = self._placement.ranks_of[stage.index], stage.index, self._transport.rank
        messages = []
        for parameters in alike(stage):
            first = self._number[index] * len(ranks)
            self._number[index] += 1
            envelopes = [Envelope(step, index, index, first + turn, 1) for turn in range(len(ranks))]
            for rank, envelope in zip(ranks, envelopes, strict=True):
                if rank != me:
                    self._transport.post(envelope, rank)
            mine = _told(parameters)
            for rank in ranks:
                if rank != me:
                    self._transport.send(envelopes[ranks.index(me)], rank, mine)
            messages.append([None if rank == me else each for rank, each in zip(ranks, envelopes, strict=True)])
        self._under_way[index] = messages

    def taken(self, stage: Stage) -> list[tuple[list[Tensor], list[GradientMessage]]] | None:
        """Parameters, and what each replica has told of them, in their order; ``None`` where nothing was sent ahead."""
        if stage.index not in self._under_way:
            return None
        messages = self._under_way.pop(stage.index)
        return [
            (parameters, [_told(parameters) if each is None else self._transport.take(each) for each in envelopes])
            for parameters, envelopes in zip(alike(stage), messages, strict=True)
        ]


def _told(parameters: Sequence[Tensor]) -> GradientMessage:
    """A message of the same form in every step. One tensor: several would go as a batch, whose first use makes the host
    of a device wait for its peer, and here both would send before either receives."""
    has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
    return has, torch.cat([dense(p, AMONG_REPLICAS).flatten() for p in parameters])


def add_up(told: Sequence[tuple[Sequence[Tensor], Sequence[GradientMessage]]], *, mean: bool) -> None:
    """What was sent ahead becomes the gradients, added in the order of replicas; or their ``mean``."""
    for parameters, parts in told:
        anyone = torch.stack([has for has, _ in parts]).any(0).tolist()
        total = reduce(torch.add, [gradients for _, gradients in parts])
        total = total / len(parts) if mean else total
        pieces = torch.split(total, [parameter.numel() for parameter in parameters])
        for parameter, piece, used in zip(parameters, pieces, anyone, strict=True):
            if used:
                parameter.grad = piece.view_as(parameter)


def alike(stage: Stage) -> list[list[Tensor]]:
    """The parameters whose gradients replicas add, those of one dtype together."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for parameter in trained(stage):
        found.setdefault(parameter.dtype, []).append(parameter)
    return list(found.values())


def trained(stage: Stage) -> list[Tensor]:
    """The parameters whose gradients replicas add."""
    return [p for p in stage.weights.parameters.values() if p.requires_grad]


def share_states(stages: Mapping[int, Stage], placement: Placement, transport: Transport, step: int) -> None:
    """Parameters and buffers of replica 0, before training begins."""
    for index, stage in stages.items():
        state = [tensor for module in stage.owned.values() for tensor in module.state_dict().values()]
        _broadcast(index, placement.ranks_of[index], state, transport, step)


def share_buffers(stages: Mapping[int, Stage], placement: Placement, transport: Transport, step: int) -> None:
    """Buffers of replica 0, after a training step."""
    for index, stage in stages.items():
        if len(placement.ranks_of[index]) > 1:
            buffers = [buffer for module in stage.owned.values() for buffer in module.buffers()]
            _broadcast(index, placement.ranks_of[index], buffers, transport, step)


def _broadcast(index: int, ranks: Sequence[int], state: Sequence[Tensor], transport: Transport, step: int) -> None:
    for replica, rank in enumerate(ranks[1:] if state else (), 1):
        envelope = Envelope(step, index, index, replica, 0)
        if transport.rank == ranks[0]:
            transport.send(envelope, rank, [tensor.detach() for tensor in state])
        elif transport.rank == rank:
            transport.post(envelope, ranks[0])
            with torch.no_grad():
                for mine, theirs in zip(state, transport.take(envelope), strict=True):
                    mine.copy_(theirs)


def exchanges(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbours of one dtype, as many as are worth one exchange."""
    found: list[list[Tensor]] = []
    room = 0
    for parameter in parameters:
        room -= parameter.numel()
        if not found or room < 0 or parameter.dtype != found[-1][-1].dtype:
            found.append([])
            room = AT_ONCE - parameter.numel()
        found[-1].append(parameter)
    return found
