"""Keep, recompute or swap: the best choice for every layer of one stage.

Recomputing a layer costs its forward time, swapping it costs time on the swap lane, and each frees memory. That is a
knapsack, with one twist: a run of recomputed layers keeps only the run's input, so a choice depends on the choice
before it. The knapsack is therefore a shortest path along the layers with two states ("the layer before is
recomputed", "it is not") and a memory limit.

The bound comes from prices. With a price on bytes and a weight between the two lanes the limit disappears, the path is
found by one pass from the last layer to the first, and its cost is a lower bound for every choice that fits. The
exact answer extends partial choices layer by layer and drops those that another dominates, or that the priced
remainder shows cannot win.

    lane = max(base + Σ forward of recomputed, Σ 2·saved of swapped / bandwidth)  →  least
    Σ bytes (see ``memory``)                                                      ≤  capacity
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from vpipe.plan.memory import SWAP_RESIDENT, Choice

_RELATIVE = 1e-12
_LANE_STEPS = 10
_REPAIRS = 4
LABEL_LIMIT = 4_000
"""Partial choices that ``solve`` extends before it settles for a bound."""

Path = tuple[Choice, ...]
Label = tuple[float, float, float, "tuple[Choice, object] | None"]
"""Bytes so far, recomputed seconds, swap seconds, and the choices as a linked list, last first."""


Completion = Label
"""The same from some layer to the end, its choices first to last."""


@dataclass(frozen=True)
class Packing:
    """The choices of a stage. ``bound`` equals ``time`` where the answer is proven."""

    time: float
    bound: float
    choices: Path

    @property
    def exact(self) -> bool:
        return self.bound >= self.time * (1 - 1e-9)


@dataclass(frozen=True)
class _Option:
    """One pass at given prices: the priced cost, and the priced path's own figures."""

    cost: float
    bytes: float
    seconds: float
    swap: float
    path: Path


class Knapsack:
    """The layers of one stage: ``saved`` and ``inputs`` bytes and ``forward`` seconds of each, ``units`` in flight."""

    def __init__(
        self,
        saved: Sequence[float],
        inputs: Sequence[float],
        forward: Sequence[float],
        *,
        units: int,
        capacity: float,
        base: float,
        swap_bandwidth: float | None = None,
        recompute: bool = True,
    ) -> None:
        self.num_layers = len(saved)
        self.work = 0
        """Layers priced and partial choices extended: what the effort of a search is counted in."""
        self.capacity, self.base = capacity, base
        swappable = swap_bandwidth is not None and units > SWAP_RESIDENT
        self.swappable, self.recompute = swappable, recompute and units > 1
        self.saved = saved
        self.keep = [units * s for s in saved]
        self.resident = [SWAP_RESIDENT * s for s in saved]
        self.starts = [units * i for i in inputs]
        self.forward = forward
        self.lane = [2.0 * s / swap_bandwidth for s in saved] if swappable and swap_bandwidth else [0.0] * len(saved)

    def solve(self, label_limit: int = LABEL_LIMIT) -> Packing | None:
        """The best packing, or ``None`` where not even the smallest one fits."""
        n = self.num_layers
        if sum(self.keep) <= self.capacity:
            return Packing(self.base, self.base, (Choice.KEEP,) * n)
        smallest = self._priced(1.0, 0.0, 0.0)[0]
        if smallest.bytes > self.capacity:
            return None
        bound, price, weight, found = self._prices(smallest)
        best = min((self._improved(option.path) for option in found), key=lambda pair: pair[0])
        if bound >= best[0] * (1 - _RELATIVE):
            return Packing(best[0], best[0], best[1])
        return self._extend(price, weight, bound, best, label_limit)

    def smallest(self) -> float:
        """The fewest bytes that any choice needs."""
        return self._priced(1.0, 0.0, 0.0)[0].bytes

    def _priced(self, price: float, on_compute: float, on_swap: float) -> tuple[_Option, list[float], list[float]]:
        """The best path at a price per byte and a weight on each lane, and the priced remainders by state."""
        n = self.num_layers
        self.work += n
        after_recompute, after_other = [0.0] * (n + 1), [0.0] * (n + 1)
        r = o = 0.0
        for i in range(n - 1, -1, -1):
            other = price * self.keep[i]
            if self.swappable:
                other = min(other, price * self.resident[i] + on_swap * self.lane[i])
            other += o
            if self.recompute:
                again = price * self.saved[i] + on_compute * self.forward[i] + r
                r, o = min(again, other), min(again + price * self.starts[i], other)
            else:
                r = o = other
            after_recompute[i], after_other[i] = r, o
        path: list[Choice] = []
        before = False
        for i in range(n):
            swapped = price * self.resident[i] + on_swap * self.lane[i]
            kept = price * self.keep[i]
            swap = self.swappable and swapped < kept
            other = (swapped if swap else kept) + after_other[i + 1]
            again = price * self.saved[i] + on_compute * self.forward[i] + after_recompute[i + 1]
            before = self.recompute and again + (0.0 if before else price * self.starts[i]) < other
            path.append(Choice.RECOMPUTE if before else Choice.SWAP if swap else Choice.KEEP)
        size, seconds, lane = self._figures(path)
        return _Option(after_other[0], size, seconds, lane, tuple(path)), after_recompute, after_other

    def _figures(self, path: Sequence[Choice]) -> tuple[float, float, float]:
        size = seconds = lane = 0.0
        before = Choice.KEEP
        for i, choice in enumerate(path):
            if choice is Choice.KEEP:
                size += self.keep[i]
            elif choice is Choice.SWAP:
                size += self.resident[i]
                lane += self.lane[i]
            else:
                size += self.saved[i] + (0.0 if before is Choice.RECOMPUTE else self.starts[i])
                seconds += self.forward[i]
            before = choice
        return size, seconds, lane

    def _prices(self, smallest: _Option) -> tuple[float, float, float, list[_Option]]:
        """The prices with the best bound: (bound, price per byte, weight of the swap lane, fitting paths met)."""
        found = [smallest]
        if not self.swappable:
            bound, price, _ = self._byte_price(0.0, smallest, found)
            return bound, price, 0.0, found
        best = (-1.0, 0.0, 0.0)
        low, high = 0.0, 1.0
        for _ in range(_LANE_STEPS):
            weight = (low + high) / 2
            bound, price, lean = self._byte_price(weight, smallest, found)
            best = max(best, (bound, price, weight))
            low, high = (weight, high) if lean > 0 else (low, weight)
        return (*best, found)

    def _byte_price(self, weight: float, smallest: _Option, found: list[_Option]) -> tuple[float, float, float]:
        """The best price per byte at a weight of the swap lane, and by how much the swap lane then leads."""
        on_compute = 1.0 - weight

        def cost(option: _Option) -> float:
            return on_compute * (self.base + option.seconds) + weight * option.swap

        loose = self._priced(0.0, on_compute, weight)[0]
        if loose.bytes <= self.capacity:
            found.append(loose)
            return cost(loose), 0.0, loose.swap - loose.seconds - self.base
        fits = smallest
        bound, price = 0.0, 0.0
        for _ in range(60):
            price = (cost(fits) - cost(loose)) / (loose.bytes - fits.bytes)
            at_line = cost(fits) + price * (fits.bytes - self.capacity)
            option = self._priced(price, on_compute, weight)[0]
            bound = option.cost + on_compute * self.base - price * self.capacity
            if bound >= at_line - _RELATIVE * abs(at_line) or option.bytes in (fits.bytes, loose.bytes):
                break
            if option.bytes <= self.capacity:
                fits = option
                found.append(option)
            else:
                loose = option
        share = (self.capacity - fits.bytes) / (loose.bytes - fits.bytes)
        lean = (1 - share) * (fits.swap - fits.seconds) + share * (loose.swap - loose.seconds) - self.base
        return bound, price, lean

    def _improved(self, path: Path) -> tuple[float, Path]:
        """The path after single changes: fill the swap lane while that is free, unload the longer lane, tidy up."""
        state = _State(self, list(path))
        order = range(self.num_layers)
        for i in order:
            if self.swappable and state.choices[i] is Choice.KEEP and state.lane + self.lane[i] <= self.base:
                state.change(i, Choice.SWAP)
        for _ in range(_REPAIRS):
            before = state.time
            busy = Choice.SWAP if state.lane > self.base + state.seconds else Choice.RECOMPUTE
            cost = self.lane if busy is Choice.SWAP else self.forward
            relief = Choice.RECOMPUTE if busy is Choice.SWAP else Choice.SWAP
            for i in sorted(order, key=lambda i: -cost[i]):
                if state.choices[i] is busy and not state.change(i, Choice.KEEP):
                    other = (
                        self.base + state.seconds + self.forward[i]
                        if busy is Choice.SWAP
                        else state.lane + self.lane[i]
                    )
                    if self.swappable and self.recompute and other < state.time:
                        state.change(i, relief)
            if state.time >= before:
                break
        for i in order:
            if state.choices[i] is Choice.SWAP:
                state.change(i, Choice.KEEP)
        _, seconds, lane = self._figures(state.choices)
        return max(self.base + seconds, lane), tuple(state.choices)

    def _local(self, choices: list[Choice], i: int, choice: Choice) -> float:
        """The bytes that depend on the choice of layer ``i`` while the others stay."""
        follows = i + 1 < self.num_layers and choices[i + 1] is Choice.RECOMPUTE
        if choice is Choice.RECOMPUTE:
            joined = i > 0 and choices[i - 1] is Choice.RECOMPUTE
            return self.saved[i] + (0.0 if joined else self.starts[i])
        own = self.keep[i] if choice is Choice.KEEP else self.resident[i]
        return own + (self.starts[i + 1] if follows else 0.0)

    def _extend(self, price: float, weight: float, bound: float, best: tuple[float, Path], label_limit: int) -> Packing:
        """Extends partial choices layer by layer; ``best`` is the packing to beat."""
        on_compute = 1.0 - weight
        _, priced_recompute, priced_other = self._priced(price, on_compute, weight)
        _, least_recompute, least_other = self._priced(1.0, 0.0, 0.0)
        ends_recompute, ends_other = self._completions(price, on_compute, weight, priced_recompute, priced_other)
        constant = on_compute * self.base - price * self.capacity
        recomputed: list[Label] = []
        others: list[Label] = [(0.0, 0.0, 0.0, None)]
        limit = self.work + label_limit
        for i in range(self.num_layers):
            saved, start, keep, forward = self.saved[i], self.starts[i], self.keep[i], self.forward[i]
            again: list[Label] = []
            if self.recompute:
                again = [(m + saved, t + forward, x, (Choice.RECOMPUTE, p)) for m, t, x, p in recomputed]
                again += [(m + saved + start, t + forward, x, (Choice.RECOMPUTE, p)) for m, t, x, p in others]
            before = recomputed + others
            other: list[Label] = [(m + keep, t, x, (Choice.KEEP, p)) for m, t, x, p in before]
            if self.swappable and saved:
                resident, lane = self.resident[i], self.lane[i]
                other += [(m + resident, t, x + lane, (Choice.SWAP, p)) for m, t, x, p in before]
            self.work += len(again) + len(other)
            if self.work > limit:
                return Packing(best[0], min(bound, best[0]), best[1])
            after = i + 1
            hopeful = []
            for labels, least, priced, ends in (
                (again, least_recompute[after], priced_recompute[after], ends_recompute[after]),
                (other, least_other[after], priced_other[after], ends_other[after]),
            ):
                beat = best[0] * (1 - _RELATIVE)
                room, rest = self.capacity - least, priced + constant
                good = [
                    label
                    for label in labels
                    if label[0] <= room
                    and on_compute * label[1] + weight * label[2] + price * label[0] + rest < beat
                    and label[1] + self.base < beat
                    and label[2] < beat
                ]
                # Completing a partial choice as the prices would often gives a better packing to beat.
                end_bytes, end_seconds, end_lane, end_path = ends
                for label in good:
                    if label[0] + end_bytes <= self.capacity:
                        value = max(self.base + label[1] + end_seconds, label[2] + end_lane)
                        if value < best[0] * (1 - _RELATIVE):
                            best = (value, _unlink(label) + _chain(end_path))
                hopeful.append(good)
            recomputed = _undominated(hopeful[0], [])
            others = _undominated(hopeful[1], recomputed)
        return Packing(best[0], best[0], best[1])

    def _completions(
        self, price: float, on_compute: float, weight: float, recompute: list[float], other: list[float]
    ) -> tuple[list[Completion], list[Completion]]:
        """For each layer and state: bytes, seconds, swap seconds and choices of the priced path from there on."""
        n = self.num_layers
        end: Completion = (0.0, 0.0, 0.0, None)
        after_recompute, after_other = [end] * (n + 1), [end] * (n + 1)
        for i in range(n - 1, -1, -1):
            m, t, x, p = after_other[i + 1]
            kept, swapped = price * self.keep[i], price * self.resident[i] + weight * self.lane[i]
            plain: Completion
            if self.swappable and swapped < kept:
                plain = (m + self.resident[i], t, x + self.lane[i], (Choice.SWAP, p))
            else:
                plain = (m + self.keep[i], t, x, (Choice.KEEP, p))
            after_recompute[i] = after_other[i] = plain
            if not self.recompute:
                continue
            cost = min(kept, swapped) if self.swappable else kept
            m, t, x, p = after_recompute[i + 1]
            once = price * self.saved[i] + on_compute * self.forward[i] + recompute[i + 1]
            joined: Completion = (m + self.saved[i], t + self.forward[i], x, (Choice.RECOMPUTE, p))
            if once < cost + other[i + 1]:
                after_recompute[i] = joined
            if once + price * self.starts[i] < cost + other[i + 1]:
                after_other[i] = (joined[0] + self.starts[i], *joined[1:])
        return after_recompute, after_other


class _State:
    """Choices that are changed one at a time, and what they add up to."""

    def __init__(self, knapsack: Knapsack, choices: list[Choice]) -> None:
        self.knapsack, self.choices = knapsack, choices
        self.size, self.seconds, self.lane = knapsack._figures(choices)

    @property
    def time(self) -> float:
        return max(self.knapsack.base + self.seconds, self.lane)

    def change(self, i: int, choice: Choice) -> bool:
        """Changes one layer if the memory allows it."""
        knapsack, before = self.knapsack, self.choices[i]
        size = self.size + knapsack._local(self.choices, i, choice) - knapsack._local(self.choices, i, before)
        if size > knapsack.capacity:
            return False
        self.size, self.choices[i] = size, choice
        self.seconds += ((choice is Choice.RECOMPUTE) - (before is Choice.RECOMPUTE)) * knapsack.forward[i]
        self.lane += ((choice is Choice.SWAP) - (before is Choice.SWAP)) * knapsack.lane[i]
        return True


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
