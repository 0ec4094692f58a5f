"""Measures what torch's own ways to train on several ranks cost beyond their bytes on the link.

Torch's FSDP gathers a layer's weights before its forward and before its backward and scatters its gradients, its DDP
copies gradients into buckets and sums them: hooks, copies, launches and, over gloo, threads that share the cores with
what is computed. No formula has these; two models of few layers, one with tiny and one with large weights, trained
with and without, tell what they cost in all and for each byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vpipe.plan.transfer import LinkSpeed

SMALL, LARGE = 16, 384
"""Widths of the two models' layers."""
LAYERS = 4


@dataclass(frozen=True)
class WrapperCosts:
    """Seconds beyond the link's; zeros where torch has no FSDP for plain modules."""

    shard_overhead: float = 0.0
    """Of FSDP, for a layer and round."""
    shard_overhead_per_byte: float = 0.0
    """More, for each byte of the layer's weights."""
    replica_overhead: float = 0.0
    """Of DDP, for a step."""
    replica_overhead_per_byte: float = 0.0


def measure_wrappers(link: LinkSpeed, repeat: int) -> WrapperCosts:
    """All ranks of the default process group measure together."""
    ranks = dist.get_world_size()
    replica = _beyond(DistributedDataParallel, repeat)
    reduced = 2 * (ranks - 1) * link.latency, 2 * (ranks - 1) / ranks / link.bandwidth
    own = [max(0.0, each - sent) for each, sent in zip(replica, reduced, strict=True)]
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        return WrapperCosts(0.0, 0.0, *own)
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))

    def sharded(module: nn.Sequential) -> nn.Module:
        for part in (*module, module):
            fully_shard(part, mesh=mesh)
        return module

    once, byte = _beyond(sharded, repeat)
    layer = once / LAYERS - 3 * (ranks - 1) * link.latency
    return WrapperCosts(max(0.0, layer), max(0.0, byte - 3 * (ranks - 1) / ranks / link.bandwidth), *own)


def _beyond(wrapped: Callable[[nn.Sequential], nn.Module], repeat: int) -> tuple[float, float]:
    """What a step takes longer for being wrapped: in all, and for each byte of weights."""
    seconds, sizes = [], []
    for width in (SMALL, LARGE):
        plain, other = (nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))) for _ in range(2))
        alone, shared = (_step(module, width, repeat) for module in (plain, wrapped(other)))
        seconds.append(max(0.0, shared - alone))
        sizes.append(4 * LAYERS * (width * width + width))
    byte = max(0.0, (seconds[1] - seconds[0]) / (sizes[1] - sizes[0]))
    return max(0.0, seconds[0] - byte * sizes[0]), byte


def _step(module: nn.Module, width: int, repeat: int) -> float:
    """Seconds of a step over one row: nothing but weights."""
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.0)
    row = torch.ones(1, width)
    times = []
    for _ in range(repeat + 2):
        dist.barrier()
        begin = perf_counter()
        module(row).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(perf_counter() - begin)
    return median(times[2:])
