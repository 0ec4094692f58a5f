"""Measures what fully sharded data parallelism costs a layer beyond its bytes on the link.

Torch's FSDP gathers a layer's weights before its forward and before its backward and scatters its gradients: hooks,
copies, launches and, over gloo, a scatter that is a whole reduction. No formula has these; two models of few layers,
one with tiny and one with large weights, trained with and without it, tell what a layer and what a byte costs.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vpipe.plan.transfer import LinkSpeed

SMALL, LARGE = 16, 384
"""Widths of the two models' layers."""
LAYERS = 4


def measure_sharding(link: LinkSpeed, repeat: int) -> tuple[float, float]:
    """Seconds of a layer and round beyond three messages over the link, and of each byte of weights beyond theirs.

    All ranks of the default process group measure together. Zeros where torch has no FSDP for plain modules.
    """
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        return 0.0, 0.0
    ranks = dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    seconds, sizes = [], []
    for width in (SMALL, LARGE):
        plain, sharded = (nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))) for _ in range(2))
        for part in (*sharded, sharded):
            fully_shard(part, mesh=mesh)
        alone, shared = (_step(module, width, repeat) for module in (plain, sharded))
        seconds.append(max(0.0, shared - alone) / LAYERS)
        sizes.append(4 * (width * width + width))
    per_byte = max(0.0, (seconds[1] - seconds[0]) / (sizes[1] - sizes[0]))
    per_layer = seconds[0] - per_byte * sizes[0] - 3 * (ranks - 1) * link.latency
    return max(0.0, per_layer), max(0.0, per_byte - 3 * (ranks - 1) / ranks / link.bandwidth)


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
