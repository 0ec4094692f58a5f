"""Where a model is cut into stages when nobody says, and a batch into microbatches.

    even_partition    all layers count alike, so a formula does        Pipeline(partition=None)
    balanced          their weights suggest how much they compute      partition: auto
    split_sizes       rows of a batch, the first microbatches taking one more where they do not divide

One rule for stages: the largest part is as small as it can be, and among such cuts the parts are as even as can be.
The planner (``plan``) simulates steps and does better; it needs a measurement, these do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from vpipe.errors import UserError


def even_partition(num_layers: int, num_stages: int) -> list[int]:
    """Equal counts, the surplus to the middle stages: the first and the last also carry the embedding and the loss."""
    if num_layers < num_stages:
        raise UserError(
            f"{num_layers} layers cannot fill {num_stages} stages; use at most {num_layers} stages or finer layers"
        )
    sizes = [num_layers // num_stages] * num_stages
    middle_first = sorted(range(num_stages), key=lambda stage: abs(stage - (num_stages - 1) / 2))
    for stage in middle_first[: num_layers % num_stages]:
        sizes[stage] += 1
    return sizes


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


def split_sizes(rows: int, num_units: int) -> list[int]:
    """How many rows each of ``num_units`` microbatches gets."""
    if rows < num_units:
        raise UserError(
            f"a batch of {rows} rows cannot be cut into {num_units} microbatches; "
            f"give at least {num_units} rows or fewer microbatches"
        )
    return [rows // num_units + (microbatch < rows % num_units) for microbatch in range(num_units)]
