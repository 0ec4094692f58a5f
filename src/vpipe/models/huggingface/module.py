"""Any module as a list of layers: its own submodules, in place, called by its own forward.

    Pipeline(net, loss_fn, example=batch)

The way is that of the library's models: the forward runs a few times with stand-ins, which shows what every block reads
and writes. Only where blocks are looked for differs: in lists, in dicts, and in chains that hold a part of the weights
worth a cut; a module without any is cut between the submodules that it calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from vpipe.errors import UserError
from vpipe.layer import Layer, TiedWeight
from vpipe.models.huggingface.cut import varied
from vpipe.models.huggingface.entry import cut_layers, tried
from vpipe.models.huggingface.tasks import ModelTask


def cut_module(model: nn.Module, example: Any) -> tuple[list[Layer], tuple[TiedWeight, ...]]:
    """The layers of a module and its tied weights. ``example`` is a batch: a mapping of the forward's arguments, or
    what its first argument is; tensors have the example in their first dimension."""
    if example is None:
        raise UserError(
            f"a {type(model).__name__} is cut by running its forward: give Pipeline(model, loss_fn, example=inputs), a "
            "batch as train_step gets it, or a list of its layers"
        )
    given = _arguments(model, example)
    shorter, rows, other = varied(given)
    task = ModelTask("plain", names=tuple(given))
    return cut_layers(tried(model, task, [(given, rows, other), (given, shorter, other)]))


def _arguments(model: nn.Module, example: Any) -> Mapping[str, Any]:
    if isinstance(example, Mapping):
        return example
    names = [*inspect.signature(model.forward).parameters]
    if not names or not isinstance(example, Tensor):
        raise UserError(
            f"the example of a {type(model).__name__} must be a tensor, or a dict of its forward's arguments "
            f"({', '.join(names)}), as train_step gets it"
        )
    return {names[0]: example}
