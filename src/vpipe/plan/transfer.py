"""Measures the machine between the layers: a message, an action, a swap.

The ranks that measure are processes, joined by the transport that a run would choose. All of them call the functions
here at the same time, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn

from vpipe.plan.links import Links
from vpipe.plan.sites import num_actions
from vpipe.runtime.device import HOST, is_host
from vpipe.runtime.memory.swap_store import FileStore
from vpipe.runtime.pipeline import Pipeline
from vpipe.runtime.transport.base import Transport
from vpipe.runtime.transport.wire import Envelope

ProgressTeller = Callable[[int, int, str], None]
"""(done, in all, what comes)."""

SMALL, LARGE = 64, 4 << 20
"""Bytes of the messages that tell latency and bandwidth."""
PROBE, LONG = 64 << 10, 0.02
"""Of many links: the first size that is tried, and the seconds that are long enough to tell the bandwidth."""
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
    both = Between(transport, 0, 1, device)
    small, large = (both.round_trip(size, size, 10 * repeat) / 2 for size in (SMALL, LARGE))
    return LinkSpeed(small, (LARGE - SMALL) / max(large - small, 1e-9))


def measure_links(
    transport: Transport, repeat: int, device: torch.device = HOST, tell: ProgressTeller = lambda *_: None
) -> Links:
    """Every link between two ranks, one pair after the other, so that none shares its way with another.

    A large message goes one way and a small one comes back, then the other way round: a line that is narrower in one
    direction is found so. Latency is half of the way there and back, since two hosts have no common clock.
    """
    count = transport.num_ranks
    found = torch.zeros(2, count, count, dtype=torch.float64)
    pairs = list(combinations(range(count), 2))
    for number, (a, b) in enumerate(pairs):
        tell(number, len(pairs), f"link between ranks {a} and {b}")
        both = Between(transport, a, b, device)
        empty = both.round_trip(SMALL, SMALL, 5 * repeat)
        size = both.large_enough(empty)
        there, back = both.round_trip(size, SMALL, repeat), both.round_trip(SMALL, size, repeat)
        if transport.rank == a:
            for (source, target), taken in (((a, b), there), ((b, a), back)):
                found[0, source, target] = empty / 2
                found[1, source, target] = (size - SMALL) / max(taken - empty, 1e-9)
    parts = transport.all_gather(found.flatten(), range(count), [found.numel()] * count)
    latency, bandwidth = torch.stack(parts).sum(0).view(2, count, count).tolist()
    return Links(tuple(map(tuple, latency)), tuple(map(tuple, bandwidth)))


def slowest(links: Links) -> LinkSpeed:
    """The figures of the slowest of all links."""
    latency, bandwidth = links.latency or (), links.bandwidth or ()
    return LinkSpeed(max(latency[a][b] for a, b in links.pairs), min(bandwidth[a][b] for a, b in links.pairs))


class Between:
    """Messages between two ranks. All ranks call the same, the others without doing anything."""

    def __init__(self, transport: Transport, first: int, second: int, device: torch.device) -> None:
        self.transport, self.device = transport, device
        self.first, self.second = first, second

    def round_trip(self, out_bytes: int, back_bytes: int, count: int) -> float:
        """Seconds of a message from the first to the second rank and one back, as these two see it; 0 elsewhere."""
        transport, device = self.transport, self.device
        me = transport.rank
        to_second, to_first = (torch.zeros(size // 4, device=device) for size in (out_bytes, back_bytes))
        times = []
        for k in range(count + 1):
            step = 1_000_000 + out_bytes + back_bytes + k  # of no training step
            transport.begin_program(("link", out_bytes, back_bytes), lambda: (out_bytes, back_bytes))
            transport.begin_step(step)
            out, back = Envelope(step, 0, 1, 0, 0), Envelope(step, 1, 0, 0, 1)
            begin = now(device)
            if me == self.first:
                transport.send(out, self.second, to_second)
                transport.post(back, self.second)
                transport.take(back)
            elif me == self.second:
                transport.post(out, self.first)
                transport.take(out)
                transport.send(back, self.first, to_first)
            times.append(now(device) - begin)
            transport.end_step()
        transport.barrier()
        return median(times[1 + count // 10 :]) if me in (self.first, self.second) else 0.0

    def large_enough(self, empty: float) -> int:
        """Bytes of a message that takes long beside an empty one, but not long: the same on all ranks."""
        size = PROBE
        while size < LARGE:
            taken = torch.tensor([self.round_trip(size, SMALL, 2) - empty], dtype=torch.float64)
            parts = self.transport.all_gather(taken, range(self.transport.num_ranks), [1] * self.transport.num_ranks)
            if parts[self.first].item() > LONG:
                break
            size *= 4
        return size


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
