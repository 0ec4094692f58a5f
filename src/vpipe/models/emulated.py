"""Emulated devices: layers that sleep instead of computing, so that eight real ranks fit on two cores.

What is left when the work costs no processor is the pipeline itself: its bubbles and the runtime's overhead. A sleeping
layer is still a layer that can be checked: it multiplies by a weight, so that a wrong order, a lost gradient or a wrong
weight version shows in the numbers. The arithmetic happens inside the time that is slept.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor, nn

from vpipe.errors import UserError
from vpipe.layer import Layer
from vpipe.models.losses import SquaredError
from vpipe.models.model import Model, positive, seed_layers

Gradients = tuple[Tensor | None, ...]
_PR_SET_TIMERSLACK = 29


class _Lateness(threading.local):
    """By how much the kernel wakes this thread too late, in seconds.

    To save power it may be late by the thread's slack, 50 µs unless it is told otherwise, and takes some more to wake.
    A device takes its time to the microsecond and no processor of the host, so a thread that emulates one asks for no
    slack: what is left is short enough to be waited for awake.
    """

    def __init__(self) -> None:
        try:
            told = ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0) == 0  # of this thread alone
        except (AttributeError, OSError):  # no Linux
            told = False
        self.seconds = 60e-6 if told else 150e-6


_lateness = _Lateness()


def sleep_until(deadline: float) -> None:
    """Returns at ``deadline`` on the clock of ``perf_counter``, to some microseconds where a core is free; what the
    kernel might be late by is not slept, but yields the core."""
    remaining = deadline - perf_counter() - _lateness.seconds
    if remaining > 0:
        sleep(remaining)
    while perf_counter() < deadline:
        os.sched_yield()  # also hands over the interpreter lock, for ranks that are threads


class _Slept(torch.autograd.Function):
    """``y = x * weight``, whose backward takes ``input_grad + weight_grad`` seconds.

    The input gradient's time passes also where no input gradient is needed: the first stage of an emulated pipeline
    costs what the others cost. Where a schedule separates I and W, the weight gradient's time is slept in W.
    """

    deferrable = (1,)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: SleepLayer) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return x * weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        start = perf_counter()
        layer: SleepLayer = ctx.layer
        defer: Callable[[Callable[[], Gradients]], None] | None = getattr(ctx, "defer", None)
        x, weight = ctx.saved_tensors
        dx = dy * weight if ctx.needs_input_grad[0] else None
        if defer is None:
            dw = weight_gradient(x, dy, weight) if ctx.needs_input_grad[1] else None
            sleep_until(start + layer.input_grad_seconds + layer.weight_grad_seconds)
            return dx, dw, None
        defer(partial(later, x.detach(), dy, weight.detach(), layer.weight_grad_seconds))
        sleep_until(start + layer.input_grad_seconds)
        return dx, None, None


def weight_gradient(x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the one number by which a ``SleepLayer`` multiplies."""
    return (x * dy).sum().reshape(weight.shape)


def later(x: Tensor, dy: Tensor, weight: Tensor, seconds: float) -> Gradients:
    """The deferred half of the backward, which takes ``seconds``."""
    start = perf_counter()
    gradient = weight_gradient(x, dy, weight)
    sleep_until(start + seconds)
    return None, gradient


class SleepLayer(nn.Module):
    """A layer that takes these seconds for forward, input gradient and weight gradient of a microbatch."""

    vpipe_thread_safe = True

    def __init__(self, forward: float, input_grad: float, weight_grad: float) -> None:
        super().__init__()
        if min(forward, input_grad, weight_grad) < 0:
            raise UserError(
                f"a SleepLayer cannot take {min(forward, input_grad, weight_grad)} seconds; give times of at least 0"
            )
        self.forward_seconds, self.input_grad_seconds, self.weight_grad_seconds = forward, input_grad, weight_grad
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        # The sleep is out here, so that autograd's bookkeeping, slow on a core that has just slept, is inside its time.
        start = perf_counter()
        y: Tensor = _Slept.apply(floating(x), self.weight, self)  # type: ignore[no-untyped-call]
        sleep_until(start + self.forward_seconds)
        return y

    def extra_repr(self) -> str:
        return f"{self.forward_seconds}, {self.input_grad_seconds}, {self.weight_grad_seconds}"


def floating(x: Tensor) -> Tensor:
    """Tokens of a synthetic data set become numbers; numbers stay."""
    return x if x.is_floating_point() else x.float()


def emulated(
    *,
    num_layers: int = 4,
    forward: float | Sequence[float] = 0.02,
    input_grad: float | Sequence[float] = 0.02,
    weight_grad: float | Sequence[float] = 0.02,
    hidden_size: int = 16,
    sequence_length: int = 1,
    vocab_size: int = 1,
    seed: int = 0,
) -> Model:
    """``num_layers`` sleeping layers; times are seconds of one layer for one microbatch, one for all or a list with one
    each.

    The input is a tensor of any shape, the targets one of the same shape; the loss is the mean squared difference.
    """
    positive(num_layers=num_layers, hidden_size=hidden_size)
    times = [
        per_layer("forward", forward, num_layers),
        per_layer("input_grad", input_grad, num_layers),
        per_layer("weight_grad", weight_grad, num_layers),
    ]
    layers = [
        Layer(partial(SleepLayer, *seconds), name=f"sleep {index}", cost_key=f"sleep {seconds}")
        for index, seconds in enumerate(zip(*times, strict=True))
    ]
    return Model(
        layers=seed_layers(layers, seed),
        loss=SquaredError(),
        sequence_length=sequence_length,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
    )


def per_layer(name: str, seconds: float | Sequence[float], num_layers: int) -> list[float]:
    """One time per layer."""
    if isinstance(seconds, int | float):
        return [float(seconds)] * num_layers
    if len(seconds) != num_layers:
        raise UserError(
            f"model.{name} lists {len(seconds)} times for {num_layers} layers; give one number or one per layer"
        )
    return [float(value) for value in seconds]
