"""The names that a config may hold: all that are wrong are said at once, before any rank starts. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection

from vpipe.data import catalog as data
from vpipe.registry import DATASET_REGISTRY, MODEL_REGISTRY, OPTIMIZER_REGISTRY
from vpipe.schedule import catalog


def _schedules() -> list[str]:
    return [name for entry in catalog.entries() for name in (entry.name, *entry.aliases)]


KNOWN: dict[str, Callable[[], Collection[str]]] = {
    "parallel.scheduler": _schedules,
    "training.optimizer": OPTIMIZER_REGISTRY.list_registered,
    "model.name": MODEL_REGISTRY.list_registered,
    "dataset.name": lambda: [*DATASET_REGISTRY.list_registered(), *data.ALIASES],
}
"""Key → the names that it may have, once the config's plugins are imported."""
