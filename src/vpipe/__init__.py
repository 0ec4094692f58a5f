"""Pipeline-parallel training for any PyTorch model, with an answer before the job is queued.

Importing ``vpipe`` costs nothing: the names that need torch are loaded when they are first used, so that ``vpipe
--help``, ``vpipe simulate`` and ``vpipe plan`` answer at once on a login node.

Words: docs/glossary.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from vpipe.errors import UserError
    from vpipe.layer import Layer, add_loss
    from vpipe.runtime.microbatches import Microbatches
    from vpipe.runtime.pipeline import Pipeline

_HOMES = {
    "Layer": "vpipe.layer",
    "Microbatches": "vpipe.runtime.microbatches",
    "Pipeline": "vpipe.runtime.pipeline",
    "UserError": "vpipe.errors",
    "add_loss": "vpipe.layer",
}

__all__ = ["Layer", "Microbatches", "Pipeline", "UserError", "__version__", "add_loss"]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'vpipe' has no attribute {name!r}")
