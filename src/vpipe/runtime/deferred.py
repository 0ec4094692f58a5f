"""Input gradients now, weight gradients later.

A zero-bubble schedule runs ``I`` as soon as a gradient arrives and fills idle time with ``W``. Autograd computes both
at once, so modules that hold almost all weights (Linear, Embedding, convolutions, LayerNorm) get a backward that yields
the input gradient and leaves the weight gradient in a queue:

    I   dx = dy @ weight            queue: (x, dy)
    W   weight.grad += dy.T @ x     queue: empty

Everything else keeps its ordinary backward: its weight gradients are complete after ``I``, which is correct on every
stage, only not deferred. A module of the user's may take part by defining ``deferred_forward(*args, defer)``: it calls
``defer(fn)`` in its backward with a function that accumulates the weight gradient.

The products are the ones autograd itself would compute, so the split changes no bit. ``fused`` accumulates inside the
product (``addmm``), which is faster and may differ in the last bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Work = Callable[[], None]


class WeightQueue:
    """Weight gradients that wait for their ``W``; outside of a backward they are computed at once."""

    def __init__(self, fused: bool = False) -> None:
        self.fused = fused
        self._open: list[tuple[Work, tuple[Tensor, ...]]] | None = None
        self._waiting: dict[int, list[tuple[Work, tuple[Tensor, ...]]]] = {}
        self._sums: dict[int, tuple[Tensor, Tensor | None]] = {}

    def defer(self, work: Work, *parameters: Tensor) -> None:
        """``work`` adds to the gradients of ``parameters``."""
        if self._open is None:
            work()
        else:
            self._open.append((work, parameters))

    def open(self, microbatch: int) -> None:
        """From here on, what is deferred belongs to this microbatch."""
        self._open = self._waiting.setdefault(microbatch, [])

    def close(self) -> None:
        self._open = None

    @torch.no_grad()
    def run(self, microbatch: int) -> None:
        """Compute what the microbatch has deferred, in the order of the backward.

        A parameter that the unit used several times gets their sum at once, as autograd gives it. Outside of a backward
        autograd would record these products, and keep x and dy alive with the gradient.
        """
        works = self._waiting.pop(microbatch)
        seen: set[int] = set()
        for _, parameters in works:
            for parameter in parameters:
                if id(parameter) in seen:
                    self._sums[id(parameter)] = (parameter, None)
                seen.add(id(parameter))
        for work, _ in works:
            work()
        for parameter, total in self._sums.values():
            if total is not None:
                accumulate(parameter, total)
        self._sums.clear()

    def may_fuse(self, parameter: Tensor, dtype: torch.dtype) -> bool:
        """Whether the product may be added into the gradient as it is computed."""
        return (
            self.fused
            and parameter.grad is not None
            and parameter.grad.dtype == dtype
            and id(parameter) not in self._sums
        )

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """One use's part of the unit's gradient."""
        if id(parameter) not in self._sums:
            accumulate(parameter, gradient)
            return
        before = self._sums[id(parameter)][1]
        self._sums[id(parameter)] = (parameter, gradient if before is None else before + gradient)

    def clear(self) -> None:
        """Forget everything: the step has failed."""
        self._open = None
        self._waiting.clear()
        self._sums.clear()


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """What autograd does with a gradient of a leaf."""
    gradient = gradient.to(parameter.dtype)
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def install(modules: Iterable[nn.Module], queue: WeightQueue) -> None:
    """Give every module that can be split its split backward.

    A parameter that several modules hold is left to autograd, which alone knows the order of all its uses.
    """
    parts = list({id(part): part for module in modules for part in module.modules()}.values())
    holders = Counter(id(parameter) for part in parts for parameter in part.parameters(recurse=False))
    for part in parts:
        own = list(part.parameters(recurse=False))
        if hasattr(part, "deferred_forward"):
            forward: Any = part.deferred_forward
            part.forward = partial(forward, defer=queue.defer)
        elif (
            type(part) in _SPLIT
            and any(parameter.requires_grad for parameter in own)
            and all(holders[id(parameter)] == 1 for parameter in own)
            and _plain(part)
        ):
            part.forward = MethodType(partial(_SPLIT[type(part)], queue), part)


def _plain(module: nn.Module) -> bool:
    """Whether the module uses no option that our backward leaves out."""
    if isinstance(module, nn.Embedding):
        return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return module.padding_mode == "zeros" and not isinstance(module.padding, str)
    if isinstance(module, nn.LayerNorm):
        return module.elementwise_affine
    return True


def _may_wait(module: Any) -> bool:
    """Whether gradients end at the module's weights: those of a weight norm, for example, go on to what it is made of,
    and a hook wants to see a gradient when autograd has it."""
    return _ends(module.weight) and (getattr(module, "bias", None) is None or _ends(module.bias))


def _ends(weight: Tensor) -> bool:
    return weight.is_leaf and not weight._backward_hooks and not weight._post_accumulate_grad_hooks


def _autocast(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, queue: WeightQueue, dtype: torch.dtype | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.queue, ctx.dtype = bias, queue, dtype
        if dtype is not None:
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, dy_rows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        bias, queue = ctx.bias, ctx.queue

        def work() -> None:
            if weight.requires_grad:
                if queue.may_fuse(weight, dy_rows.dtype):
                    weight.grad.addmm_(dy_rows.t(), rows)
                else:
                    queue.add(weight, dy_rows.t().mm(rows))
            if bias is not None and bias.requires_grad:
                queue.add(bias, dy_rows.sum(0))

        dx = None
        if ctx.needs_input_grad[0]:
            dx = dy_rows.mm(weight if ctx.dtype is None else weight.to(ctx.dtype)).view_as(x)
        queue.defer(work, weight, *([] if bias is None else [bias]))
        return dx, None, None, None, None


def _linear(queue: WeightQueue, module: nn.Linear, x: Tensor) -> Tensor:
    if not _may_wait(module) or not x.is_contiguous():  # for other strides autograd picks other products
        return nn.Linear.forward(module, x)
    dtype = _autocast(x)
    return _Linear.apply(x if dtype is None else x.to(dtype), module.weight, module.bias, queue, dtype)  # type: ignore[no-any-return, no-untyped-call]


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: Tensor, padding: int, queue: WeightQueue) -> Tensor:
        ctx.save_for_backward(index, weight)
        ctx.padding, ctx.queue = padding, queue
        return functional.embedding(index, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, ...]:
        index, weight = ctx.saved_tensors
        backward = torch.ops.aten.embedding_dense_backward
        queue, padding = ctx.queue, ctx.padding
        queue.defer(lambda: queue.add(weight, backward(dy, index, weight.shape[0], padding, False)), weight)
        return None, None, None, None


def _embedding(queue: WeightQueue, module: nn.Embedding, index: Tensor) -> Tensor:
    if not _may_wait(module):
        return nn.Embedding.forward(module, index)
    padding = -1 if module.padding_idx is None else module.padding_idx
    return _Embedding.apply(index, module.weight, padding, queue)  # type: ignore[no-any-return, no-untyped-call]


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, module: nn.LayerNorm, queue: WeightQueue
    ) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, list(module.normalized_shape), weight, bias, module.eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias, ctx.shape, ctx.queue = bias, list(module.normalized_shape), queue
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        bias, queue = ctx.bias, ctx.queue
        backward = partial(torch.ops.aten.native_layer_norm_backward, dy, x, ctx.shape, mean, rstd, weight, bias)

        def work() -> None:
            wanted = [False, weight.requires_grad, bias is not None and bias.requires_grad]
            _, dw, db = backward(wanted)
            if wanted[1]:
                queue.add(weight, dw)
            if wanted[2]:
                queue.add(bias, db)

        dx = backward([True, False, False])[0] if ctx.needs_input_grad[0] else None
        queue.defer(work, weight, *([] if bias is None else [bias]))
        return dx, None, None, None, None


def _layer_norm(queue: WeightQueue, module: nn.LayerNorm, x: Tensor) -> Tensor:
    if not _may_wait(module):
        return nn.LayerNorm.forward(module, x)
    if _autocast(x) is not None:
        x = x.float()
    return _LayerNorm.apply(x, module.weight, module.bias, module, queue)  # type: ignore[no-any-return, no-untyped-call]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, module: Any, queue: WeightQueue) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.module, ctx.queue = bias, module, queue
        return torch.convolution(
            x,
            weight,
            bias,
            module.stride,
            module.padding,
            module.dilation,
            False,
            [0] * len(module.stride),
            module.groups,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        bias, module, queue = ctx.bias, ctx.module, ctx.queue
        sizes = None if bias is None else list(bias.shape)
        backward = partial(
            torch.ops.aten.convolution_backward, dy, x, weight, sizes, module.stride, module.padding, module.dilation,
            False, [0] * len(module.stride), module.groups,
        )  # fmt: skip

        def work() -> None:
            wanted = [False, weight.requires_grad, bias is not None and bias.requires_grad]
            _, dw, db = backward(wanted)
            if wanted[1]:
                queue.add(weight, dw)
            if wanted[2]:
                queue.add(bias, db)

        dx = backward([True, False, False])[0] if ctx.needs_input_grad[0] else None
        queue.defer(work, weight, *([] if bias is None else [bias]))
        return dx, None, None, None, None


def _convolution(queue: WeightQueue, module: Any, x: Tensor) -> Tensor:
    if not _may_wait(module) or _autocast(x) is not None or x.dim() != len(module.stride) + 2:
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    return _Convolution.apply(x, module.weight, module.bias, module, queue)  # type: ignore[no-any-return, no-untyped-call]


_SPLIT: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: _linear,
    nn.Embedding: _embedding,
    nn.LayerNorm: _layer_norm,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
}
