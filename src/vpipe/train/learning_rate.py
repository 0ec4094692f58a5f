"""The learning rate as a pure function of the update's number.

All stages must use the same rate for the same update, and a resumed run must go on as if it had never stopped. Both
follow when the rate is computed from the number of the update and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from vpipe.config.sections import TrainingConfig

Rate = Callable[[int], float]


def learning_rate(training: TrainingConfig, num_updates: int) -> Rate:
    """The rate of update ``n`` of a run that makes ``num_updates``."""
    total = max(1, num_updates)
    peak, lowest = training.learning_rate, training.minimum_learning_rate
    warmup = _updates(training.warmup, total)
    after = _POLICIES[training.learning_rate_policy](training, total, warmup)

    def rate(update: int) -> float:
        if update < warmup:
            return peak * _rise(training, update, warmup)
        return max(lowest, peak * after(update))

    return rate


def _updates(amount: float, total: int) -> float:
    """Below 1 a share of all updates, else a number of updates."""
    return amount * total if amount < 1 else amount


def _rise(training: TrainingConfig, update: int, warmup: float) -> float:
    """BERT's warm-up begins at zero, the others at the first step above it."""
    return (update if training.learning_rate_policy == "polynomial" else update + 1) / max(warmup, 1)


def _constant(training: TrainingConfig, total: int, warmup: float) -> Rate:
    return lambda update: 1.0


def _linear(training: TrainingConfig, total: int, warmup: float) -> Rate:
    return lambda update: max(0.0, (total - update) / max(1.0, total - warmup))


def _polynomial(training: TrainingConfig, total: int, warmup: float) -> Rate:
    return lambda update: max(0.0, 1 - update / total) ** training.learning_rate_degree


def _cosine(training: TrainingConfig, total: int, warmup: float) -> Rate:
    return lambda update: 0.5 * (1 + math.cos(math.pi * min(1.0, (update - warmup) / max(1.0, total - warmup))))


def _step(training: TrainingConfig, total: int, warmup: float) -> Rate:
    places = [_updates(place, total) for place in training.learning_rate_steps]
    return lambda update: training.learning_rate_factor ** sum(update >= place for place in places)


def _inverse_sqrt(training: TrainingConfig, total: int, warmup: float) -> Rate:
    anchor = max(warmup, 1.0)
    return lambda update: math.sqrt(anchor / max(update + 1, anchor))


_POLICIES: dict[str, Callable[[TrainingConfig, int, float], Rate]] = {
    "constant": _constant,
    "linear": _linear,
    "polynomial": _polynomial,
    "cosine": _cosine,
    "step": _step,
    "inverse_sqrt": _inverse_sqrt,
}
