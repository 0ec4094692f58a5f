"""What is different about a run that goes on from another one's checkpoint with another config: a row for each key."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from vpipe.config.problems import short
from vpipe.errors import UserError
from vpipe.schedule import catalog

NOTHING = ""
"""The same weights to the bit, or nothing that training knows of."""
RATE = "the learning rate is that of the new config at the same progress"
LENGTH = "the learning rate is that of the new length at the same progress"
BATCHES = "an update has other examples; the data go on at the same one"
UPDATES = "updates are made in another way from here on"
WHEN = "weights are updated at other moments, where the schedule is asynchronous"
SUMS = "sums are made in another order"

EFFECTS: dict[str, str] = {
    "model.compile": "the compiler rounds differently",
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
    "training.evaluation_batches": NOTHING,
    "training.optimizer": "the optimizer's state is left out",
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
    idle = {WHEN} if _synchronous(before) and _synchronous(now) else set()
    idle |= {LENGTH} if _is_level(before) and _is_level(now) else set()
    found: dict[str, list[str]] = {}
    for section, values in now.items():
        old = before.get(section)
        for name, value in values.items() if isinstance(values, dict) else ():
            if not isinstance(old, dict) or name not in old or old[name] == value or _asked(name, old[name], value):
                continue
            effect = effect_of(f"{section}.{name}")
            if effect and effect not in idle:
                found.setdefault(effect, []).append(f"{section}.{name} {short(old[name])} → {short(value)}")
    return "; ".join(f"{', '.join(changes)}: {effect}" for effect, changes in found.items())


def _asked(name: str, old: Any, new: Any) -> bool:
    """Whether one of them asks the data set, which the other has done."""
    return name == "vocab_size" and -1 in (old, new)


def _is_level(config: Mapping[str, Any]) -> bool:
    """Whether its learning rate does not depend on how long it is."""
    training = config.get("training", {})
    return training.get("learning_rate_policy") == "constant" and not training.get("warmup")


def _synchronous(config: Mapping[str, Any]) -> bool:
    try:
        return not catalog.get(config["parallel"]["scheduler"]).asynchronous
    except (KeyError, TypeError, UserError):
        return False
