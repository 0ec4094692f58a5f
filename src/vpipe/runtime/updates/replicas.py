"""What the replicas of a stage tell each other: how they start, and their buffers.

Each replica sees its own units, so running statistics (BatchNorm) would drift apart, and an evaluation would depend on
who makes it. The rule is that of torch's ``DistributedDataParallel``: those of replica 0 are everybody's. Here they go
around at the end of every training step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vpipe.runtime.stage import Stage
from vpipe.runtime.transport.base import Transport
from vpipe.runtime.transport.wire import Envelope
from vpipe.schedule.placement import Placement

AT_ONCE = 1 << 20
"""Numbers that replicas exchange at a time."""
AMONG_REPLICAS = "between the replicas of a stage"
"""Why gradients are exchanged."""


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
