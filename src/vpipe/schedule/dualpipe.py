"""DualPipe-V: forwards of one half of the V beside backwards of the other, so that each hides the other's transfers.

p ranks, m microbatches, 2p stages on a V: rank r holds stage r (on the way down, upper case) and 2p-1-r (on the way up,
lower case). F and B of different halves stand side by side in the long middle phase, which a runtime may overlap.

    p = 2, m = 4   rank 0   F0 F1 F2 f0 .  i0 w0 f1 F3 b1 f2 B0 b2 f3 B1 b3 .  I2 W2 I3 W3
                   rank 1   .  F0 f0 F1 f1 b0 F2 f2 B0 b1 F3 …

The design is DeepSeek's (github.com/deepseek-ai/DualPipe); the phases below are its eight steps.
"""

from __future__ import annotations

from vpipe.schedule.action import Action
from vpipe.schedule.authoring import batch, unroll
from vpipe.schedule.placement import vee
from vpipe.schedule.program import Program


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Program:
    """Fill with forwards, pair F of one half with B of the other, drain with split backwards."""
    p, m = num_ranks, max(num_microbatches, 2 * num_ranks)

    def row(rank: int) -> list[Action]:
        behind = p - 1 - rank
        phases = [
            (2 * behind, "F"),
            (rank + 1, "F f"),
            (behind, "i w f"),
            (m - p - behind, "F b f B"),
            (behind, "b f B"),
            *_turn(rank),
            (behind, "x I"),
            (rank + 1, "x"),
        ]
        return unroll(rank, 2 * p - 1 - rank, num_microbatches, phases)

    return batch(vee(p), num_microbatches, map(row, range(p)))


def _turn(rank: int) -> list[tuple[int, str]]:
    """rank+1 backwards of both halves in turn; from the middle on split, so that their W fill the end."""
    half = (rank + 1) // 2
    if rank % 2:
        return [(half, "b B"), (half, "i I")]
    return [(half, "b B"), (1, "b I"), (half, "i I")]
