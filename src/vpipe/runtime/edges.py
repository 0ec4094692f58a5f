"""How values enter and leave a graph of autograd's, how it runs backward, and what it is told of their fate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge, increment_version

from vpipe.runtime.flow import Value
from vpipe.runtime.transport.crossing import flatten, unflatten

_alias: Any = torch.ops.aten._unsafe_view.default._op
_pieces = torch.unsafe_split
Roots = Sequence[GradientEdge]
Gradients = list[Tensor | None]
_NO_MORE = (None,)
"""What a hook passes on where a gradient has come to its end."""
Pending = dict[Value, list[tuple[int, Gradients]]]
"""Value → (reading layer, gradients of the value's tensors that need one) of every reader so far."""


def entrance(leaf: Tensor, gradients: Gradients, index: int) -> Tensor:
    """The data of a leaf for a layer; its gradient goes to ``gradients[index]``, with the strides it has, and no
    further: the leaf keeps none.

    For autograd the result is neither a leaf nor a view of one, so it may be changed in place: it is the leaf cut
    into one piece, with the same strides. (What has no rows cannot be cut; the operation for that takes longer, and
    may choose another stride for a size of 1.)
    """
    length = leaf.shape[0] if leaf.dim() else 0
    inner: Tensor = _pieces(leaf, length)[0] if length else _alias(leaf, list(leaf.shape))

    def take(found: Sequence[Tensor | None]) -> tuple[None]:
        gradients[index] = found[0]
        return _NO_MORE

    assert inner.grad_fn is not None, "a view of a leaf that needs a gradient has a node"
    inner.grad_fn.register_prehook(take)
    return inner


def edge_of(tensor: Tensor) -> GradientEdge:
    """``get_gradient_edge`` of a tensor that needs a gradient; most are results of torch's own operations."""
    node: Any = tensor.grad_fn
    if node is None or not torch.is_grad_enabled():
        return get_gradient_edge(tensor)
    # A node in Python does not keep its graph; the node of a view of what it gave does.
    keeper = tensor.view_as(tensor).grad_fn if isinstance(node, FunctionCtx) else None
    return GradientEdge(node, tensor.output_nr, keeper)


def run_backward(roots: Roots, gradients: Sequence[Tensor], inputs: Sequence[GradientEdge] = ()) -> None:
    """``torch.autograd.backward`` without its checks of what the engine has made itself: they cost more than a small
    layer's backward. With ``inputs``, only what leads to these nodes runs.

    On the host the backward runs in this thread, so the engine needs no copy of its context."""
    run: Any = Variable._execution_engine.run_backward if gradients[0].is_cpu else _engine_run_backward
    run(tuple(roots), tuple(gradients), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=True)


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


def listed(values: Sequence[Value], pending: Pending) -> tuple[Any, ...]:
    """The gradients of these values as a message: of each value the number of its readers, and of each reader its
    layer, the number of its gradients, and they themselves. (What is flat is described, packed and read fastest.)"""
    found: list[Any] = []
    for value in values:
        readers = pending.get(value, ())
        found.append(len(readers))
        for layer, gradients in readers:
            found.append(layer)
            found.append(len(gradients))
            found.extend(gradients)
    return tuple(found)


def unlisted(values: Sequence[Value], message: Sequence[Any], pending: Pending) -> None:
    """Put what a message of ``listed`` says into ``pending``."""
    at = 0
    for value in values:
        num_readers = message[at]
        at += 1
        readers = pending.setdefault(value, [])
        for _ in range(num_readers):
            begin = at + 2
            at = begin + message[begin - 1]
            readers.append((message[begin - 2], list(message[begin:at])))


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
