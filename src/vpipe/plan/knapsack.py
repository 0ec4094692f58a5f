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

from collections.abc import Sequence
from dataclasses import dataclass

from vpipe.plan.labels import extend
from vpipe.plan.memory import Choice

_RELATIVE = 1e-12
_LANE_STEPS = 8
LABEL_LIMIT = 4_000
"""Partial choices that ``solve`` extends before it settles for a bound."""

LayerChoices = tuple[Choice, ...]


@dataclass(frozen=True)
class StagePacking:
    """The choices of a stage. ``bound`` equals ``time`` where the answer is proven."""

    time: float
    bound: float
    choices: LayerChoices

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
    path: LayerChoices


class Knapsack:
    """The layers of one stage: ``saved`` and ``inputs`` bytes and ``forward`` seconds of each, ``units`` in flight.

    Of a recomputed layer ``recomputed`` units exist at once, of a swapped one ``resident``.
    """

    def __init__(
        self,
        saved: Sequence[float],
        inputs: Sequence[float],
        forward: Sequence[float],
        *,
        units: int,
        recomputed: int = 1,
        resident: int = 2,
        capacity: float,
        base: float,
        swap_bandwidth: float | None = None,
        recompute: bool = True,
        hint: float = 0.0,
    ) -> None:
        self.num_layers = len(saved)
        self.hint = hint
        """A price per byte that was right for a similar stage; it saves passes and changes no answer."""
        self.work = 0
        """Layers priced and partial choices extended: what the effort of a search is counted in."""
        self._pricing: tuple[float, float, float, list[_Option]] | None = None
        self.capacity, self.base = capacity, base
        swappable = swap_bandwidth is not None and units > resident
        self.swappable, self.recompute = swappable, recompute and units > recomputed
        self.keep = [units * s for s in saved]
        self.again = [recomputed * s for s in saved]
        self.resident = [resident * s for s in saved]
        self.starts = [units * i for i in inputs]
        self.forward = forward
        self.lane = [2.0 * s / swap_bandwidth for s in saved] if swappable and swap_bandwidth else [0.0] * len(saved)

    def bound(self) -> float:
        """A lower bound of the best packing's time by prices alone; infinite where none fits."""
        if sum(self.keep) <= self.capacity:
            return self.base
        if self._pricing is None:
            smallest = self.priced(1.0, 0.0, 0.0)[0]
            if smallest.bytes > self.capacity:
                return float("inf")
            self._pricing = self._prices(smallest)
        return max(self._pricing[0], self.base)

    def solve(self, label_limit: int = LABEL_LIMIT) -> StagePacking | None:
        """The best packing, or ``None`` where not even the smallest one fits."""
        if self.bound() == float("inf"):
            return None
        if self._pricing is None:
            return StagePacking(self.base, self.base, (Choice.KEEP,) * self.num_layers)
        bound, price, weight, found = self._pricing
        best = min(((max(self.base + o.seconds, o.swap), o.path) for o in found), key=lambda pair: pair[0])
        if bound >= best[0] * (1 - _RELATIVE):
            return StagePacking(best[0], best[0], best[1])
        return StagePacking(*extend(self, price, weight, bound, best, label_limit))

    @property
    def price(self) -> float:
        """The price per byte that ``bound`` found."""
        return 0.0 if self._pricing is None else self._pricing[1]

    def priced(self, price: float, on_compute: float, on_swap: float) -> tuple[_Option, list[float], list[float]]:
        """The best path at a price per byte and a weight on each lane, and the priced remainders by state."""
        n = self.num_layers
        self.work += n
        after_recompute, after_other = [0.0] * (n + 1), [0.0] * (n + 1)
        joins, starts = [False] * n, [False] * n
        r = o = 0.0
        others = [price * size for size in self.keep]
        if self.swappable:
            swaps = [price * size + on_swap * time for size, time in zip(self.resident, self.lane, strict=True)]
            swapped = [swap < keep for swap, keep in zip(swaps, others, strict=True)]
            others = [swap if chosen else keep for swap, keep, chosen in zip(swaps, others, swapped, strict=True)]
        else:
            swapped = [False] * n
        again = [price * size + on_compute * time for size, time in zip(self.again, self.forward, strict=True)]
        first = [price * size for size in self.starts]
        recompute = self.recompute
        for i in range(n - 1, -1, -1):
            other, once = others[i] + o, again[i] + r
            r = o = other
            if recompute:
                if once < other:
                    joins[i] = True
                    r = once
                if once + first[i] < other:
                    starts[i] = True
                    o = once + first[i]
            after_recompute[i], after_other[i] = r, o
        path: list[Choice] = []
        before = False
        for i in range(n):
            before = joins[i] if before else starts[i]
            path.append(Choice.RECOMPUTE if before else Choice.SWAP if swapped[i] else Choice.KEEP)
        size, seconds, lane = self.figures(path)
        return _Option(after_other[0], size, seconds, lane, tuple(path)), after_recompute, after_other

    def figures(self, path: Sequence[Choice]) -> tuple[float, float, float]:
        size = seconds = lane = 0.0
        before = Choice.KEEP
        for i, choice in enumerate(path):
            if choice is Choice.KEEP:
                size += self.keep[i]
            elif choice is Choice.SWAP:
                size += self.resident[i]
                lane += self.lane[i]
            else:
                size += self.again[i] + (0.0 if before is Choice.RECOMPUTE else self.starts[i])
                seconds += self.forward[i]
            before = choice
        return size, seconds, lane

    def _prices(self, smallest: _Option) -> tuple[float, float, float, list[_Option]]:
        """The prices with the best bound: (bound, price per byte, weight of the swap lane, fitting paths met)."""
        found = [smallest]
        if not self.swappable:
            bound, price, _ = self._byte_price(0.0, smallest, found)
            return bound, price, 0.0, found
        bound, price, lean = self._byte_price(0.0, smallest, found)
        best = bound, price, 0.0
        low, high = 0.0, 1.0
        # Where the swap lane does not lead even when swapping is free, it costs nothing: no weight is better.
        for _ in range(_LANE_STEPS if lean > 0 else 0):
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

        # At no price everything is kept, which does not fit. A neighbour's price is a better second guess than a line.
        fits, loose = smallest, _Option(0.0, sum(self.keep), 0.0, 0.0, ())
        bound, price = 0.0, 0.0
        if weight == 0.0 and self.hint > 0.0:
            option = self.priced(self.hint, on_compute, weight)[0]
            if option.bytes > self.capacity:
                loose = option
            elif option.bytes < self.capacity:
                fits = option
                found.append(option)
        for _ in range(60):
            price = (cost(fits) - cost(loose)) / (loose.bytes - fits.bytes)
            at_line = cost(fits) + price * (fits.bytes - self.capacity)
            option = self.priced(price, on_compute, weight)[0]
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
