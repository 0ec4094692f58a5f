"""DualPipe-V: forwards of one half of the V beside backwards of the other, so that each hides the other's transfers.

p ranks, m microbatches, 2p stages on a V: rank r holds stage r (on the way down, upper case) and 2p-1-r (on the way up,
lower case). In the long middle phase a backward of one half stands next to a forward of the other; a runtime may
overlap such a pair.

    p = 2, m = 4   rank 0   F0 F1 F2 f0 i0 w0 f1 b1 b1 F3 f2 B0 B0 b2 b2 f3 .  B1 B1 b3 b3 I2 W2 .  I3 W3
                   rank 1   .  F0 f0 F1 f1 b0 b0 F2 f2 B0 B0 b1 b1 F3 f3 B1 B1 b2 b2 I2 .  b3 b3 I3 W2 W3

The design is DeepSeek's (github.com/deepseek-ai/DualPipe). Its bubble formula counts a pair as one block whose results
are there only at its end. Here F and B are actions of their own, and the order below meets the formula where
F = W ≤ I. DeepSeek's drain, which splits backwards from the middle of the turn on, ends earlier than the formula if
actions run one by one: ``deepseek_drain`` chooses it.
"""

from __future__ import annotations

from vpipe.schedule.action import Action
from vpipe.schedule.authoring import batch, check_flags, unroll
from vpipe.schedule.placement import vee
from vpipe.schedule.program import Program


def dualpipe_v(num_ranks: int, num_microbatches: int, *, deepseek_drain: bool = False) -> Program:
    """Fill with forwards, pair backwards with forwards of the other half, turn, drain with split backwards."""
    check_flags(deepseek_drain=deepseek_drain)
    p, m = num_ranks, max(num_microbatches, 2 * num_ranks)

    def row(rank: int) -> list[Action]:
        behind = p - 1 - rank
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

    return batch(vee(p), num_microbatches, map(row, range(p)))


def _deepseek_turn(rank: int) -> list[tuple[int, str]]:
    """rank+1 backwards of each half in turn; whole ones at first, from the middle on split."""
    half = (rank + 1) // 2
    return [(half, "b B"), (half, "i I")] if rank % 2 else [(half, "b B"), (1, "b I"), (half, "i I")]
