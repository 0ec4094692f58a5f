"""Ranks as threads of one process, each on a device: the same hub, with copies from device to device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vpipe.runtime.device import is_host
from vpipe.runtime.transport.handover import HandoverStreams, taken
from vpipe.runtime.transport.inprocess import Hub, InProcessTransport


class OnDeviceTransport(InProcessTransport):
    """One rank's end of a hub whose ranks have devices."""

    def __init__(self, hub: Hub, rank: int, devices: Sequence[torch.device]) -> None:
        super().__init__(hub, rank)
        self._devices = devices
        self._device = devices[rank]
        self._lanes: dict[tuple[torch.device, torch.device, int], HandoverStreams] = {}

    def _lane(self, source: torch.device, target: torch.device, rank: int) -> HandoverStreams:
        """A lane for every neighbour, so that none waits for another."""
        key = (source, target, rank)
        if key not in self._lanes:
            self._lanes[key] = HandoverStreams(source, target)
        return self._lanes[key]

    def _leaving(self, target_rank: int, value: Any) -> Any:
        return self._lane(self._device, self._devices[target_rank], target_rank).carry(value)

    def _arrived(self, value: Any) -> Any:
        return taken(value, self._device)

    def all_gather(self, value: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None) -> list[Tensor]:
        found = super().all_gather(value, ranks, sizes)
        return [
            block
            if is_host(block.device) or block.device == self._device
            else taken(self._lane(block.device, self._device, rank).carry(block), self._device)
            for rank, block in zip(ranks, found, strict=True)
        ]


def transports(hub: Hub, devices: Sequence[torch.device]) -> list[InProcessTransport]:
    """All ranks' ends, each on its device."""
    return [OnDeviceTransport(hub, rank, devices) for rank in range(hub.num_ranks)]
