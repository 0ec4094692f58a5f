"""Hanayo: waves. Stages run down the ranks and up again, several times, so that the turns cost no transfer.

p ranks, m microbatches, W waves, v = 2W stages per rank: rank r holds stages r, 2p-1-r, 2p+r, …

    p = 2, m = 2, W = 1   rank 0   0F0 0F1 .   3F0 3B0 3B0 3F1 3B1 3B1 .   0B0 0B0 .   .   0B1 0B1
                          rank 1   .   1F0 2F0 1F1 2F1 .   2B0 2B0 1B0 1B0 2B1 2B1 1B1 1B1

The order is found by a clock with I + W = 2F: each rank takes forwards and backwards in turn, the deepest forward and
the shallowest backward first (what is nearest to its end), and rank 0 lets a microbatch in while it holds less than p.
"""

from __future__ import annotations

from vpipe.errors import UserError
from vpipe.schedule.action import Action
from vpipe.schedule.authors.authoring import B, F, batch, check_counts
from vpipe.schedule.authors.list_scheduler import Chooser, greedy
from vpipe.schedule.placement import zigzag
from vpipe.schedule.program import Program


def hanayo(
    num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None, *, num_waves: int | None = None
) -> Program:
    """``num_waves`` waves, or ``stages_per_rank`` / 2 of them; one where neither is given."""
    waves = _num_waves(stages_per_rank, num_waves)
    placement = zigzag(num_ranks, waves)
    room = 2 * waves * num_ranks

    def prefer(chooser: Chooser, action: Action) -> tuple[float, ...] | None:
        stage, kind, microbatch = action
        if stage == 0 and kind is F and chooser.held >= room:
            return None
        again = bool(chooser.row) and kind is chooser.row[-1].kind
        return (again, -stage if kind is F else stage, microbatch)

    times = [{F: 1.0, B: 2.0}] * placement.num_stages
    return batch(placement, num_microbatches, greedy(placement, num_microbatches, times, prefer))


def _num_waves(stages_per_rank: int | None, num_waves: int | None) -> int:
    if num_waves is not None:
        check_counts(num_waves=num_waves)
    if stages_per_rank is None:
        return num_waves or 1
    if stages_per_rank % 2:
        raise UserError(f"hanayo needs an even number of stages per rank, two for each wave, not {stages_per_rank}")
    if num_waves is not None and stages_per_rank != 2 * num_waves:
        raise UserError(f"{num_waves} waves of hanayo are {2 * num_waves} stages per rank, not {stages_per_rank}")
    return stages_per_rank // 2
