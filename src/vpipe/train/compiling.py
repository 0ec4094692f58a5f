"""``model.compile: true``: each layer is compiled by ``torch.compile``, on the rank that owns it.

A layer and not a stage, so that the same kernels run wherever the layer is. What is compiled computes all its
gradients in one piece, so schedules that take the weights' gradients later cannot have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from vpipe.errors import UserError
from vpipe.layer import Layer
from vpipe.schedule.action import Kind
from vpipe.schedule.catalog import ScheduleSpec


def compiled(layers: Sequence[Layer], spec: ScheduleSpec) -> list[Layer]:
    """The layers, compiled when they are built; the compiler itself runs in their first forward and backward."""
    if any(action.kind is Kind.I for _, action in spec.program.actions()):
        raise UserError(
            f"model.compile makes one piece of a layer's backward, but {spec.entry.name} takes the weights' gradients "
            "apart (I, then W); set model.compile: false, or parallel.scheduler to one without W, such as 1f1b"
        )
    return [replace(layer, module=_compiled(layer.module)) for layer in layers]


def _compiled(module: nn.Module | Callable[[], nn.Module]) -> nn.Module | Callable[[], nn.Module]:
    if isinstance(module, nn.Module):
        module.compile()
        return module

    def build() -> nn.Module:
        made = module()
        made.compile()
        return made

    return build
