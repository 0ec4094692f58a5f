"""What layers cost and how quick ranks are, as far as the measured times of stages tell.

    time of a stage = slowness of its rank · Σ cost of its layers

One layout has too few equations, so the layers' estimated work says how a stage's time divides. Every further layout
adds equations, and the costs are those that fulfil all of them and depart least from what was believed before. A stage
whose time changes while the layout does not tells of its rank (other load, heat, another machine) where forward and
backward change alike. Where they do not, its layers have changed: frozen ones lose their backward and keep their
forward. Then what earlier layouts said is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vpipe.plan.costs import LayerCost, Profile

Array = NDArray[np.float64]
NOTICE = 0.1
"""By what share the time of a stage must change to be news."""
UNLIKE = 0.25
"""By what share forward and backward must change differently to tell of layers and not of a rank."""
MOST_EQUATIONS = 48
LEAST = 0.02
"""A layer costs at least this share of the mean: no measurement says that it costs nothing."""


class Observed:
    """Costs of layers (forward, input gradient, weight gradient; seconds of a unit) and slowness of ranks."""

    def __init__(self, work: Sequence[float], ranks_of: Sequence[Sequence[int]]) -> None:
        self._work = np.maximum(np.array(work, dtype=np.float64), 1e-9)
        self._ranks_of = ranks_of
        self.slowness = np.ones(1 + max(max(ranks) for ranks in ranks_of))
        self.costs: Array | None = None
        self._rows: list[Array] = []
        self._times: list[Array] = []
        self._counts: tuple[int, ...] = ()

    def learn(self, counts: Sequence[int], times: Array) -> None:
        """``times[stage]`` were measured with ``counts[stage]`` layers in each stage."""
        masks = _masks(counts)
        if self.costs is None:
            share = masks * self._work / (masks @ self._work)[:, None]
            self.costs = share.T @ times
        elif tuple(counts) == self._counts:
            if not self._blame_ranks(masks, times):
                return
            self._rows, self._times = [], []
        slow = np.array([self._slowness(stage) for stage in range(len(counts))])
        self._rows += list(masks * slow[:, None])
        self._times += list(times)
        del self._rows[:-MOST_EQUATIONS], self._times[:-MOST_EQUATIONS]
        self._counts = tuple(counts)
        self._solve()

    def _slowness(self, stage: int) -> float:
        return float(np.mean([self.slowness[rank] for rank in self._ranks_of[stage]]))

    def _blame_ranks(self, masks: Array, times: Array) -> bool:
        """The layout is the one before: ranks have changed, or layers. Whether layers have."""
        assert self.costs is not None
        expected, layers_changed = masks @ self.costs, False
        for rank in range(len(self.slowness)):
            mine = [stage for stage, ranks in enumerate(self._ranks_of) if rank in ranks]
            before, now = expected[mine].sum(axis=0), times[mine].sum(axis=0)
            ratio = float(now.sum() / max(before.sum(), 1e-12))
            forward, backward = (
                float(now[part].sum() / max(before[part].sum(), 1e-12)) for part in (slice(0, 1), slice(1, 3))
            )
            if abs(backward - forward) > UNLIKE * max(forward, backward):
                layers_changed, ratio = True, forward
            if abs(ratio / self.slowness[rank] - 1) > NOTICE:
                self.slowness[rank] = ratio
        return layers_changed

    def _solve(self) -> None:
        assert self.costs is not None
        rows, times = np.array(self._rows), np.array(self._times)
        change, *_ = np.linalg.lstsq(rows, times - rows @ self.costs, rcond=1e-6)
        least = LEAST * self.costs.mean(axis=0)
        self.costs = np.maximum(self.costs + change, least)

    def profile(self, sizes: Profile | None = None) -> Profile:
        """What the planner is told; ``sizes`` has the bytes of the layers, where they matter."""
        assert self.costs is not None, "asked after something was learnt"
        frame = sizes or Profile(tuple(LayerCost(f"layer {i}", 0, 0, 0, 0, 0) for i in range(len(self.costs))))
        layers = [
            replace(layer, forward=forward, input_grad=input_grad, weight_grad=weight_grad)
            for layer, (forward, input_grad, weight_grad) in zip(frame.layers, self.costs.tolist(), strict=True)
        ]
        return replace(frame, layers=tuple(layers))

    def speed(self) -> list[float]:
        """Per rank, for the planner."""
        return [float(1 / slow) for slow in self.slowness]


def _masks(counts: Sequence[int]) -> Array:
    """(stage, layer) → 1 where the stage holds the layer."""
    stages = np.repeat(np.arange(len(counts)), counts)
    masks: Array = (stages[None, :] == np.arange(len(counts))[:, None]).astype(np.float64)
    return masks
