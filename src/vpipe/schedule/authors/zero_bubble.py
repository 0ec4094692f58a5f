"""Zero bubble: the weight gradients wait, and fill the holes that 1F1B leaves at its end.

p ranks, m microbatches; rank r holds stage r. The backward is split: ``I`` (input gradient) is what the rank before
waits for, for ``W`` (weight gradient) no rank waits.

    zb-h1, p = 3, m = 4: rank r runs ahead by p-1-r forwards, and its W lag r behind its I

        rank 0   F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1   .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2   .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    zb-h2 runs twice as far ahead, with twice the lag: nearly double the memory, and each rank works without a pause.
"""

from __future__ import annotations

from vpipe.schedule.action import Action
from vpipe.schedule.authors.authoring import F, I, W, batch, each, one_forward_one_backward
from vpipe.schedule.placement import loop
from vpipe.schedule.program import Program


def zb_h1(num_ranks: int, num_microbatches: int) -> Program:
    """1F1B's memory on rank 0, the same on every other rank, and a third of its bubble where F = I = W."""
    return lagging(num_ranks, num_microbatches, memory=num_ranks, per_rank_behind=1)


def zb_h2(num_ranks: int, num_microbatches: int) -> Program:
    """Enough microbatches in flight that no rank pauses; ranks end as staggered as they began."""
    return lagging(num_ranks, num_microbatches, memory=2 * num_ranks - 1, per_rank_behind=2)


def lagging(num_ranks: int, num_microbatches: int, memory: int, per_rank_behind: int) -> Program:
    """Each rank holds ``memory`` microbatches: what it does not use to run ahead, it uses to let W lag behind I."""

    def row(rank: int) -> list[Action]:
        ahead = min(per_rank_behind * (num_ranks - 1 - rank), memory - 1)
        lag = memory - 1 - ahead
        forwards = each(rank, F, num_microbatches)
        backwards = each(rank, I, num_microbatches)
        actions = []
        for action in one_forward_one_backward(forwards, backwards, ahead):
            actions.append(action)
            if action.kind is I and action.microbatch >= lag:
                actions.append(Action(rank, W, action.microbatch - lag))
        return actions + [Action(rank, W, k) for k in range(max(0, num_microbatches - lag), num_microbatches)]

    return batch(loop(num_ranks), num_microbatches, map(row, range(num_ranks)))
