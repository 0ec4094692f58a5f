"""What every possible stage lacks in memory, and what it must recompute at least: stages that grow layer by layer.

A partition of 1,000 layers has half a million possible stages; packing each would take minutes. A price
per byte turns the memory limit into a sum, and the choice of each layer into a shortest path with two states ("the
layer before is recomputed", "it is not"), since a run of recomputed layers keeps only its input:

    recomputed(b+1) = p·again + forward          + min(recomputed(b), other(b) + p·input of a run)
    other(b+1)      = min(p·kept, p·there + l·σ) + min(recomputed(b), other(b))

For any price p ≥ 0 this least, less p times the bytes that there are, is a lower bound of the seconds that the stage
recomputes for each unit, and l times those that it swaps. With bytes alone it is the least memory of the stage, which
is exact. All starts pass
together as one array, for each end in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vpipe.plan.costs import Profile
from vpipe.plan.memory import LayerBytes, Options, StageFacts, bytes_before, bytes_behind

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Growth:
    """Stages of one position on its ranks."""

    profile: Profile
    facts: StageFacts
    options: Options
    first: bool
    last: bool
    prices: tuple[tuple[float, float], ...] = ()
    """Seconds per byte, and what a second of the swap lane, one way, is worth of one of recomputing: infinite where
    nothing is swapped."""
    longest: float = np.inf
    """Seconds of a unit: stages that take longer are of no interest."""

    @property
    def swaps(self) -> bool:
        return self.options.swap and self.profile.swap_bandwidth is not None

    def ends(self, starts: range, stop: int, most: float = np.inf) -> Iterator[tuple[int, int, Floats, Floats]]:
        """(begin, end, short, again): for every end up to ``stop``, of the stages that start at ``begin`` or later the
        bytes that they lack, and for each price the seconds that they recompute at least.

        Stages that start in ``starts`` are looked at, as long as they lack no more than ``most``: a stage that grows
        needs no less.
        """
        facts, cut = self.facts, np.array(self.profile.cut_bytes, dtype=np.float64)
        back = np.array(self.profile.back_bytes, dtype=np.float64)
        before = np.zeros_like(cut) if self.first else bytes_before(cut, back, facts)
        behind = np.zeros_like(cut) if self.last else bytes_behind(cut, back, facts)
        price = np.array([1.0, *(price for price, _ in self.prices)])[:, None]
        seconds = np.array([0.0] + [1.0] * len(self.prices))[:, None]
        lane = np.array([0.0, *(lane for _, lane in self.prices)])[:, None]
        held = LayerBytes.of(self.profile, facts)
        saved = np.array([layer.saved_bytes for layer in self.profile.layers], np.float64)
        kept = price * held.kept
        if self.swaps:
            kept = np.minimum(kept, price * held.swapped + lane * saved / (self.profile.swap_bandwidth or np.inf))
        recomputes = self.options.recompute and facts.recomputing_helps
        # Entry a of each row belongs to the stage that starts at layer a and grows to the right.
        layers = self.profile.num_layers
        recomputed, other = np.full((len(price), layers), np.inf), np.zeros((len(price), layers))
        fixed, work = np.zeros(layers), np.zeros(layers)
        begin = starts.start
        for index in range(starts.start, stop):
            layer = self.profile.layers[index]
            live = slice(begin, min(index + 1, starts.stop))
            fixed[live] += held.lasting[index]
            work[live] += layer.total
            least = np.minimum(recomputed[:, live], other[:, live])
            if recomputes:
                run = np.minimum(recomputed[:, live], other[:, live] + price * held.run[index])
                recomputed[:, live] = price * held.recomputed[index] + seconds * layer.forward + run
            other[:, live] = least + kept[:, index : index + 1]
            least = np.minimum(recomputed[:, live], other[:, live])
            short = least[0] + fixed[live] - facts.memory
            good = (short <= most) & (work[live] <= self.longest)
            gone = int(np.argmax(good)) if good.any() else len(good)
            begin += gone
            if begin >= starts.stop:
                return
            if gone < len(good):
                edge = before[begin : live.stop] + (layer.workspace_bytes + behind[index + 1])
                room = facts.memory - fixed[begin : live.stop] - edge
                again = least[1:, gone:] - price[1:] * room if self.prices else least[1:, gone:]
                yield begin, index + 1, short[gone:] + edge, again
