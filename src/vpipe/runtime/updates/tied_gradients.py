"""The gradient of a tied weight: the sum over its owners, wherever they are, the latest's first as in autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter_ns

import torch
from torch import Tensor

from vpipe.errors import UserError
from vpipe.layer import TiedWeight
from vpipe.runtime.stage import Stage
from vpipe.runtime.transport.base import Transport
from vpipe.runtime.updates.agreement import Waited
from vpipe.schedule.placement import Layout


class TiedGradients:
    """One rank's part in the sums."""

    def __init__(self, transport: Transport, layout: Layout, tied: Sequence[TiedWeight]) -> None:
        self._transport, self._layout, self._tied = transport, layout, tied

    def add_up(self, stages: Mapping[int, Stage], waited: Waited) -> None:
        """Every owner of a tied parameter gets the sum of all owners' gradients."""
        for tie in self._tied:
            by_stage = {layer: stage for stage in stages.values() for layer in stage.owned}
            ranks = self._layout.ranks_of_all(layer for layer, _ in tie.owners)
            owned = [(by_stage[layer], f"{layer}.{name}") for layer, name in tie.owners if layer in by_stage]
            if not owned:
                continue
            parameters = [stage.weights.parameters[name] for stage, name in owned]
            own = [dense(p, "between the owners of a tied weight") for p in parameters]
            sizes = [own[0].numel() * len(self._owned_by(rank, tie)) for rank in ranks]
            mine = torch.cat([g.flatten() for g in own])
            since = perf_counter_ns()
            blocks = self._transport.all_gather(mine, ranks, sizes) if len(ranks) > 1 else None
            waited(since)
            total = self._sum_owners(tie, ranks, own, blocks)
            for parameter in parameters:
                parameter.grad = total.clone()

    def _sum_owners(
        self, tie: TiedWeight, ranks: Sequence[int], own: list[Tensor], blocks: list[Tensor] | None
    ) -> Tensor:
        if blocks is None:
            parts = own
        else:
            held = {
                rank: dict(zip(self._owned_by(rank, tie), block.view(-1, *own[0].shape), strict=True))
                for rank, block in zip(ranks, blocks, strict=True)
            }
            parts = [held[self._layout.leader(self._layout.stage_of(owner[0]))][owner] for owner in tie.owners]
        order = sorted(range(len(parts)), key=lambda place: -tie.owners[place][0])
        total = parts[order[0]]
        for place in order[1:]:
            total = total + parts[place]
        return total

    def _owned_by(self, rank: int, tie: TiedWeight) -> list[tuple[int, str]]:
        """What a rank sends of a tie, in this order: more than what it is the first home of."""
        return [owner for owner in tie.owners if rank in self._layout.ranks_of(owner[0])]


def dense(parameter: Tensor, why: str) -> Tensor:
    """A gradient that can be exchanged."""
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    if parameter.grad.is_sparse:
        raise UserError(f"a sparse gradient cannot be exchanged {why}; make the embedding with sparse=False")
    return parameter.grad
