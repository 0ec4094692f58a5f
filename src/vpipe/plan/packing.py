"""What the stages of a rank keep, recompute and swap, so that together they fit into its memory.

A rank with one stage is a knapsack (``knapsack``), solved exactly where that is quick. Several stages share their
rank's memory: their units come and go at different times, and only one of them is recomputed at a time. There a price
per byte turns the choice into one pass per stage; the price is halved down until the stages just fit, by the same count
of bytes that a plan is judged by (``memory``), and then layers are kept again as long as they fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from vpipe.plan.judge import Judge
from vpipe.plan.knapsack import Knapsack
from vpipe.plan.memory import Choice, Options, Peak, rank_bytes
from vpipe.plan.sites import unit_time

Cell = tuple[int, int]
"""First layer of a stage and the layer after its last."""
Choices = tuple[Choice, ...]

QUICK, THOROUGH = 300, 20_000
"""Partial choices that a knapsack extends, while many stages are looked at and when few are left."""
_HIDDEN = (0.6, 1.0, 0.0)
"""Parts of its bandwidth that the swap lane is believed to have: less than all leaves it time to hide in."""
_PRICE_STEPS = 24
_ALL_CHOICES = 6
"""Layers of a rank of which every choice is tried."""


@dataclass(frozen=True)
class Packing:
    """What the stages of a group do, and the seconds that it costs each of them for a unit."""

    choices: tuple[Choices, ...]
    again: tuple[float, ...]
    swap: tuple[float, ...]
    exact: bool = True
    """Whether no other choice is quicker, whatever the schedule makes of it."""


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
        self._cache: dict[tuple[object, ...], list[Packing]] = {}
        self._least: dict[tuple[object, ...], int] = {}
        self._hints: dict[int, float] = {}
        self.work = 0

    def packings(self, group: int, cells: tuple[Cell, ...]) -> list[Packing]:
        """Ways to fit these stages into their rank, the most promising first; none where they do not fit."""
        stages = self.groups[group]
        if self.free:
            return [self._priced_at(stages, cells, [(Choice.KEEP,) * (b - a) for a, b in cells])]
        key = (group, *cells)
        if key not in self._cache:
            self._cache[key] = list(self._pack(group, stages, cells))
        return self._cache[key]

    def _pack(self, group: int, stages: tuple[int, ...], cells: tuple[Cell, ...]) -> Iterator[Packing]:
        keep = [(Choice.KEEP,) * (b - a) for a, b in cells]
        if self.fits(group, cells, keep):
            yield self._priced_at(stages, cells, keep)
            return
        found: list[Packing] = []
        for swap in _HIDDEN if self.swaps else (0.0,):
            if len(stages) == 1:
                made = self._one(stages[0], cells[0], swap)
            else:
                made = self._several(group, stages, cells, swap)
            if made is not None and made.choices not in [other.choices for other in found]:
                found.append(made)
                yield made

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
                sacks = [self._knapsack(s, cell, swap=1.0) for s, cell in zip(stages, cells, strict=True)]
                self._least[key] = self.bytes_of(group, cells, self._smallest(group, cells, sacks))
            worst.append((self._least[key] - self.caps[group], group))
        return max(worst)

    def _priced_at(self, stages: Sequence[int], cells: Sequence[Cell], choices: Sequence[Choices]) -> Packing:
        """The seconds of given choices."""
        held = [(self.sites[s], a, kept) for s, (a, _), kept in zip(stages, cells, choices, strict=True)]
        again = tuple(site.recompute(start, kept) for site, start, kept in held)
        return Packing(tuple(choices), again, tuple(site.swap(start, kept) for site, start, kept in held))

    def harder(self, group: int, cells: tuple[Cell, ...], packing: Packing) -> Packing:
        """The same stage solved with many more labels, if that was not proven."""
        stages = self.groups[group]
        if packing.exact or len(stages) > 1 or any(packing.swap):
            return packing
        made = self._one(stages[0], cells[0], swap=0.0, label_limit=THOROUGH)
        return packing if made is None or made.again >= packing.again else made

    def _one(self, stage: int, cell: Cell, swap: float, label_limit: int = QUICK) -> Packing | None:
        """One stage with its rank for itself: the knapsack, with and without the swap lane."""
        knapsack = self._knapsack(stage, cell, swap)
        knapsack.hint = self._hints.get(stage, 0.0)
        solved = knapsack.solve(label_limit)
        self._hints[stage] = knapsack.price or knapsack.hint
        self.work += knapsack.work
        if solved is None:
            return None
        made = self._priced_at((stage,), (cell,), (solved.choices,))
        exact = solved.exact and not (self.options.swap and self.profile.swap_bandwidth)
        return Packing(made.choices, made.again, made.swap, exact)

    def _knapsack(self, stage: int, cell: Cell, swap: float) -> Knapsack:
        site, (start, stop) = self.sites[stage], cell
        layers, facts, bandwidth = site.profile.layers[start:stop], site.facts, site.profile.swap_bandwidth
        keep = (Choice.KEEP,) * len(layers)
        terms = site.memory(start, stop, keep)
        return Knapsack(
            [float(layer.saved_bytes) for layer in layers],
            [float(size) for size in site.profile.cut_bytes[start:stop]],
            [layer.forward for layer in layers],
            units=facts.units,
            recomputed=facts.recomputed,
            resident=facts.resident,
            capacity=facts.memory - terms.lasting - terms.workspace,
            base=unit_time(site.costs(start, stop, keep)),
            swap_bandwidth=swap * bandwidth if swap and self.options.swap and bandwidth else None,
            recompute=self.options.recompute,
        )

    def _several(self, group: int, stages: tuple[int, ...], cells: tuple[Cell, ...], swap: float) -> Packing | None:
        """Stages that share a rank: the lowest price per byte at which they fit, then as much kept as fits."""
        sacks = [self._knapsack(s, cell, swap) for s, cell in zip(stages, cells, strict=True)]
        self.work += sum(sack.num_layers for sack in sacks) * _PRICE_STEPS

        def at(price: float) -> list[Choices]:
            return [sack.priced(price, 1.0, 1.0)[0].path for sack in sacks]

        best = self._smallest(group, cells, sacks)
        if not self.fits(group, cells, best):
            return None
        low, high = 0.0, 2.0 * max((time / max(size, 1.0) for k in sacks for time, size in _rates(k)), default=1.0)
        for _ in range(_PRICE_STEPS):
            middle = (low + high) / 2 if low else high / 8
            if self.fits(group, cells, choices := at(middle)):
                best, high = choices, middle
            else:
                low = middle
            if high - low <= 1e-6 * high:
                break
        made = self._priced_at(stages, cells, self._kept_again(group, cells, best))
        return Packing(made.choices, made.again, made.swap, exact=False)

    def _smallest(self, group: int, cells: tuple[Cell, ...], sacks: list[Knapsack]) -> list[Choices]:
        """Choices that need few bytes: of each stage alone, or all layers alike, then changed one by one."""
        kinds = self._kinds()
        ways = [
            list(dict.fromkeys([sack.priced(1.0, 0.0, 0.0)[0].path, *((kind,) * sack.num_layers for kind in kinds)]))
            for sack in sacks
        ]
        if len(ways) == 1:
            return [ways[0][0]]  # a shortest path: exact
        alike = [[way[min(index, len(way) - 1)] for way in ways] for index in range(len(kinds) + 1)]
        tried = [list(way) for way in product(*ways)] if len(ways) <= 2 else alike
        best = min(tried, key=lambda choices: self.bytes_of(group, cells, choices))
        size = self.bytes_of(group, cells, best)
        places = [(s, i) for s, sack in enumerate(sacks) for i in range(sack.num_layers)]
        for (s, i), kind in product(places if size > self.caps[group] else (), kinds):
            changed = (*best[s][:i], kind, *best[s][i + 1 :])
            other = [*best[:s], changed, *best[s + 1 :]]
            if (less := self.bytes_of(group, cells, other)) < size:
                best, size = other, less
        return best

    def _kinds(self) -> list[Choice]:
        """What may become of a layer. Stages of one rank are recomputed in turn, so there recomputing may help even
        where a stage alone would gain nothing by it, which its knapsack does not see."""
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
        first = self.packings(group, cells)
        if first and len(first) == 1 and len(stages) == 1 and not first[0].exact:
            first[0] = self.harder(group, cells, first[0])
        if self.free or (len(stages) == 1 and len(first) == 1 and first[0].exact) or (len(stages) == 1 and not first):
            return first
        if first and not any(first[0].again) and not any(first[0].swap):
            return first[:1]
        if num_layers > _ALL_CHOICES:
            return None
        found = []
        for flat in product(self._kinds(), repeat=num_layers):
            ends = [sum(b - a for a, b in cells[: i + 1]) for i in range(len(cells))]
            choices = [flat[end - (b - a) : end] for end, (a, b) in zip(ends, cells, strict=True)]
            if self.fits(group, cells, choices):
                found.append(self._priced_at(stages, cells, choices))
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


def _rates(knapsack: Knapsack) -> Iterator[tuple[float, float]]:
    """Seconds and bytes of every layer, by recomputing or swapping it."""
    for time, lane, keep, again in zip(knapsack.forward, knapsack.lane, knapsack.keep, knapsack.again, strict=True):
        yield max(time, lane), max(keep - again, 1.0) if keep > again else 1.0
