"""Where the loss of every layer and unit stands in what ranks tell each other.

A rank's block has a row for each of its layers and a column for each unit of the step; the rank of the last stage adds
a row for the loss itself and one for the units' shares of the batch. On a device the block is put together there, so
that nobody waits for the numbers before the step is over.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vpipe.runtime.device import Number, is_host
from vpipe.runtime.flow import Flow
from vpipe.schedule.placement import Placement

LossKey = tuple[int, int]
"""(layer, microbatch)."""


class LossBlocks:
    """The layout of every rank's block."""

    def __init__(self, flow: Flow, placement: Placement) -> None:
        self._flow, self._placement = flow, placement
        self._pinned: Tensor | None = None
        """What a device may still copy from, until the next step writes its own."""

    def rows(self, rank: int) -> list[int]:
        """The layers of a rank; after the last of all come the loss and the unit's share."""
        bounds = self._flow.bounds
        rows = [layer for stage in self._placement.stages_of[rank] for layer in range(*bounds[stage])]
        end = len(self._flow.layers)
        return [*rows, end, end + 1] if len(bounds) - 1 in self._placement.stages_of[rank] else rows

    def size(self, rank: int, num_units: int) -> int:
        return len(self.rows(rank)) * num_units

    def written(self, losses: Mapping[LossKey, Number], rank: int, num_units: int, device: torch.device) -> Tensor:
        """A rank's block, where the rank computes; numbers of the host go there through pinned memory."""
        rows = {layer: row for row, layer in enumerate(self.rows(rank))}
        places = {rows[layer] * num_units + microbatch: value for (layer, microbatch), value in losses.items()}
        known = [0.0] * (len(rows) * num_units)
        for place, value in places.items():
            known[place] = 0.0 if isinstance(value, Tensor) else value
        block = torch.tensor(known, dtype=torch.float64)
        if is_host(device):
            return block
        self._pinned = block.pin_memory()
        block = self._pinned.to(device, non_blocking=True)
        there = {place: value for place, value in places.items() if isinstance(value, Tensor)}
        parts, begin = [], 0
        for place in sorted(there):
            parts += [block[begin:place], there[place].reshape(1)]
            begin = place + 1
        return torch.cat([*parts, block[begin:]])

    def read(self, rank: int, num_units: int, block: Tensor) -> dict[LossKey, float]:
        """Those of a block, now on the host, that are not zero: of a stage's replicas, each knows its own units."""
        rows, places = self.rows(rank), block.nonzero().flatten()
        found = zip(places.tolist(), block[places].tolist(), strict=True)
        return {(rows[place // num_units], place % num_units): value for place, value in found}
