"""How values enter and leave a graph of autograd's, and what a graph is told of their fate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from vpipe.runtime.transport.wire import flatten, unflatten

_alias: Any = torch.ops.aten._unsafe_view.default._op
Gradients = list[Tensor | None]


def entrance(leaf: Tensor, gradients: Gradients, index: int) -> Tensor:
    """The data of a leaf for a layer; its gradient goes to ``gradients[index]``, with the strides it has.

    For autograd the result is neither a leaf nor a view of one, so it may be changed in place. (For a size of 1 the
    operation may choose another stride, and kernels ask for strides: then a view must do.)
    """
    inner: Tensor = _alias(leaf, list(leaf.shape))  # a list is read faster than a size
    if inner.stride() != leaf.stride():
        inner = leaf.view_as(leaf)

    def take(found: Sequence[Tensor | None]) -> None:
        gradients[index] = found[0]

    assert inner.grad_fn is not None, "a view of a leaf that needs a gradient has a node"
    inner.grad_fn.register_prehook(take)
    return inner


def versions_of(values: Any) -> list[int]:
    """How often each tensor has been changed in place."""
    if type(values) is Tensor:
        return [0 if values.is_inference() else values._version]
    tensors: list[Tensor] = []
    flatten(values, tensors)
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def tell_change(tensor: Tensor) -> Tensor:
    """Autograd checks versions of what it has saved; an alias has counted a change where the graph that saved it does
    not look."""
    if not tensor.is_inference():
        increment_version(tensor)
    return tensor


def summed(readers: list[tuple[int, Gradients]], num_tensors: int) -> Gradients:
    """The sum over a value's readers, latest layer first, of the gradient of each tensor that needs one."""
    if len(readers) == 1 and len(readers[0][1]) == num_tensors:
        return readers[0][1]
    total: Gradients = [None] * num_tensors
    for _, gradients in sorted(readers, key=lambda reader: -reader[0]):
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                before = total[index]
                total[index] = gradient if before is None else before + gradient
    return total


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    tensors: list[Tensor] = []
    structure = flatten(value, tensors)
    changed = iter([change(tensor) for tensor in tensors])
    return unflatten(structure, lambda: next(changed))


def detached(value: Any) -> Any:
    """The same data outside the graph; which tensors need gradients stays marked."""
    return mapped(value, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))
