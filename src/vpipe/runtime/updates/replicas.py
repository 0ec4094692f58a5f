"""What the replicas of a stage tell each other: how they start, and their buffers.

Each replica sees its own units, so running statistics (BatchNorm) would drift apart, and an evaluation would depend on
who makes it. The rule is that of torch's ``DistributedDataParallel``: all take those of replica 0. Here they go
around at the end of every training step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vpipe.runtime.stage import Stage
from vpipe.runtime.transport.base import Transport
from vpipe.runtime.transport.wire import Envelope
from vpipe.schedule.placement import Layout

AT_ONCE = 1 << 20
"""Numbers that replicas exchange at a time."""
AMONG_REPLICAS = "between the replicas of a stage"
"""Why gradients are exchanged."""


def trained(stage: Stage) -> list[Tensor]:
    """The parameters whose gradients replicas add."""
    return [p for p in stage.weights.parameters.values() if p.requires_grad]


def share_among_replicas(
    stages: Mapping[int, Stage], layout: Layout, transport: Transport, step: int, *, weights: bool
) -> None:
    """Give the buffers of replica 0 of every stage to the others; its ``weights`` too, before training begins."""
    for index, stage in stages.items():
        if len(layout.members[index]) == 1:
            continue
        first, *others = layout.fellows(index, transport.rank)
        modules = stage.owned.values()
        state = [t for module in modules for t in (module.state_dict().values() if weights else module.buffers())]
        for replica, rank in enumerate(others if state else (), 1):
            envelope = Envelope(step, index, index, replica, 0)
            if transport.rank == first:
                transport.send(envelope, rank, [tensor.detach() for tensor in state])
            elif transport.rank == rank:
                transport.post(envelope, first)
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
