"""Values from the device of one rank to that of another rank of this process, ordered by events alone.

    compute of the source   ─ snapshot ┐ ready
    lane, source side                  └─ wait ── copy ─┐
    lane, target side                                   └─ arrived ─┐
    compute of the target                                           └─ wait ── reads

Neither compute stream waits for a copy that it does not need, and no host waits for anything. A sender may change a
value as soon as it has sent it, so what crosses is a snapshot that the compute stream takes. The snapshot stays
allocated until the lane has read it, and its copy until the target's compute stream has: both are recorded there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vpipe.runtime.crossing import copied, mapped
from vpipe.runtime.device import compute_stream, is_host, share, tensors_of


class Carried(NamedTuple):
    """A value on its way; ``arrived`` is None where nothing has to be awaited."""

    value: Any
    arrived: torch.Event | None


class HandoverStreams:
    """The streams between two devices, in one direction."""

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self.source, self.target = source, target
        self._out = torch.Stream(source)
        self._into = self._out if source == target else torch.Stream(target)

    def carry(self, value: Any) -> Carried:
        """Copy a value; called by the rank of the source."""
        snapshot = mapped(value, _snapshot)  # one tensor by two names stays one
        ready = compute_stream(self.source).record_event()
        with self._into, self._out:  # memory comes from the target's side, copies run on the source's
            self._out.wait_event(ready)
            copy = mapped(snapshot, self._copy)
            arrived = self._into.record_event()  # torch lets this side wait for copies from the other
        share(tensors_of(snapshot), self._out)
        return Carried(copy, arrived)

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor if is_host(tensor.device) else copied(tensor, self.target)


def _snapshot(tensor: Tensor) -> Tensor:
    return copied(tensor)


def taken(carried: Carried, target: torch.device) -> Any:
    """The value, for the compute stream of the rank that takes it."""
    if carried.arrived is not None:
        compute = compute_stream(target)
        compute.wait_event(carried.arrived)
        share(tensors_of(carried.value), compute)
    return carried.value
