"""``partition: auto`` without a measurement: stages of about equal work, estimated from the layers' weights.

``vpipe plan`` measures and does better; this needs no run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from vpipe.runtime.flow import even_partition


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
