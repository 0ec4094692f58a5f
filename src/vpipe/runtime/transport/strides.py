"""How a tensor lies in memory after it has crossed a boundary.

Kernels add in another order, and even ``gelu`` rounds otherwise, where strides differ. So a copy that a stage hands to
the next must lie in memory as the original does, or cutting a model would change its last bits:

    x.t()        the order of the dimensions
    x[:, -1]     whether rows follow each other without gaps
    x.expand(…)  which numbers are one, repeated

    x[:, 3:]     where the first number and each row lie within a line of 64 bytes: matrix products ask for that

Gaps shrink to less than a line, because beyond that nobody asks: the last position of a long sequence does not bring
the room of the whole sequence with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
