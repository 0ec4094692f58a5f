"""Chimera: two pipelines in opposite directions over the same ranks, each filling the other's bubble.

p ranks, m microbatches, p stages. Even microbatches go down the ranks (stage s on rank s), odd ones up (stage s on rank
p-1-s), so every rank holds two stages (the first in upper case), half of the units of each, and meets its twin,
p-1-r, to add up their gradients. With odd p the rank in the middle holds one stage for both directions.

    p = 4, m = 4   rank 0  F0 F2 ·  f1 b1─── f3 b3─── ·  B0─── ·     B2───
                   rank 1  ·  F0 f1 F2 f3 ·  b1─── B0─── b3─── B2───
                   rank 2  ·  F1 f0 F3 f2 ·  b0─── B1─── b2─── B3───
                   rank 3  F1 F3 ·  f0 b0─── f2 b2─── ·  B1─── ·     B3───

A rank runs ahead in each direction as far as 1F1B would; a forward that is ready goes before a backward, the deepest
first. (After "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines", Li and Hoefler,
2021; the order is made for backwards that take twice as long as forwards.)
"""

from __future__ import annotations

from vpipe.schedule.action import Action
from vpipe.schedule.authors.authoring import B, F, batch
from vpipe.schedule.authors.list_scheduler import Chooser, greedy
from vpipe.schedule.placement import two_ways
from vpipe.schedule.program import Program


def chimera(num_ranks: int, num_microbatches: int) -> Program:
    """1F1B in both directions at once."""
    placement = two_ways(num_ranks)

    def prefer(chooser: Chooser, action: Action) -> tuple[float, ...] | None:
        stage, kind, microbatch = action
        directions = 2 // placement.num_replicas(stage)  # of the units that meet here
        if kind is F and chooser.open[stage] >= directions * (num_ranks - stage):
            return None
        return (kind is B, -stage, microbatch)

    times = [{F: 1.0, B: 2.0}] * num_ranks
    return batch(placement, num_microbatches, greedy(placement, num_microbatches, times, prefer))
