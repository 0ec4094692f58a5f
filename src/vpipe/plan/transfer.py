"""Measures the machine between the layers: a message, an action, a swap.

The ranks that measure are processes, joined by the transport that a run would choose. All of them call the functions
here at the same time, in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn

from vpipe.plan.memory import num_actions
from vpipe.runtime.device import HOST, is_host
from vpipe.runtime.memory.swap_store import FileStore
from vpipe.runtime.pipeline import Pipeline
from vpipe.runtime.transport.base import Transport
from vpipe.runtime.transport.wire import Envelope

SMALL, LARGE = 64, 4 << 20
"""Bytes of the messages that tell latency and bandwidth."""
SWAP = 64 << 20
"""Bytes that go out and come in at once."""
FEW, MANY = 16, 80
"""Units of the two pipelines without work whose difference is the cost of a unit."""


@dataclass(frozen=True)
class LinkSpeed:
    """One direction between two ranks."""

    latency: float
    """Seconds that an empty message takes."""
    bandwidth: float
    """Bytes per second beyond that."""


def now(device: torch.device = HOST) -> float:
    """The time when a device has done what it was asked for."""
    if not is_host(device):
        torch.accelerator.synchronize(device)
    return perf_counter()


def measure_link(transport: Transport, repeat: int, device: torch.device = HOST) -> LinkSpeed:
    """Ranks 0 and 1 send messages to and fro, from device to device where they have some; the others wait."""
    small, large = (_one_way(transport, size, repeat, device) for size in (SMALL, LARGE))
    return LinkSpeed(small, (LARGE - SMALL) / max(large - small, 1e-9))


def _one_way(transport: Transport, size: int, repeat: int, device: torch.device) -> float:
    """Seconds of a message of ``size`` bytes: half of the way there and back."""
    payload = torch.zeros(size // 4, device=device)
    me, other = transport.rank, 1 - transport.rank
    times = []
    for k in range(10 * repeat):
        step = 1_000_000 + size + k  # of no training step
        transport.begin_program(("link", size), lambda: size)
        transport.begin_step(step)
        out, back = Envelope(step, 0, 1, 0, 0), Envelope(step, 1, 0, 0, 1)
        begin = now(device)
        if me == 0:
            transport.post(back, other)
            transport.send(out, other, payload)
            transport.take(back)
        elif me == 1:
            transport.post(out, other)
            transport.send(back, other, transport.take(out))
        times.append((now(device) - begin) / 2)
        transport.end_step()
    transport.barrier()
    return median(times[len(times) // 10 :]) if me < 2 else 0.0


class Nothing(nn.Module):
    """The cheapest layer that has a backward and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def empty_pipeline(num_ranks: int, transport: str, timeout: float, device: str = "cpu") -> Pipeline:
    """A pipeline over all ranks whose layers do nothing: what is left is the runtime."""
    return Pipeline(
        [Nothing() for _ in range(num_ranks)],
        lambda output, target: output.sum(),
        schedule="gpipe",
        num_microbatches=MANY,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        transport=transport,
        timeout=timeout,
        device=device,
    )


def measure_overhead(pipeline: Pipeline, repeat: int) -> float:
    """Seconds that the runtime takes for one action.

    A pipeline that computes nothing runs few units and many: in gpipe's order messages are never waited for on the way,
    so what a unit more takes is what its actions cost on the busiest rank.
    """
    few, many = (_step(pipeline, count, repeat) for count in (FEW, MANY))
    num_ranks = pipeline.placement.num_ranks
    busiest = num_actions(first=num_ranks < 3, last=num_ranks < 2)
    return max(0.0, (many - few) / (MANY - FEW) / busiest)


def _step(pipeline: Pipeline, num_units: int, repeat: int) -> float:
    batch = torch.zeros(num_units, 1)
    times = []
    for _ in range(repeat + 2):
        begin = perf_counter()
        pipeline.train_step(batch, batch, num_microbatches=num_units)
        times.append(perf_counter() - begin)
    return median(times[2:])


def measure_swap(repeat: int, device: torch.device = HOST) -> float:
    """Bytes per second of the swap lane: tensors written into the runtime's own store, and read back; from a device to
    pinned memory and back."""
    if not is_host(device):
        there, here = torch.ones(SWAP // 4, device=device), torch.empty(SWAP // 4, pin_memory=True)
        taken = []
        for _ in range(repeat + 1):
            begin = now(device)
            here.copy_(there, non_blocking=True)
            there.copy_(here, non_blocking=True)
            taken.append(now(device) - begin)
        return 2 * SWAP / median(taken[1:])
    store = FileStore()
    storage = torch.ones(SWAP // 4).untyped_storage()
    times = []
    try:
        for _ in range(repeat + 1):
            begin = perf_counter()
            store.get(store.put(storage), storage)
            times.append(perf_counter() - begin)
    finally:
        store.close()
    return 2 * SWAP / median(times[1:])
