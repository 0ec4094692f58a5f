"""Tensors on their way from devices to pinned memory, beside what the host does next.

    compute   last kernel ─┐                                     ┌─ next kernel
    lane                   └─ wait ─ copy ─ copy ─ … ─ arrived ──┘
    host      goes on at once; whoever needs the bytes waits for "arrived"

The next kernels of the compute stream wait until the copies are made, since they may change what is copied, or get its
memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vpipe.runtime.device import compute_stream, current, is_host


class Departures:
    """Some copies to the host, each device's by a stream of its own."""

    def __init__(self) -> None:
        self._lanes: dict[torch.device, torch.Stream] = {}

    def copy(self, place: Tensor, tensor: Tensor) -> None:
        """Copy into ``place``, which must be pinned where the tensor is on a device."""
        if is_host(tensor.device):
            place.copy_(tensor)
            return
        lane = self._lanes.get(tensor.device)
        if lane is None:
            with current(tensor.device):
                lane = self._lanes[tensor.device] = torch.Stream(tensor.device)
                lane.wait_event(compute_stream(tensor.device).record_event())
        with lane:
            place.copy_(tensor, non_blocking=True)

    def arrivals(self) -> list[torch.Event]:
        """Events after which everything is there; the devices go on after them."""
        found = []
        for device, lane in self._lanes.items():
            arrived = lane.record_event()
            with current(device):
                compute_stream(device).wait_event(arrived)
            found.append(arrived)
        return found
