"""DualPipe and DualPipe-V: forwards of one direction beside backwards of the other, so that each hides the other's
transfers.

``dualpipe-v``: p ranks, m microbatches, 2p stages on a V: rank r holds stage r (on the way down, upper case) and 2p-1-r
(on the way up, lower case). In the long middle phase a backward of one half stands next to a forward of the other; a
runtime may overlap such a pair.

    p = 2, m = 4   rank 0   F0 F1 F2 f0 i0 w0 f1 b1 b1 F3 f2 B0 B0 b2 b2 f3 .  B1 B1 b3 b3 I2 W2 .  I3 W3
                   rank 1   .  F0 f0 F1 f1 b0 b0 F2 f2 B0 B0 b1 b1 F3 f3 B1 B1 b2 b2 I2 .  b3 b3 I3 W2 W3

``dualpipe`` unfolds the V: p ranks, p stages, even microbatches down the ranks and odd ones up. The ranks of the first
half run the rows of a V of p/2 ranks; their twins of the second half run the same rows in the other direction. Every
rank holds two stages, half of the units of each, and adds up gradients with its twin.

The design is DeepSeek's (github.com/deepseek-ai/DualPipe). Its bubble formula counts a pair as one block whose results
are there only at its end. Here F and B are actions of their own, and the order below meets the formula where
F = W ≤ I. DeepSeek's drain, which splits backwards from the middle of the turn on, ends earlier than the formula if
actions run one by one: ``deepseek_drain`` chooses it.
"""

from __future__ import annotations

from vpipe.errors import UserError
from vpipe.schedule.action import Action
from vpipe.schedule.authors.authoring import batch, check_flags, unroll
from vpipe.schedule.placement import two_ways, vee
from vpipe.schedule.program import Program


def dualpipe_v(num_ranks: int, num_microbatches: int, *, deepseek_drain: bool = False) -> Program:
    """Fill with forwards, pair backwards with forwards of the other half, turn, drain with split backwards."""
    check_flags(deepseek_drain=deepseek_drain)
    rows = (_row(rank, num_ranks, num_microbatches, deepseek_drain) for rank in range(num_ranks))
    return batch(vee(num_ranks), num_microbatches, rows)


def dualpipe(num_ranks: int, num_microbatches: int, *, deepseek_drain: bool = False) -> Program:
    """The same without the fold: two directions, a stage on two ranks."""
    check_flags(deepseek_drain=deepseek_drain)
    if num_ranks % 2:
        raise UserError(
            f"dualpipe needs an even number of ranks, not {num_ranks}: every rank shares its stages with a twin; use "
            "dualpipe-v or chimera"
        )
    last = num_ranks - 1

    def row(rank: int) -> list[Action]:
        """Rank r of the first half sends its own way even units down; its twin odd ones up."""
        own, other = (0, 1) if rank <= last - rank else (1, 0)
        near = min(rank, last - rank)  # the stage on this rank's own way; beyond the fold, those of the other way
        folded = _row(near, num_ranks // 2, -(-num_microbatches // 2), deepseek_drain)
        row = (Action(s, kind, 2 * k + (own if s == near else other)) for s, kind, k in folded)
        return [action for action in row if action.microbatch < num_microbatches]

    return batch(two_ways(num_ranks), num_microbatches, map(row, range(num_ranks)))


def _row(rank: int, num_ranks: int, num_microbatches: int, deepseek_drain: bool) -> list[Action]:
    """A rank's row on the V."""
    p, m, behind = num_ranks, max(num_microbatches, 2 * num_ranks), num_ranks - 1 - rank
    phases = [
        (2 * behind, "F"),
        (rank + 1, "F f"),
        (behind, "i w f"),
        (m - p - behind, "F b f B" if deepseek_drain else "b F f B"),
        (behind, "b f B"),
        *(_deepseek_turn(rank) if deepseek_drain else [(rank + 1, "b I")]),
        (behind, "x I"),
        (rank + 1, "x"),
    ]
    return unroll(rank, 2 * p - 1 - rank, num_microbatches, phases)


def _deepseek_turn(rank: int) -> list[tuple[int, str]]:
    """rank+1 backwards of each half in turn; whole ones at first, from the middle on split."""
    half = (rank + 1) // 2
    return [(half, "b B"), (half, "i I")] if rank % 2 else [(half, "b B"), (1, "b I"), (half, "i I")]
