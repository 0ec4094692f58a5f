"""Tensors on their way from devices to pinned memory, beside what the host does next.

    compute   last kernel ─┐                                     ┌─ next kernel
    lane                   └─ wait ─ copy ─ copy ─ … ─ arrived ──┘
    host      goes on at once; a reader of the bytes waits for "arrived"

The next kernels of the compute stream wait until the copies are made, since they may change what is copied, or get its
memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from vpipe.runtime.device import compute_stream, current, is_host, side_stream


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
                lane = self._lanes[tensor.device] = side_stream(tensor.device, "departing")
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


class Staging:
    """Memory of the host for the tensors of some layers; the next copy of them uses it again."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str], Tensor] = {}

    def copy(
        self, layers: Mapping[int, Mapping[str, Tensor]], unchanged: Collection[tuple[int, str]] = ()
    ) -> tuple[dict[int, dict[str, Tensor]], list[torch.Event]]:
        """The tensors as they are now, and what to wait for before they are read (``landed``). From devices they come
        by streams of their own into pinned memory; the training thread does not wait, the devices' next kernels do.
        What is ``unchanged`` since the last copy is not copied again."""
        copied: dict[int, dict[str, Tensor]] = {layer: {} for layer in layers}
        lanes = Departures()
        for layer, tensors in layers.items():
            for name, tensor in tensors.items():
                kept = self._kept.get((layer, name))
                if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                    pinned = not is_host(tensor.device)
                    kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
                    self._kept[layer, name] = kept
                    lanes.copy(kept, tensor)
                elif (layer, name) not in unchanged:
                    lanes.copy(kept, tensor)
                copied[layer][name] = kept
        return copied, lanes.arrivals()


def landed(arrivals: Sequence[torch.Event]) -> None:
    """Wait until what is on its way is there."""
    for arrived in arrivals:
        arrived.synchronize()
