"""The swap lane of a rank on a device: pinned main memory, a stream for each way, ordered by events alone.

    compute  F0 ─┐ F1 ──┐ F2 …  wait ─ frees 0     OUT k+1, or an IN, lets the compute stream wait for OUT k: one unit
    out          └ copy 0 ─┐ └ copy 1              is in use and one on its way, and freed memory is free in the
    in                          copy 0 ─┐          stream's order. (An IN that took its memory before a unit has left
    compute             alloc ─┘ (IN 0) └ wait ─ B0     would make three of them, one more than a plan counts.)

Memory to come back to is allocated on the compute stream, so the copy must wait for what that stream was given before:
a backward that is queued and has not yet read the memory's last content; and the passage out, which that stream has
awaited before. Nothing here makes the host wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter_ns

import torch
from torch import Tensor, UntypedStorage

from vpipe.runtime.device import compute_stream, side_stream
from vpipe.runtime.device_times import DeviceTimes
from vpipe.runtime.memory.swap import Passage, Swappable


@dataclass
class DevicePassage(Passage):
    """A passage that is enqueued, not done; waiting blocks the compute stream."""

    device: torch.device | None = None
    arrived: torch.Event | None = None

    def wait(self) -> None:
        assert self.device is not None
        assert self.arrived is not None
        compute_stream(self.device).wait_event(self.arrived)


class DeviceSwapper:
    """The swap lane of one rank."""

    def __init__(self, device: torch.device, times: DeviceTimes) -> None:
        self._device, self._times = device, times
        self._out, self._in = side_stream(device, "swapping out"), side_stream(device, "swapping in")
        self._leaving: list[tuple[Sequence[Swappable], torch.Event]] = []
        self._free: dict[int, list[tuple[Tensor, torch.Event]]] = defaultdict(list)
        """Size → pinned memory, with the event after which its last content has been read."""
        self._used = False

    def out(self, swappables: Sequence[Swappable], what: str) -> Passage:
        """Carry the swappables' bytes out; ``what`` names them in errors."""
        self._let_go()
        self._used = True
        move = DevicePassage(what, begin=perf_counter_ns())
        self._out.wait_event(compute_stream(self._device).record_event())
        begun = self._times.mark(self._out)
        with self._out:
            for swappable in swappables:
                storage = swappable.full()
                swappable.place = self._pinned(storage.nbytes())
                swappable.place.copy_(_as_tensor(storage), non_blocking=True)
                move.bytes += storage.nbytes()
            ended = self._times.mark(self._out)
            left = self._out.record_event()
        self._leaving.append((swappables, left))
        move.events = (begun, ended)
        move.end = perf_counter_ns()
        return move

    def fetch(self, swappables: Sequence[Swappable], what: str) -> Passage:
        """Bring the bytes back, into memory that is free: what is on its way out makes room first."""
        self._let_go()
        move = DevicePassage(what, begin=perf_counter_ns(), device=self._device)
        storages = [swappable.refill() for swappable in swappables]
        self._in.wait_event(compute_stream(self._device).record_event())
        begun = self._times.mark(self._in)
        with self._in:
            for swappable, storage in zip(swappables, storages, strict=True):
                host, swappable.place = swappable.place, None
                _as_tensor(storage).copy_(host, non_blocking=True)
                self._free[host.numel()].append((host, self._in.record_event()))
                move.bytes += storage.nbytes()
            move.events = (begun, self._times.mark(self._in))
            move.arrived = self._in.record_event()
        move.end = perf_counter_ns()
        return move

    def _let_go(self) -> None:
        """What has been carried out is free for what the compute stream does next."""
        for swappables, left in self._leaving:
            compute_stream(self._device).wait_event(left)
            for swappable in swappables:
                swappable.empty()
        self._leaving.clear()

    def _pinned(self, num_bytes: int) -> Tensor:
        """Pinned memory for the lane that leaves."""
        if not self._free[num_bytes]:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        host, read = self._free[num_bytes].pop()
        self._out.wait_event(read)
        return host

    def settle(self) -> None:
        """The step is over: nothing is out."""
        self._let_go()

    def abandon(self) -> None:
        """The step has failed: forget what is out, once nothing is under way."""
        if self._used:
            with suppress(RuntimeError):  # what made the step fail is told already
                torch.accelerator.synchronize(self._device)
        self._leaving.clear()

    def close(self) -> None:
        self.abandon()
        self._free.clear()


def _as_tensor(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
