"""The learning rate as a pure function of the update's number: all stages must use the same rate for the same update,
and a resumed run must go on as if it had never stopped.

    pipe.set_learning_rate(LearningRate(3e-4, "cosine", total=1000, warmup=100))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LearningRate:
    """``rate(n)`` is the rate of update ``n`` of a run that makes ``total``."""

    peak: float
    policy: str = "constant"
    """How it moves after warm-up: one of ``POLICIES``."""
    total: int = 1
    warmup: float = 0.0
    """Updates during which it rises to its peak."""
    lowest: float = 0.0
    """It never falls below this after warm-up."""
    degree: float = 0.5
    """For polynomial."""
    steps: tuple[float, ...] = ()
    """For step: the updates from which on it is multiplied by ``factor`` once more."""
    factor: float = 0.1

    def __call__(self, update: int) -> float:
        if update < self.warmup:
            return self.peak * self._rise(update)
        return max(self.lowest, self.peak * POLICIES[self.policy](self, update))

    def _rise(self, update: int) -> float:
        """BERT's warm-up begins at zero, the others at the first step above it."""
        return (update if self.policy == "polynomial" else update + 1) / max(self.warmup, 1)


def _constant(rate: LearningRate, update: int) -> float:
    return 1.0


def _linear(rate: LearningRate, update: int) -> float:
    return max(0.0, (rate.total - update) / max(1.0, rate.total - rate.warmup))


def _polynomial(rate: LearningRate, update: int) -> float:
    found: float = max(0.0, 1 - update / rate.total) ** rate.degree
    return found


def _cosine(rate: LearningRate, update: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (update - rate.warmup) / max(1.0, rate.total - rate.warmup))))


def _step(rate: LearningRate, update: int) -> float:
    return rate.factor ** sum(update >= place for place in rate.steps)


def _inverse_sqrt(rate: LearningRate, update: int) -> float:
    anchor = max(rate.warmup, 1.0)
    return math.sqrt(anchor / max(update + 1, anchor))


POLICIES: dict[str, Callable[[LearningRate, int], float]] = {
    "constant": _constant,
    "linear": _linear,
    "polynomial": _polynomial,
    "cosine": _cosine,
    "step": _step,
    "inverse_sqrt": _inverse_sqrt,
}
"""Policy → what the peak is multiplied by at an update after warm-up."""
