"""1F1B: start backwards as soon as they can be, so that a rank holds few microbatches.

p ranks, m microbatches; rank r holds stage r and runs ahead by some forwards before it alternates.

    1f1b, p = 3, m = 4 (ahead by p-1-r)

        rank 0   F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
        rank 1   .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3
        rank 2   .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3

    eager-1f1b (ahead by 2(p-1-r)) sends each forward one round earlier: a transfer of up to one round stays hidden.
"""

from __future__ import annotations

from vpipe.schedule.action import Action
from vpipe.schedule.authors.authoring import B, F, batch, each, one_forward_one_backward
from vpipe.schedule.placement import loop
from vpipe.schedule.program import Program


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Program:
    """Rank r runs ahead by as many forwards as there are ranks behind it."""
    return _ahead(num_ranks, num_microbatches, per_rank_behind=1)


def eager_1f1b(num_ranks: int, num_microbatches: int) -> Program:
    """Rank r runs ahead by two forwards for each rank behind it: more memory, and latency stays hidden."""
    return _ahead(num_ranks, num_microbatches, per_rank_behind=2)


def _ahead(num_ranks: int, num_microbatches: int, per_rank_behind: int) -> Program:
    def row(rank: int) -> list[Action]:
        forwards, backwards = each(rank, F, num_microbatches), each(rank, B, num_microbatches)
        return one_forward_one_backward(forwards, backwards, per_rank_behind * (num_ranks - 1 - rank))

    return batch(loop(num_ranks), num_microbatches, map(row, range(num_ranks)))
