"""GPipe: all forwards, then all backwards. The simplest order, and the one that holds every microbatch at once.

p ranks, m microbatches; rank r holds stage r.

    p = 3, m = 4    rank 0   F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
                    rank 1   .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
                    rank 2   .  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3
"""

from __future__ import annotations

from vpipe.schedule.authors.authoring import B, F, batch, each
from vpipe.schedule.placement import loop
from vpipe.schedule.program import Program


def gpipe(num_ranks: int, num_microbatches: int) -> Program:
    """``F0 … F(m-1)``, then ``B0 … B(m-1)``, on every rank."""
    rows = ([*each(rank, F, num_microbatches), *each(rank, B, num_microbatches)] for rank in range(num_ranks))
    return batch(loop(num_ranks), num_microbatches, rows)


def naive(num_ranks: int, num_microbatches: int) -> Program:
    """GPipe's order for a blocking transport, where every transfer ends before the rank goes on: for debugging."""
    return gpipe(num_ranks, num_microbatches)
