"""Several stages on a rank, in a loop: a smaller bubble, paid with more transfers.

p ranks, m microbatches, v stages per rank; rank r holds stages r, p+r, 2p+r, … A stage is 1/v of a rank's share, so the
pipe fills v times faster.

    p = 2, m = 4, v = 2: the order of forwards on a rank (stage of rank 0 / microbatch)

        interleaved   0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3   groups of p microbatches go through all stages of the rank
        looped-bfs    0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3   all microbatches go through one stage after the other

Backwards run in the same pattern with the stages reversed. ``interleaved`` alternates the two as 1F1B does (Megatron);
``interleaved-zb`` also splits the backwards; ``looped-bfs`` runs all forwards first (breadth-first).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import accumulate, starmap

from vpipe.schedule.action import Action, Kind
from vpipe.schedule.authors.authoring import B, F, I, W, batch, one_forward_one_backward
from vpipe.schedule.placement import Placement, loop
from vpipe.schedule.program import Program


def interleaved(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Program:
    """1F1B over groups of p microbatches, or a few more where p does not divide m, or of all m where m < p."""
    # With one stage per rank there is no rank to wait for on the way round, and this is plain 1F1B.
    per_rank_behind = 2 if stages_per_rank > 1 else 1
    placement = loop(num_ranks, stages_per_rank)
    return batch(placement, num_microbatches, _interleave(placement, num_microbatches, B, per_rank_behind))


def interleaved_zb(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Program:
    """The same with split backwards: the W of rank r lag r behind its I, as in zb-h1, and fill the holes at the end."""

    def row(rank: int, actions: list[Action]) -> list[Action]:
        owed: deque[Action] = deque()
        filled = []
        for action in actions:
            filled.append(action)
            if action.kind is I:
                owed.append(Action(action.stage, W, action.microbatch))
                if len(owed) > rank:
                    filled.append(owed.popleft())
        return [*filled, *owed]

    placement = loop(num_ranks, stages_per_rank)
    rows = starmap(row, enumerate(_interleave(placement, num_microbatches, I, per_rank_behind=1)))
    return batch(placement, num_microbatches, rows)


def _interleave(
    placement: Placement, num_microbatches: int, backward: Kind, per_rank_behind: int
) -> Iterator[list[Action]]:
    """Megatron's rows: the last rank runs ahead until its last stage is reached, each rank before it a little more."""
    num_ranks = placement.num_ranks
    groups = _groups(num_microbatches, max(1, num_microbatches // num_ranks))
    for rank, stages in enumerate(placement.stages_of):
        forwards = [Action(stage, F, k) for group in groups for stage in stages for k in group]
        backwards = [Action(stage, backward, k) for group in groups for stage in reversed(stages) for k in group]
        ahead = (len(stages) - 1) * len(groups[0]) + per_rank_behind * (num_ranks - 1 - rank)
        yield one_forward_one_backward(forwards, backwards, ahead)


def _groups(num_microbatches: int, num_groups: int) -> list[range]:
    """Consecutive groups as equal as can be, the larger first: one much smaller than the first would deadlock."""
    size, larger = divmod(num_microbatches, num_groups)
    ends = list(accumulate(size + (group < larger) for group in range(num_groups)))
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def looped_bfs(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Program:
    """All microbatches through each stage of the rank in turn; then the backwards, last stage first."""
    placement = loop(num_ranks, stages_per_rank)
    microbatches = range(num_microbatches)

    def row(stages: tuple[int, ...]) -> list[Action]:
        forwards = [Action(stage, F, k) for stage in stages for k in microbatches]
        backwards = [Action(stage, B, k) for stage in reversed(stages) for k in microbatches]
        return forwards + backwards

    return batch(placement, num_microbatches, map(row, placement.stages_of))
