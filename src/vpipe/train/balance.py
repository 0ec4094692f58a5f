"""``partition: auto`` without a measurement: stages of about equal work, estimated from the layers' weights.

``vpipe plan`` measures and does better; this needs no run. A layer's work is taken as the weights of its matrix
products, so a head over a large vocabulary counts for what it is and an embedding, which multiplies nothing, for almost
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import torch
from torch import nn

from vpipe.models.model import Model
from vpipe.runtime.flow import even_partition


def estimated_work(model: Model) -> list[float]:
    """Per layer, the weights of its matrix products; nothing is allocated."""
    with torch.device("meta"):
        modules = model.build()
    work = []
    for module in modules:
        parts = [part for part in module.modules() if not isinstance(part, nn.Embedding)]
        work.append(float(sum(p.numel() for part in parts for p in part.parameters(recurse=False) if p.dim() > 1)))
    smallest = max(work) * 0.01 or 1.0
    return [amount + smallest for amount in work]


def balanced(work: Sequence[float], num_stages: int) -> list[int]:
    """Contiguous parts whose largest is as small as possible; among those, the most even."""
    even_partition(len(work), num_stages)  # says so where there are too few layers
    sums = [0.0, *accumulate(work)]

    @cache
    def best(first: int, stages: int) -> tuple[float, float, tuple[int, ...]]:
        """(largest part, sum of squares, sizes) of layers ``first..`` in ``stages`` parts."""
        if stages == 1:
            total = sums[-1] - sums[first]
            return total, total * total, (len(work) - first,)
        options = []
        for end in range(first + 1, len(work) - stages + 2):
            part = sums[end] - sums[first]
            largest, squares, sizes = best(end, stages - 1)
            options.append((max(part, largest), squares + part * part, (end - first, *sizes)))
        return min(options)

    return list(best(0, num_stages)[2])
