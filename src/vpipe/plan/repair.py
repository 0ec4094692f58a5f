"""A good packing in a moment: single changes to a priced path.

Prices give a path that is best for some memory limit, not for the one at hand: bytes are left over, or one lane waits
for the other. A few passes over the layers mend most of that, and a good packing to beat is what keeps the exact search
short.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vpipe.plan.memory import Choice

if TYPE_CHECKING:
    from vpipe.plan.knapsack import Knapsack, Path

_REPAIRS = 4


def repair(knapsack: Knapsack, path: Path) -> tuple[float, Path]:
    """The path after single changes: fill the swap lane while that is free, unload the longer lane, tidy up."""
    state = _State(knapsack, list(path))
    order = range(knapsack.num_layers)
    both = knapsack.swappable and knapsack.recompute
    for i in order:
        if knapsack.swappable and state.choices[i] is Choice.KEEP and state.lane + knapsack.lane[i] <= knapsack.base:
            state.change(i, Choice.SWAP)
    for _ in range(_REPAIRS):
        before = state.time
        busy = Choice.SWAP if state.lane > knapsack.base + state.seconds else Choice.RECOMPUTE
        cost = knapsack.lane if busy is Choice.SWAP else knapsack.forward
        relief = Choice.RECOMPUTE if busy is Choice.SWAP else Choice.SWAP
        for i in sorted(order, key=lambda i: -cost[i]):
            if state.choices[i] is not busy:
                continue
            # A layer that moves to the other lane frees nearly as much as before; one that is kept frees nothing.
            lane = state.lane + knapsack.lane[i]
            compute = knapsack.base + state.seconds + knapsack.forward[i]
            moves = both and (compute if busy is Choice.SWAP else lane) < state.time
            if not (moves and state.change(i, relief)):
                state.change(i, Choice.KEEP)
        if state.time >= before:
            break
    for i in order:
        if state.choices[i] is Choice.SWAP:
            state.change(i, Choice.KEEP)
    _, seconds, lane = knapsack.figures(state.choices)
    return max(knapsack.base + seconds, lane), tuple(state.choices)


def _local(knapsack: Knapsack, choices: list[Choice], i: int, choice: Choice) -> float:
    """The bytes that depend on the choice of layer ``i`` while the others stay."""
    follows = i + 1 < knapsack.num_layers and choices[i + 1] is Choice.RECOMPUTE
    if choice is Choice.RECOMPUTE:
        joined = i > 0 and choices[i - 1] is Choice.RECOMPUTE
        return knapsack.again[i] + (0.0 if joined else knapsack.starts[i])
    own = knapsack.keep[i] if choice is Choice.KEEP else knapsack.resident[i]
    return own + (knapsack.starts[i + 1] if follows else 0.0)


class _State:
    """Choices that are changed one at a time, and what they add up to."""

    def __init__(self, knapsack: Knapsack, choices: list[Choice]) -> None:
        self.knapsack, self.choices = knapsack, choices
        self.size, self.seconds, self.lane = knapsack.figures(choices)

    @property
    def time(self) -> float:
        return max(self.knapsack.base + self.seconds, self.lane)

    def change(self, i: int, choice: Choice) -> bool:
        """Changes one layer if the memory allows it."""
        knapsack, before = self.knapsack, self.choices[i]
        size = self.size + _local(knapsack, self.choices, i, choice) - _local(knapsack, self.choices, i, before)
        if size > knapsack.capacity:
            return False
        self.size, self.choices[i] = size, choice
        self.seconds += ((choice is Choice.RECOMPUTE) - (before is Choice.RECOMPUTE)) * knapsack.forward[i]
        self.lane += ((choice is Choice.SWAP) - (before is Choice.SWAP)) * knapsack.lane[i]
        return True
