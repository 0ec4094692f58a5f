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
    from vpipe.plan.knapsack import Knapsack, Path

_RELATIVE = 1e-12

Label = tuple[float, float, float, "tuple[Choice, object] | None"]
"""Bytes so far, recomputed seconds, swap seconds, and the choices as a linked list, last first."""


Completion = Label
"""The same from some layer to the end, its choices first to last."""


def extend(
    knapsack: Knapsack, price: float, weight: float, bound: float, best: tuple[float, Path], label_limit: int
) -> tuple[float, float, Path]:
    """Extends partial choices layer by layer; ``best`` is the packing to beat."""
    on_compute = 1.0 - weight
    _, priced_recompute, priced_other = knapsack.priced(price, on_compute, weight)
    _, least_recompute, least_other = knapsack.priced(1.0, 0.0, 0.0)
    ends_recompute, ends_other = _completions(knapsack, price, on_compute, weight, priced_recompute, priced_other)
    constant = on_compute * knapsack.base - price * knapsack.capacity
    recomputed: list[Label] = []
    others: list[Label] = [(0.0, 0.0, 0.0, None)]
    limit = knapsack.work + label_limit
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
        for labels, least, priced, ends in (
            (again, least_recompute[after], priced_recompute[after], ends_recompute[after]),
            (other, least_other[after], priced_other[after], ends_other[after]),
        ):
            beat = best[0] * (1 - _RELATIVE)
            room, rest = knapsack.capacity - least, priced + constant
            good = [
                label
                for label in labels
                if label[0] <= room
                and on_compute * label[1] + weight * label[2] + price * label[0] + rest < beat
                and label[1] + knapsack.base < beat
                and label[2] < beat
            ]
            # Completing a partial choice as the prices would often gives a better packing to beat.
            end_bytes, end_seconds, end_lane, end_path = ends
            for label in good:
                if label[0] + end_bytes <= knapsack.capacity:
                    value = max(knapsack.base + label[1] + end_seconds, label[2] + end_lane)
                    if value < best[0] * (1 - _RELATIVE):
                        best = (value, _unlink(label) + _chain(end_path))
            hopeful.append(good)
        recomputed = _undominated(hopeful[0], [])
        others = _undominated(hopeful[1], recomputed)
    return best[0], best[0], best[1]


def _completions(
    knapsack: Knapsack, price: float, on_compute: float, weight: float, recompute: list[float], other: list[float]
) -> tuple[list[Completion], list[Completion]]:
    """For each layer and state: bytes, seconds, swap seconds and choices of the priced path from there on."""
    n = knapsack.num_layers
    end: Completion = (0.0, 0.0, 0.0, None)
    after_recompute, after_other = [end] * (n + 1), [end] * (n + 1)
    for i in range(n - 1, -1, -1):
        m, t, x, p = after_other[i + 1]
        kept, swapped = price * knapsack.keep[i], price * knapsack.resident[i] + weight * knapsack.lane[i]
        plain: Completion
        if knapsack.swappable and swapped < kept:
            plain = (m + knapsack.resident[i], t, x + knapsack.lane[i], (Choice.SWAP, p))
        else:
            plain = (m + knapsack.keep[i], t, x, (Choice.KEEP, p))
        after_recompute[i] = after_other[i] = plain
        if not knapsack.recompute:
            continue
        cost = min(kept, swapped) if knapsack.swappable else kept
        m, t, x, p = after_recompute[i + 1]
        once = price * knapsack.again[i] + on_compute * knapsack.forward[i] + recompute[i + 1]
        joined: Completion = (m + knapsack.again[i], t + knapsack.forward[i], x, (Choice.RECOMPUTE, p))
        if once < cost + other[i + 1]:
            after_recompute[i] = joined
        if once + price * knapsack.starts[i] < cost + other[i + 1]:
            after_other[i] = (joined[0] + knapsack.starts[i], *joined[1:])
    return after_recompute, after_other


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


def _chain(link: object) -> Path:
    found: list[Choice] = []
    while isinstance(link, tuple):
        found.append(link[0])
        link = link[1]
    return tuple(found)


def _unlink(label: Label) -> Path:
    return _chain(label[3])[::-1]
