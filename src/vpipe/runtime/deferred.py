"""Input gradients now, weight gradients later.

A zero-bubble schedule runs ``I`` as soon as a gradient arrives and fills idle time with ``W``. Autograd computes both
at once, so modules that hold almost all weights (Linear, Embedding, convolutions, LayerNorm) run with weights that
autograd takes for constants. A hook on their output leaves the weight gradient in a queue:

    I   dx = dy @ weight            by autograd; the hook queues (x, dy)
    W   weight.grad += dy.T @ x     queue: empty

A hook costs less than half of an ``autograd.Function`` written in Python, which matters for small microbatches.

Everything else keeps its ordinary backward: its weight gradients are complete after ``I``, which is correct on every
stage, only not deferred. A module of the user's may take part by defining ``deferred_forward(*args, defer)``: it calls
``defer(fn)`` in its backward with a function that accumulates the weight gradient.

The products are the ones autograd itself would compute, so the split changes no bit. ``fused`` accumulates inside the
product (``addmm``), which is faster and may differ in the last bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from vpipe.runtime.luggage import Luggage, Saved

Work = Callable[[], None]


class WeightQueue:
    """Weight gradients that wait for their ``W``; outside of a backward they are computed at once."""

    def __init__(self, fused: bool = False) -> None:
        self.fused = fused
        self._open: list[tuple[Work, tuple[Tensor, ...]]] | None = None
        self._waiting: dict[int, list[tuple[Work, tuple[Tensor, ...]]]] = {}
        self._sums: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.luggage: Luggage | None = None
        """Where the forward that runs now puts what it saves, if that may be swapped out."""

    def save(self, tensor: Tensor) -> Saved:
        """A tensor that a weight gradient needs later. Autograd does not know of it, so its version is checked here."""
        return Saved(tensor, None) if self.luggage is None else self.luggage.pack(tensor)

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
        with torch.no_grad():
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
    if gradient.dtype is not parameter.dtype:
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
    return torch.is_grad_enabled() and _ends(module.weight) and (module.bias is None or _ends(module.bias))


def _ends(weight: Tensor) -> bool:
    return weight.is_leaf and not weight._backward_hooks and not weight._post_accumulate_grad_hooks


def _autocast(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _constant(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.detach()


Product = Callable[[Tensor], None]
"""Adds to the gradients of a module's weights, given the gradient of its output."""


def _tapped(y: Tensor, queue: WeightQueue, product: Product, *parameters: Tensor | None) -> Tensor:
    """``y``, whose gradient goes into the queue as soon as a backward has it."""
    held = [parameter for parameter in parameters if parameter is not None]

    def tap(gradients: Sequence[Tensor | None]) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError("weight gradients that wait for W cannot be differentiated again")
        if gradients[0] is not None:
            queue.defer(partial(product, gradients[0]), *held)

    if y.grad_fn is None:
        y = _Source.apply(torch.empty(0, requires_grad=True), [y.data], tap)  # type: ignore[no-untyped-call]
    else:
        y.grad_fn.register_prehook(tap)
    return y


class _Source(torch.autograd.Function):
    """An output that depends on no input that needs a gradient; ``anchor`` makes it need one.

    ``made`` holds the output and is no argument of autograd's: an output that is a view, or an input, of a ``Function``
    may not be changed in place by the next module.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, made: list[Tensor], tap: Callable[[Sequence[Tensor | None]], None]) -> Tensor:
        ctx.tap = tap
        return made.pop()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, ...]:
        ctx.tap((dy,))
        return None, None, None


def _linear(queue: WeightQueue, module: nn.Linear, x: Tensor) -> Tensor:
    if not x.is_contiguous() or not _may_wait(module):  # for other strides autograd picks other products
        return nn.Linear.forward(module, x)
    weight, bias = module.weight, module.bias
    if (dtype := _autocast(x)) is not None:
        x = x.to(dtype)
    y = functional.linear(x, weight.detach(), _constant(bias))
    held = queue.save(x)

    def product(dy: Tensor) -> None:
        dy = dy.reshape(-1, dy.shape[-1])
        if weight.requires_grad:
            rows = held.get()
            rows = rows.reshape(-1, rows.shape[-1])
            if queue.may_fuse(weight, dy.dtype):
                assert weight.grad is not None, "only an existing gradient is added to"
                weight.grad.addmm_(dy.t(), rows)
            else:
                queue.add(weight, dy.t().mm(rows))
        if bias is not None and bias.requires_grad:
            queue.add(bias, dy.sum(0))

    return _tapped(y, queue, product, weight, bias)


def _embedding(queue: WeightQueue, module: nn.Embedding, index: Tensor) -> Tensor:
    weight = module.weight
    if not torch.is_grad_enabled() or not _ends(weight):
        return nn.Embedding.forward(module, index)
    padding = -1 if module.padding_idx is None else module.padding_idx
    held = queue.save(index)

    def product(dy: Tensor) -> None:
        backward = torch.ops.aten.embedding_dense_backward
        queue.add(weight, backward(dy, held.get(), weight.shape[0], padding, False))

    return _tapped(functional.embedding(index, weight.detach()), queue, product, weight)


def _layer_norm(queue: WeightQueue, module: nn.LayerNorm, x: Tensor) -> Tensor:
    if not _may_wait(module):
        return nn.LayerNorm.forward(module, x)
    if _autocast(x) is not None:
        x = x.float()
    weight, bias, shape = module.weight, module.bias, list(module.normalized_shape)
    y, *moments = torch.native_layer_norm(x, shape, weight.detach(), _constant(bias), module.eps)
    held, (mean, rstd) = queue.save(x), [moment.detach() for moment in moments]

    def product(dy: Tensor) -> None:
        wanted = [False, weight.requires_grad, bias is not None and bias.requires_grad]
        backward = torch.ops.aten.native_layer_norm_backward
        _, dw, db = backward(dy, held.get(), shape, mean, rstd, weight, bias, wanted)
        _add(queue, [(weight, dw), (bias, db)], wanted[1:])

    return _tapped(y, queue, product, weight, bias)


def _convolution(queue: WeightQueue, module: Any, x: Tensor) -> Tensor:
    if not _may_wait(module) or _autocast(x) is not None or x.dim() != len(module.stride) + 2:
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    weight, bias = module.weight, module.bias
    form = (module.stride, module.padding, module.dilation, False, [0] * len(module.stride), module.groups)
    y = torch.convolution(x, weight.detach(), _constant(bias), *form)
    held, sizes = queue.save(x), None if bias is None else list(bias.shape)

    def product(dy: Tensor) -> None:
        wanted = [False, weight.requires_grad, bias is not None and bias.requires_grad]
        _, dw, db = torch.ops.aten.convolution_backward(dy, held.get(), weight, sizes, *form, wanted)
        _add(queue, [(weight, dw), (bias, db)], wanted[1:])

    return _tapped(y, queue, product, weight, bias)


def _add(queue: WeightQueue, found: Iterable[tuple[Tensor, Tensor]], wanted: Iterable[bool]) -> None:
    for (parameter, gradient), is_wanted in zip(found, wanted, strict=True):
        if is_wanted:
            queue.add(parameter, gradient)


_SPLIT: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: _linear,
    nn.Embedding: _embedding,
    nn.LayerNorm: _layer_norm,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
}
