"""What is different about a run that goes on from another one's checkpoint with another config: a row for each key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from vpipe.config.problems import short
from vpipe.errors import UserError

NOTHING = ""
"""The same weights to the bit, or nothing that training knows of."""
RATE = "the learning rate is that of the new config at the same progress"
LENGTH = "the learning rate is that of the new length at the same progress"
BATCHES = "an update has other examples; the data go on at the same one"
UPDATES = "updates are made in another way from here on"
WHEN = "weights are updated at other moments, where the schedule is asynchronous"
SUMS = "sums are made in another order"
COMPILER = "the compiler rounds differently"
OF_A_RUN = ("model.", "dataset.", "training.")
"""The sections that say what is trained."""

EFFECTS: dict[str, str] = {
    "model.compile": COMPILER,
    "model.directory": NOTHING,
    "dataset.batch_size": BATCHES,
    "dataset.max_tokens": BATCHES,
    "dataset.num_workers": NOTHING,
    "dataset.read_by": NOTHING,
    "dataset.may_differ": NOTHING,
    "dataset.test_size": "other examples are held out; some of them have been trained on",
    "training.learning_rate*": RATE,
    "training.minimum_learning_rate": RATE,
    "training.warmup": RATE,
    "training.epochs": LENGTH,
    "training.max_iterations": LENGTH,
    "training.num_microbatches": SUMS,
    "training.gradient_accumulation": BATCHES,
    "training.seed": "the order of the data and dropout change from here on",
    "training.*profile*": NOTHING,
    "training.*nan*": NOTHING,
    "training.patience": NOTHING,
    "training.evaluation_batches": NOTHING,
    "training.optimizer": "the optimizer's state is left out; an average of the weights begins here",
    "training.ema": "the average of the weights goes on with this decay, or begins here",
    "training.precision": "the number format of the computation, and the loss scale begins anew",
    "training.loss_scale": "the loss scale begins anew",
    "training.evaluation_interval": WHEN,
    "parallel.scheduler": WHEN,
    "parallel.data_parallel_size": BATCHES,
    "parallel.replicas": BATCHES,
    "parallel.model_parallel_size": WHEN,
    "parallel.stages_per_rank": WHEN,
    "parallel.schedule_options": WHEN,
    "parallel.device": "another device rounds differently",
    "parallel.exact_reduction": SUMS,
    "checkpoint.interval": WHEN,
    "model.*": "the layers compute something else",  # where it changes a weight's shape it is refused: another model
    "dataset.*": "other examples are read",
    "training.*": UPDATES,
    "*": NOTHING,
}
"""Keys → what follows where one is another, said or ``NOTHING``; the first row that matches counts."""


def effect_of(key: str) -> str:
    """The row of a key."""
    return next(effect for pattern, effect in EFFECTS.items() if fnmatchcase(key, pattern))


def told(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs and does something, key by key with both values; empty where nothing does."""
    idle = {NOTHING} | ({WHEN} if _synchronous(before) and _synchronous(now) else set())
    idle |= {LENGTH} if _is_level(before) and _is_level(now) else set()
    found: dict[str, list[str]] = {}
    for key, old, new in _differing(before, now):
        if (effect := effect_of(key)) not in idle:
            found.setdefault(effect, []).append(f"{key} {short(old)} → {short(new)}")
    return "; ".join(f"{', '.join(changes)}: {effect}" for effect, changes in found.items())


def another(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first value that makes it another run and not a later part of the same one; empty where there is none. Where
    and how it runs, which the other sections say, may differ."""
    same = (NOTHING, LENGTH, WHEN, COMPILER)
    for key, old, new in _differing(before, now):
        if key.startswith(OF_A_RUN) and (key == "model.directory" or effect_of(key) not in same):
            return f"{key} is {old} there and {new} here"
    return ""


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(key, old value, new value), where the other config has the key, too."""
    for section, values in now.items():
        known = before.get(section)
        if isinstance(known, dict) and isinstance(values, dict):
            for name in (name for name in values if name in known):
                old, new = known[name], values[name]
                if old != new and not (name == "vocab_size" and -1 in (old, new)):  # one of them asks the data set
                    yield f"{section}.{name}", old, new


def _is_level(config: Mapping[str, Any]) -> bool:
    """Whether its learning rate does not depend on how long it is."""
    training = config.get("training", {})
    return training.get("learning_rate_policy") == "constant" and not training.get("warmup")


def _synchronous(config: Mapping[str, Any]) -> bool:
    from vpipe.schedule import catalog  # all schedules, where a run goes on from another

    try:
        return not catalog.get(config["parallel"]["scheduler"]).asynchronous
    except (KeyError, TypeError, UserError):
        return False
