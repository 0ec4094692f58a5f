"""Schedules on a V: the loss is computed where the input enters, so that rank 0 waits for no other at the turn.

p ranks, m microbatches, 2p stages: rank r holds stage r (on the way down, upper case) and 2p-1-r (on the way up, lower
case). A stage is half of a rank's share.

    zb-v, p = 2, m = 4   rank 0   F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3
                         rank 1   .  F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3

``v-half`` and ``v-min`` hold half and a third of that memory. Both repeat a *building block*: one microbatch whose
actions pass from rank to rank at fixed offsets, every 6 half-slots (F f i I and two W). The smaller the offsets, the
shorter a microbatch lives, and the fewer are alive at once. The repeated blocks are then *squeezed*: each rank takes
what is ready as early as its memory allows. (After "Pipeline Parallelism with Controllable Memory", Qi et al., 2024.)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from vpipe.schedule.action import Action
from vpipe.schedule.authors.authoring import F, I, W, batch, unroll
from vpipe.schedule.authors.list_scheduler import Rule, squeeze
from vpipe.schedule.placement import vee
from vpipe.schedule.program import Program

PERIOD = 6
Offsets = tuple[int, int, int, int]
"""Half-slots from a rank to the next for F (down), f (up), i (down), I (up)."""


def zb_v(num_ranks: int, num_microbatches: int) -> Program:
    """1F1B's memory, spread evenly, and no bubble but the staggered start where F = I = W."""
    p, m = num_ranks, max(num_microbatches, 2 * num_ranks - 1)

    def row(rank: int) -> list[Action]:
        behind = p - rank
        phases = [
            (2 * behind - 1, "F"),
            (rank, "f F"),
            (behind, "f i w"),
            (m - p - behind + 1, "F I W f i w"),
            (behind - 1, "I W f i w"),
            (rank, "I i"),
            (behind, "I W"),
            (rank, "w"),
            (rank, "W"),
        ]
        return unroll(rank, 2 * p - 1 - rank, num_microbatches, phases)

    return batch(vee(p), num_microbatches, map(row, range(p)))


def v_half(num_ranks: int, num_microbatches: int) -> Program:
    """Half of 1F1B's memory, (p+2)/2, at about half of its bubble."""
    tries: list[tuple[Offsets, Rule]] = [
        ((2, 1, 2, 1), "weights last"),
        ((1, 1, 1, 1), "deepest first"),
        ((3, 1, 3, 3), "weights last"),  # the shortest on 8 ranks: it leaves later, and then never waits
    ]
    return _best(num_ranks, num_microbatches, (num_ranks + 2) // 2, tries)


def v_min(num_ranks: int, num_microbatches: int) -> Program:
    """A third of 1F1B's memory, (p+4)/3: the least that keeps the ranks busy."""
    tries: list[tuple[Offsets, Rule]] = [((1, 1, 1, 1), "in order"), ((1, 1, 1, 1), "weights last")]
    return _best(num_ranks, num_microbatches, (num_ranks + 4) // 3, tries)


def _best(p: int, m: int, memory: int, tries: list[tuple[Offsets, Rule]]) -> Program:
    """The quickest of several squeezes, each within ``memory`` (a microbatch is two halves); the first of equals."""
    placement = vee(p)
    repeated = {offsets: _repeat(p, m, offsets) for offsets, _ in tries}
    found = [squeeze(placement, repeated[offsets], 2 * memory, rule) for offsets, rule in tries]
    assert any(found), f"v-half or v-min got stuck on {p} ranks with {m} microbatches"
    _, rows = min((each for each in found if each is not None), key=lambda each: each[0])
    return batch(placement, m, rows)


def _repeat(p: int, m: int, offsets: Offsets) -> list[list[Action]]:
    """Each rank's actions in the order of the repeated block; weight gradients take the free half-slots."""
    rows = []
    for rank, times in enumerate(_building_block(p, offsets)):
        down, up = rank, 2 * p - 1 - rank
        letters = ((down, F), (up, F), (up, I), (down, I))
        slots = {
            start + PERIOD * k: Action(stage, kind, k)
            for (stage, kind), start in zip(letters, times, strict=True)
            for k in range(m)
        }
        rows.append(list(_fill(slots)))
    return rows


def _fill(slots: dict[int, Action]) -> Iterator[Action]:
    owed: list[Action] = []
    for time in range(max(slots) + 1):
        if action := slots.get(time):
            yield action
            if action.kind is I:
                owed.append(Action(action.stage, W, action.microbatch))
        elif owed:
            yield owed.pop(0)
    yield from owed


def _building_block(p: int, offsets: Offsets) -> list[tuple[int, int, int, int]]:
    """Start of F, f, i, I on every rank, such that no two meet in a slot when the block repeats.

    At each turn the block may pause for some half-slots; the shortest pauses that work are taken, the early ones first.
    """
    a, b, c, d = offsets
    pauses = sorted(product(range(PERIOD), repeat=3), key=lambda each: (sum(each), -each[0], -each[1]))
    for first, second, third in pauses:
        f = a * (p - 1) + 1 + first
        i = f + b * (p - 1) + 1 + second
        last = i + c * (p - 1) + 1 + third
        block = [(a * r, f + b * (p - 1 - r), i + c * r, last + d * (p - 1 - r)) for r in range(p)]
        if all(len({time % PERIOD for time in times}) == 4 for times in block):
            return block
    raise AssertionError(f"no building block for {p} ranks with offsets {offsets}")
