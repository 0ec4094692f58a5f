"""Data: what the first stage reads and what the last stage compares with.

Only these two stages touch a data set, each by itself: both hold the same ``BatchOrder``, so batch ``n`` of an epoch
is the same examples on both, and no label has to travel through the stages between them.

    data = vpipe.data.load("code_search_net", path="data/code", sequence_length=128)
    order = data.order(batch_size=32, seed=1)
    for indices in order.batches(epoch=0):
        batch = data.batch(indices)                    # batch.inputs, batch.targets, batch.num_tokens

Importing this package costs nothing: torch, h5py and tokenizers are loaded when a data set that needs them is.

Words: docs/glossary.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vpipe.data.builders import build
    from vpipe.data.dataset import Batch, DataSet, load
    from vpipe.data.manifest import Manifest
    from vpipe.data.order import BatchOrder

_HOMES = {
    "Batch": "vpipe.data.dataset",
    "BatchOrder": "vpipe.data.order",
    "DataSet": "vpipe.data.dataset",
    "Manifest": "vpipe.data.manifest",
    "build": "vpipe.data.builders",
    "load": "vpipe.data.dataset",
}

__all__ = ["Batch", "BatchOrder", "DataSet", "Manifest", "build", "load"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'vpipe.data' has no attribute {name!r}")
