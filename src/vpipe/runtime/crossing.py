"""What crosses the boundary between two stages, how it lies in memory there, and how its gradient comes back.

A value is any tuple, list or dict of tensors, numbers, strings and ``None``: its structure, and its tensors in order.

Kernels add in another order, and even ``gelu`` rounds otherwise, where strides differ. So a copy that a stage hands to
the next must lie in memory as the original does, or cutting a model would change its last bits:

    x.t()        the order of the dimensions
    x[:, -1]     whether rows follow each other without gaps
    x.expand(…)  which numbers are one, repeated

    x[:, 3:]     where the first number and each row lie within a line of 64 bytes: matrix products ask for that

Gaps shrink to less than a line, because no kernel asks beyond that: the last position of a long sequence does not bring
the room of the whole sequence with it.

Each side of a boundary has a graph of autograd's own. A tensor enters one as a leaf (``entrance``) and leaves it by an
edge (``edge_of``), from which the gradients of all its readers run backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge, increment_version

from vpipe.errors import UserError

NAMED = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in NAMED.items()}
DTYPES = frozenset(_NAMES)
"""Those whose tensors can travel."""

_SCALARS: dict[type, str] = {type(None): "none", bool: "bool", int: "int", float: "float", str: "str"}

ValueForm = tuple[Any, ...]
"""A value without its tensors: nested tuples that hash. ``("T",)`` stands for the next tensor, ``("again", 0)`` for the
first once more: what is one tensor stays one on the other side, with one gradient."""
TENSOR: ValueForm = ("T",)
_PLAIN = frozenset(("none", "bool", "int", "str"))

Sizes = tuple[int, ...]
LINE = 64
"""Bytes within which kernels care where a number lies; torch's memory begins at such lines."""


def shift(tensor: Tensor) -> int:
    """How many elements after the beginning of a line a tensor lies."""
    size = tensor.element_size()
    rest = tensor.data_ptr() % LINE
    return rest // size if rest and rest % size == 0 else 0


def kept_strides(tensor: Tensor) -> Sizes:
    """The strides of a copy."""
    strides = tensor.stride()
    if tensor.is_contiguous():
        return strides
    found = list(strides)  # those of dimensions of size 1 say nothing of memory, but kernels may ask
    line = LINE // tensor.element_size()
    follows, step, reach = 1, 1, 1
    for dimension in sorted(range(tensor.dim()), key=lambda d: (strides[d], -d)):
        stride, extent = strides[dimension], tensor.shape[dimension]
        if extent == 1 or stride == 0:
            continue
        if stride < reach:  # elements overlap: nothing but a plain copy holds them
            return tuple(torch.empty_like(tensor, device="meta").stride())
        found[dimension] = step if stride == follows else step + 1 + (stride - step - 1) % line
        follows, step, reach = stride * extent, found[dimension] * extent, reach + stride * (extent - 1)
    return tuple(found)


def default_strides(shape: Sizes) -> Sizes:
    """Those of a tensor that lies in memory as its dimensions are named, without gaps."""
    found: list[int] = []
    step = 1
    for size in reversed(shape):
        found.append(step)
        step *= max(size, 1)
    return tuple(reversed(found))


def span(shape: Sizes, strides: Sizes) -> int:
    """How many elements of memory a tensor reaches over."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def overlap(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors of one storage have a number in common."""
    if len({tensor.element_size() for tensor in tensors}) > 1:
        return True
    return _overlap(tuple((tuple(t.shape), t.stride(), t.storage_offset()) for t in tensors))


@lru_cache(maxsize=256)
def _overlap(places: tuple[tuple[Sizes, Sizes, int], ...]) -> bool:
    numbers = torch.arange(max(begin + span(shape, strides) for shape, strides, begin in places))
    held = torch.zeros_like(numbers, dtype=torch.bool)
    for place in places:
        mine = numbers.as_strided(*place).flatten()
        if held[mine].any():
            return True
        held[mine] = True
    return False


def fill(slot: Tensor, tensor: Tensor) -> None:
    """Write a tensor into a slot of its strides; a number that is repeated is written once."""
    for dimension, stride in enumerate(slot.stride()):
        if stride == 0 and slot.shape[dimension] > 1:
            slot, tensor = slot.narrow(dimension, 0, 1), tensor.narrow(dimension, 0, 1)
    slot.copy_(tensor.detach(), non_blocking=True)


def copied(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """What a tensor is on the other side of a boundary: the same numbers, lying alike, in memory of their own, on
    another ``device`` if one is given."""
    before = shift(tensor)
    if device is None and not before and tensor.is_contiguous():
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    shape, strides = tuple(tensor.shape), kept_strides(tensor)
    memory = torch.empty(before + span(shape, strides), dtype=tensor.dtype, device=device or tensor.device)
    copy = memory.as_strided(shape, strides, before)
    fill(copy, tensor)
    return copy.requires_grad_(tensor.requires_grad)


def flatten(value: Any, tensors: list[Tensor]) -> ValueForm:
    """The structure of ``value``; its tensors are appended to ``tensors`` in order, each once."""
    kind = type(value)
    if kind is Tensor:
        return _placed(value, tensors)
    if kind is tuple:
        return ("t", *[flatten(part, tensors) for part in value])
    if kind in _SCALARS:
        # 1, 1.0 and True are equal keys of a cache, and a NaN never is: the kind and the exact text tell them apart.
        return (_SCALARS[kind], value.hex() if kind is float else value)
    if kind is list:
        return ("l", *[flatten(part, tensors) for part in value])
    if isinstance(value, Tensor):
        return _placed(value, tensors)
    if isinstance(value, dict) and all(type(key) in (str, int) for key in value):
        return ("d", *[(key, flatten(part, tensors)) for key, part in value.items()])
    raise UserError(
        f"a {type(value).__name__} cannot travel between stages; "
        "pass tensors, numbers, strings, None, or tuples, lists and dicts of them"
    )


def _placed(tensor: Tensor, tensors: list[Tensor]) -> ValueForm:
    for place, other in enumerate(tensors):
        if other is tensor:
            return ("again", place)
    tensors.append(tensor)
    return TENSOR


def check_tensor(tensor: Tensor) -> None:
    """Refuse a tensor whose bytes cannot be sent."""
    if tensor.dtype not in _NAMES:
        name_of(tensor.dtype)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise UserError(
            f"a {str(tensor.layout).removeprefix('torch.')} tensor cannot travel between stages; "
            "return tensor.to_dense()"
        )


def unflatten(structure: ValueForm, tensors: Sequence[Tensor]) -> Any:
    """The value of a structure and its tensors."""
    return _rebuilt(structure, tensors, iter(tensors).__next__)


def _rebuilt(structure: ValueForm, tensors: Sequence[Tensor], take: Callable[[], Tensor]) -> Any:
    kind = structure[0]
    if kind == "T":
        return take()
    if kind == "t":
        return tuple([_rebuilt(part, tensors, take) for part in structure[1:]])
    if kind in _PLAIN:
        return structure[1]
    if kind == "again":
        return tensors[structure[1]]
    if kind == "float":
        return float.fromhex(structure[1])
    if kind == "l":
        return [_rebuilt(part, tensors, take) for part in structure[1:]]
    return {key: _rebuilt(part, tensors, take) for key, part in structure[1:]}


def name_of(dtype: torch.dtype) -> str:
    """What a message calls a dtype; one that cannot travel is refused."""
    if dtype not in _NAMES:
        raise UserError(f"tensors of {dtype} cannot travel between stages; use one of {', '.join(sorted(NAMED))}")
    return _NAMES[dtype]


def copied_value(value: Any) -> Any:
    """A value as it arrives at another stage."""
    return mapped(value, copied)


_alias: Any = torch.ops.aten._unsafe_view.default._op
_pieces = torch.unsafe_split
Roots = Sequence[GradientEdge]
Gradients = list[Tensor | None]
_NO_MORE = (None,)
"""What a hook passes on where a gradient has come to its end."""


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
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors_of(values)]


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a value, each once."""
    tensors: list[Tensor] = []
    flatten(value, tensors)
    return tensors


def tell_change(tensor: Tensor) -> Tensor:
    """Autograd checks versions of what it has saved; an alias has counted a change where the graph that saved it does
    not look."""
    if not tensor.is_inference():
        increment_version(tensor)
    return tensor


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    tensors: list[Tensor] = []
    structure = flatten(value, tensors)
    return unflatten(structure, [change(tensor) for tensor in tensors])


def detached(value: Any) -> Any:
    """The same data outside the graph; which tensors need gradients stays marked."""
    return mapped(value, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))
