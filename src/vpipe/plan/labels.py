"""The exact part of the knapsack: partial choices, extended layer by layer.

A label is a choice for the first layers, reduced to what matters for the rest: bytes, seconds on each lane, and whether
its last layer is recomputed. A label goes when another is no worse in all of them, or when even the priced remainder
would not beat the best packing known.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from vpipe.plan.memory import Choice

if TYPE_CHECKING:
    from vpipe.plan.knapsack import Knapsack, LayerChoices

_RELATIVE = 1e-12

Label = tuple[float, float, float, "tuple[Choice, object] | None"]
"""Bytes so far, recomputed seconds, swap seconds, and the choices as a linked list, last first."""


def extend(
    knapsack: Knapsack, price: float, weight: float, bound: float, best: tuple[float, LayerChoices], label_limit: int
) -> tuple[float, float, LayerChoices]:
    """Extends partial choices layer by layer; ``best`` is the packing to beat."""
    on_compute = 1.0 - weight
    _, priced_recompute, priced_other = knapsack.priced(price, on_compute, weight)
    _, least_recompute, least_other = knapsack.priced(1.0, 0.0, 0.0)
    constant = on_compute * knapsack.base - price * knapsack.capacity
    recomputed: list[Label] = []
    others: list[Label] = [(0.0, 0.0, 0.0, None)]
    limit = knapsack.work + label_limit
    beat = best[0] * (1 - _RELATIVE)
    for i in range(knapsack.num_layers):
        saved, start, keep, forward = knapsack.again[i], knapsack.starts[i], knapsack.keep[i], knapsack.forward[i]
        again: list[Label] = []
        if knapsack.recompute:
            again = [(m + saved, t + forward, x, (Choice.RECOMPUTE, p)) for m, t, x, p in recomputed]
            again += [(m + saved + start, t + forward, x, (Choice.RECOMPUTE, p)) for m, t, x, p in others]
        before = recomputed + others
        other: list[Label] = [(m + keep, t, x, (Choice.KEEP, p)) for m, t, x, p in before]
        if knapsack.swappable and saved:
            resident, lane = knapsack.resident[i], knapsack.lane[i]
            other += [(m + resident, t, x + lane, (Choice.SWAP, p)) for m, t, x, p in before]
        knapsack.work += len(again) + len(other)
        if knapsack.work > limit:
            return best[0], min(bound, best[0]), best[1]
        after = i + 1
        hopeful = []
        for labels, least, priced in (
            (again, least_recompute[after], priced_recompute[after]),
            (other, least_other[after], priced_other[after]),
        ):
            room, rest = knapsack.capacity - least, priced + constant
            good = [
                label
                for label in labels
                if label[0] <= room
                and on_compute * label[1] + weight * label[2] + price * label[0] + rest < beat
                and label[1] + knapsack.base < beat
                and label[2] < beat
            ]
            hopeful.append(good)
        recomputed = _undominated(hopeful[0], [])
        others = _undominated(hopeful[1], recomputed)
    for label in recomputed + others:
        value = max(knapsack.base + label[1], label[2])
        best = min(best, (value, _unlink(label)), key=lambda pair: pair[0])
    return best[0], best[0], best[1]


def _undominated(labels: list[Label], stronger: list[Label]) -> list[Label]:
    """Those of ``labels`` that no other, and none of ``stronger``, beats in bytes, seconds and swap alike."""
    marked = sorted(
        [(m, t, x, 0, None) for m, t, x, _ in stronger] + [(m, t, x, 1, p) for m, t, x, p in labels], key=_order
    )
    times: list[float] = []
    lanes: list[float] = []
    left: list[Label] = []
    for m, t, x, own, path in marked:
        # A staircase over all labels of at most m bytes: times rise, lanes fall.
        at = bisect_right(times, t)
        if at and lanes[at - 1] <= x:
            continue
        end = at
        while end < len(times) and lanes[end] >= x:
            end += 1
        if at and times[at - 1] == t:
            at -= 1
        times[at:end] = [t]
        lanes[at:end] = [x]
        if own:
            left.append((m, t, x, path))
    return left


def _order(label: tuple[float, float, float, int, object]) -> tuple[float, float, float, int]:
    return label[:4]


def _chain(link: object) -> LayerChoices:
    found: list[Choice] = []
    while isinstance(link, tuple):
        found.append(link[0])
        link = link[1]
    return tuple(found)


def _unlink(label: Label) -> LayerChoices:
    return _chain(label[3])[::-1]
