"""What ``vpipe doctor --devices`` finds out beside equal schedules: what the devices are, which reach which, and how
much of a copy hides behind compute."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist

from vpipe.runtime.device import compute_stream, current, own_memory
from vpipe.runtime.transport.handover import HandoverStreams
from vpipe.train.reporting.run_log import device_name

SIZE, PRODUCTS = 1024, 8
"""Of the matrices that keep a device busy while a copy is under way, and how many products."""
COPY = 1 << 24
"""Bytes of that copy."""


class Overlap(NamedTuple):
    """Seconds of the products alone, of the copy alone, and of both at once."""

    compute: float
    copy: float
    together: float

    @property
    def hidden(self) -> float:
        """The share of the shorter one that the longer one hides."""
        shorter = min(self.compute, self.copy)
        return max(0.0, min(1.0, (self.compute + self.copy - self.together) / shorter)) if shorter else 0.0


def facts(kind: str) -> dict[str, str]:
    """What to send back beside the results."""
    first = torch.device(kind, 0)
    memory = own_memory(first)
    try:
        backend = dist.get_default_backend_for_device(first)
    except ValueError:
        backend = "none"
    return {
        "torch": torch.__version__,
        "devices": f"{torch.accelerator.device_count()} × {device_name(torch.device(first))}",
        "memory": f"{memory / 2**30:.1f} GiB" if memory else "n/a",
        "backend": backend,
    }


def offered() -> dict[str, str]:
    """The facts of the accelerators that torch finds, if it finds any."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return facts(found.type) if found is not None else {}


class DeviceWays(NamedTuple):
    """The ways between all devices of this machine."""

    num_ways: int
    broken: list[str]
    """What one device wrote and another did not get, as "0 → 1"."""
    slowest: float
    fastest: float
    """Bytes a second, of those that work."""


def reach(kind: str) -> DeviceWays:
    """A block goes from every device to every other one and is compared there."""
    devices = [torch.device(kind, index) for index in range(torch.accelerator.device_count())]
    ways = [(here, there) for here in devices for there in devices if here != there]
    rates, broken = [], []
    for here, there in ways:
        sent = torch.arange(COPY // 8, device=here) * (here.index + 3)
        sent.to(there)  # the first one may open the way
        torch.accelerator.synchronize(here)
        begin = perf_counter()
        found = sent.to(there)
        torch.accelerator.synchronize(there)
        rates.append(COPY / (perf_counter() - begin))
        if not torch.equal(found.cpu(), sent.cpu()):
            broken.append(f"{here.index} → {there.index}")
    return DeviceWays(len(ways), broken, min(rates, default=0.0), max(rates, default=0.0))


def overlap(kind: str) -> Overlap:
    """Matrix products on device 0 and a copy from it to device 1, each alone and both at once."""
    here, there = torch.device(kind, 0), torch.device(kind, 1)
    lane = HandoverStreams(here, there)
    with current(here):
        matrix, bytes_ = torch.ones(SIZE, SIZE, device=here), torch.ones(COPY, dtype=torch.uint8, device=here)

        def timed(computes: bool, copies: bool) -> float:
            torch.accelerator.synchronize(here)
            begin = perf_counter()
            carried = lane.carry(bytes_) if copies else None
            for _ in range(PRODUCTS if computes else 0):
                matrix @ matrix
            compute_stream(here).synchronize()
            if carried is not None and carried.arrived is not None:
                carried.arrived.synchronize()
            return perf_counter() - begin

        timed(True, True)
        return Overlap(timed(True, False), timed(False, True), timed(True, True))
