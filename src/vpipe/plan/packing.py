"""What the stages of a rank keep, recompute and swap, so that together they fit into its memory.

Recomputing a layer costs its forward time, swapping it costs time on the swap lane, and each frees memory. A price per
byte turns the choice into one pass along the layers of a stage (``Prices``); the price is halved down until the stages
just fit, by the same count of bytes that a plan is judged by (``memory``), and then layers are kept again as long as
they fit. Where few layers share a rank, every choice is looked at (``every``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from vpipe.plan.costs import LayerCost
from vpipe.plan.judge import Judge
from vpipe.plan.memory import Choice, LayerBytes, Options, Peak, rank_bytes
from vpipe.plan.sites import unit_time

Cell = tuple[int, int]
"""First layer of a stage and the layer after its last."""
Choices = tuple[Choice, ...]

_WEIGHTS = (0.05, 0.2, 0.5)
"""Shares of the swap lane in the price of a second: the lanes run side by side, so the best of them counts."""
_PRICE_STEPS = 24
_ALL_CHOICES = 1_000
"""So many choices for the layers of a rank are all tried."""


@dataclass(frozen=True)
class Packing:
    """What the stages of a group do, and the seconds that it costs each of them for a unit."""

    choices: tuple[Choices, ...]
    again: tuple[float, ...]
    swap: tuple[float, ...]


class Packer:
    """Groups of stages that share a rank, and how they fit into its memory."""

    def __init__(self, judge: Judge, options: Options) -> None:
        self.judge, self.options = judge, options
        self.profile, self.sites = judge.profile, judge.sites
        self.facts = [site.facts for site in judge.sites]
        self.groups: list[tuple[int, ...]] = []
        self.caps: list[float] = []
        self.peaks: list[tuple[Peak, ...]] = []
        pipe, machine = judge.pipe, judge.machine
        for rank, stages in enumerate(pipe.program.placement.stages_of):
            if stages in self.groups:
                known = self.groups.index(stages)
                self.caps[known] = min(self.caps[known], machine.memory[rank])
            else:
                self.groups.append(stages)
                self.caps.append(machine.memory[rank])
                self.peaks.append(pipe.peaks[rank])
        self.free = all(cap == float("inf") for cap in self.caps)
        self.swaps = options.swap and self.profile.swap_bandwidth is not None and not self.free
        self._cache: dict[tuple[object, ...], Packing | None] = {}
        self._least: dict[tuple[object, ...], int] = {}
        self.work = 0
        """Layers priced: what the effort of a search is counted in."""

    def packing(self, group: int, cells: tuple[Cell, ...]) -> Packing | None:
        """How these stages fit into their rank; ``None`` where they do not."""
        key = (group, *cells)
        if key not in self._cache:
            keep, nothing = tuple((Choice.KEEP,) * (b - a) for a, b in cells), (0.0,) * len(cells)
            fits = self.free or self.fits(group, cells, keep)
            self._cache[key] = Packing(keep, nothing, nothing) if fits else self._priced(group, cells)
        return self._cache[key]

    def fits(self, group: int, cells: Sequence[Cell], choices: Sequence[Choices]) -> bool:
        return self.bytes_of(group, cells, choices) <= self.caps[group]

    def bytes_of(self, group: int, cells: Sequence[Cell], choices: Sequence[Choices]) -> int:
        """The peak of the rank, as a plan states it."""
        stages = zip(self.groups[group], cells, choices, strict=True)
        terms = {s: self.sites[s].memory(*cell, kept) for s, cell, kept in stages}
        return rank_bytes(terms, self.facts, self.peaks[group])

    def overflow(self, cuts: Sequence[int]) -> tuple[float, int]:
        """The bytes that the worst rank lacks whatever it recomputes and swaps, and its group; 0 or less if all fit."""
        if self.free:
            return -float("inf"), 0
        worst = []
        for group, stages in enumerate(self.groups):
            cells = tuple((cuts[stage], cuts[stage + 1]) for stage in stages)
            key = (group, *cells)
            if key not in self._least:
                prices = [self._prices(s, cell) for s, cell in zip(stages, cells, strict=True)]
                self._least[key] = self.bytes_of(group, cells, self._smallest(group, cells, prices))
            worst.append((self._least[key] - self.caps[group], group))
        return max(worst)

    def _timed(self, stages: Sequence[int], cells: Sequence[Cell], choices: Sequence[Choices]) -> Packing:
        """The seconds of given choices."""
        held = [(self.sites[s], a, kept) for s, (a, _), kept in zip(stages, cells, choices, strict=True)]
        again = tuple(site.recompute(start, kept) for site, start, kept in held)
        return Packing(tuple(choices), again, tuple(site.swap(start, kept) for site, start, kept in held))

    def _prices(self, stage: int, cell: Cell) -> Prices:
        site, (start, stop) = self.sites[stage], cell
        self.work += stop - start
        return Prices(
            site.layer_bytes,
            site.profile.layers[start:stop],
            start,
            swap_bandwidth=site.profile.swap_bandwidth if self.options.swap and site.facts.swapping_helps else None,
            recompute=self.options.recompute and site.facts.recomputing_helps,
        )

    def _priced(self, group: int, cells: tuple[Cell, ...]) -> Packing | None:
        """The lowest price per byte at which the stages fit, then as much kept as fits."""
        stages = self.groups[group]
        prices = [self._prices(s, cell) for s, cell in zip(stages, cells, strict=True)]
        least = self._smallest(group, cells, prices)
        if not self.fits(group, cells, least):
            return None
        packings = [
            self._timed(stages, cells, self._kept_again(group, cells, choices))
            for weight in (_WEIGHTS if any(each.swappable for each in prices) else (0.0,))
            for choices in [self._cheapest(group, cells, prices, least, weight)]
        ]
        base = sum(unit_time(self.sites[s].costs(a, b, ())) for s, (a, b) in zip(stages, cells, strict=True))
        return min(packings, key=lambda each: (max(base + sum(each.again), 2 * sum(each.swap)), sum(each.again)))

    def _cheapest(
        self, group: int, cells: tuple[Cell, ...], prices: list[Prices], least: list[Choices], weight: float
    ) -> list[Choices]:
        """The choices at the lowest price per byte at which the stages fit."""
        rates = [time / max(size, 1.0) for each in prices for time, size in each.rates()]
        best, low, high = least, 0.0, 2.0 * max(rates, default=1.0)
        for _ in range(_PRICE_STEPS):
            middle = (low + high) / 2 if low else high / 8
            self.work += sum(each.num_layers for each in prices)
            if self.fits(group, cells, choices := [each.path(middle, 1.0 - weight, weight) for each in prices]):
                best, high = choices, middle
            else:
                low = middle
            if high - low <= 1e-6 * high:
                break
        return best

    def _smallest(self, group: int, cells: tuple[Cell, ...], prices: list[Prices]) -> list[Choices]:
        """Choices that need few bytes: of each stage alone, or all layers alike, then changed one by one."""
        kinds = self._kinds()
        ways = [
            list(dict.fromkeys([each.path(1.0, 0.0, 0.0), *((kind,) * each.num_layers for kind in kinds)]))
            for each in prices
        ]
        if len(ways) == 1:
            return [ways[0][0]]  # a shortest path: exact
        alike = [[way[min(index, len(way) - 1)] for way in ways] for index in range(len(kinds) + 1)]
        tried = [list(way) for way in product(*ways)] if len(ways) <= 2 else alike
        best = min(tried, key=lambda choices: self.bytes_of(group, cells, choices))
        size = self.bytes_of(group, cells, best)
        places = [(s, i) for s, each in enumerate(prices) for i in range(each.num_layers)]
        for (s, i), kind in product(places if size > self.caps[group] else (), kinds):
            changed = (*best[s][:i], kind, *best[s][i + 1 :])
            other = [*best[:s], changed, *best[s + 1 :]]
            if (less := self.bytes_of(group, cells, other)) < size:
                best, size = other, less
        return best

    def _kinds(self) -> list[Choice]:
        """What may become of a layer. Stages of one rank are recomputed in turn, so there recomputing may help even
        where a stage alone would gain nothing by it, which its prices do not see."""
        kinds = [Choice.KEEP, *([Choice.RECOMPUTE] if self.options.recompute else [])]
        return kinds + ([Choice.SWAP] if self.swaps else [])

    def _kept_again(self, group: int, cells: tuple[Cell, ...], choices: list[Choices]) -> list[Choices]:
        """Layers are kept again, the longest forwards first, as long as the rank fits."""
        now = [list(each) for each in choices]
        layers = self.profile.layers
        order = [(s, i) for s, each in enumerate(now) for i, c in enumerate(each) if c is not Choice.KEEP]
        for s, i in sorted(order, key=lambda place: -layers[cells[place[0]][0] + place[1]].forward):
            before, now[s][i] = now[s][i], Choice.KEEP
            if not self.fits(group, cells, [tuple(each) for each in now]):
                now[s][i] = before
        return [tuple(each) for each in now]

    def every(self, group: int, cells: tuple[Cell, ...]) -> list[Packing] | None:
        """Every choice that may be best under some schedule, or ``None`` where there are too many to look at."""
        stages = self.groups[group]
        num_layers = sum(b - a for a, b in cells)
        priced = self.packing(group, cells)
        if priced is None and len(stages) == 1:
            return []
        if priced is not None and not any(priced.again) and not any(priced.swap):
            return [priced]
        if len(self._kinds()) ** num_layers > _ALL_CHOICES:
            return None
        found = []
        for flat in product(self._kinds(), repeat=num_layers):
            ends = [sum(b - a for a, b in cells[: i + 1]) for i in range(len(cells))]
            choices = [flat[end - (b - a) : end] for end, (a, b) in zip(ends, cells, strict=True)]
            if self.fits(group, cells, choices):
                found.append(self._timed(stages, cells, choices))
        return _undominated(found)


def _undominated(packings: list[Packing]) -> list[Packing]:
    """Those of which no other recomputes and swaps in the same stages and takes no longer in any."""
    kept: list[Packing] = []

    def figures(packing: Packing) -> tuple[float, ...]:
        return packing.again + packing.swap

    for packing in sorted(packings, key=lambda each: sum(figures(each))):
        mine = figures(packing)
        if not any(
            all(o <= x and (o > 0) == (x > 0) for o, x in zip(figures(other), mine, strict=True)) for other in kept
        ):
            kept.append(packing)
    return kept


class Prices:
    """The layers of one stage, the first of which is ``start``: bytes by what becomes of them, and seconds.

    A run of recomputed layers keeps only the run's input, so a choice depends on the one before it: the best choices at
    a price are a shortest path with two states ("the layer before is recomputed", "it is not"), found from the last
    layer to the first.
    """

    def __init__(
        self,
        held: LayerBytes,
        layers: Sequence[LayerCost],
        start: int,
        *,
        swap_bandwidth: float | None = None,
        recompute: bool = True,
    ) -> None:
        self.num_layers, here = len(layers), slice(start, start + len(layers))
        self.swappable, self._recompute = swap_bandwidth is not None, recompute
        self._keep: list[float] = held.kept[here].tolist()
        self._again: list[float] = held.recomputed[here].tolist()
        self._resident: list[float] = held.swapped[here].tolist()
        self._starts: list[float] = held.run[here].tolist()
        self._forward = [layer.forward for layer in layers]
        self._lane = [2.0 * layer.saved_bytes / swap_bandwidth if swap_bandwidth else 0.0 for layer in layers]

    def rates(self) -> Iterator[tuple[float, float]]:
        """Seconds and bytes of every layer, by recomputing or swapping it."""
        for time, lane, keep, again in zip(self._forward, self._lane, self._keep, self._again, strict=True):
            yield max(time, lane), max(keep - again, 1.0) if keep > again else 1.0

    def path(self, price: float, on_compute: float, on_swap: float) -> Choices:
        """The best choices at a price per byte, and one per second on each lane."""
        n = self.num_layers
        joins, starts = [False] * n, [False] * n
        others = [price * size for size in self._keep]
        swapped = [False] * n
        if self.swappable:
            swaps = [price * size + on_swap * time for size, time in zip(self._resident, self._lane, strict=True)]
            swapped = [swap < keep for swap, keep in zip(swaps, others, strict=True)]
            others = [min(swap, keep) for swap, keep in zip(swaps, others, strict=True)]
        again = [price * size + on_compute * time for size, time in zip(self._again, self._forward, strict=True)]
        after_recompute = after_other = 0.0
        for i in range(n - 1, -1, -1):
            other, once = others[i] + after_other, again[i] + after_recompute
            begun = once + price * self._starts[i]
            joins[i] = self._recompute and once < other
            starts[i] = self._recompute and begun < other
            after_recompute, after_other = once if joins[i] else other, begun if starts[i] else other
        choices: list[Choice] = []
        before = False
        for i in range(n):
            before = joins[i] if before else starts[i]
            choices.append(Choice.RECOMPUTE if before else Choice.SWAP if swapped[i] else Choice.KEEP)
        return tuple(choices)
