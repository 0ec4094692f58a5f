"""What the machine itself allows: the same layers and the same order of actions by a loop of a few lines over pipes.

A message is one copy into memory that both processes have, one byte through a pipe, and one copy out. Nothing is
described, checked, recorded, agreed on or freed in time; every message of a step has memory of its own, so nobody
waits for room. What this loop takes beyond the simulation is sleeping and waking, autograd, and two copies: a runtime
can come near to it, and not below it by more than chance.
"""

from __future__ import annotations

import mmap
import os
import select
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from ctypes import memmove
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vpipe.models.emulated import SleepLayer, sleep_until
from vpipe.schedule.action import Kind
from vpipe.schedule.program import Program


class Ingredients(NamedTuple):
    """What the loop is made of; ``benchmarks/hop/ladder.py`` adds one after the other."""

    copies: bool = True
    """Whether a message is copied in and out; otherwise it is the byte alone."""
    graph: bool = True
    """Whether the layers run under autograd; otherwise their time is slept and nothing computed."""
    poll: float = 0.0
    """Seconds for which whoever waits looks again, giving up its core each time, before it sleeps."""


class Channel:
    """Messages of one direction between two stages; ``path`` is a name that both processes know."""

    def __init__(self, path: Path, num_messages: int, num_bytes: int, ingredients: Ingredients) -> None:
        for make in (lambda: os.mkfifo(f"{path}.pipe"), lambda: Path(f"{path}.memory").touch(exist_ok=False)):
            with suppress(FileExistsError):  # the other process was first
                make()
        self._pipe = os.open(f"{path}.pipe", os.O_RDWR)
        with open(f"{path}.memory", "r+b") as memory:
            os.ftruncate(memory.fileno(), num_messages * num_bytes)
            self._memory = mmap.mmap(memory.fileno(), num_messages * num_bytes)
        self._address: int = np.frombuffer(self._memory, np.uint8).ctypes.data
        self._num_bytes, self._ingredients = num_bytes, ingredients

    def put(self, microbatch: int, tensor: Tensor) -> None:
        if self._ingredients.copies:
            memmove(self._address + microbatch * self._num_bytes, tensor.data_ptr(), self._num_bytes)
        os.write(self._pipe, b".")

    def get(self, microbatch: int) -> Tensor:
        found = torch.empty(1, self._num_bytes // 4)
        self._wait()
        if self._ingredients.copies:
            memmove(found.data_ptr(), self._address + microbatch * self._num_bytes, self._num_bytes)
        return found

    def _wait(self) -> None:
        until = perf_counter() + self._ingredients.poll
        while self._ingredients.poll and perf_counter() < until and not select.select([self._pipe], [], [], 0)[0]:
            os.sched_yield()
        os.read(self._pipe, 1)


class BarePipeline:
    """``train_step(inputs, targets)`` of sleeping layers that map one row of numbers to one row, a stage each."""

    def __init__(
        self,
        layers: Sequence[SleepLayer],
        loss: Callable[[Any, Any], Tensor],
        program: Program,
        rank: int,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        directory: Path,
        num_numbers: int,
        ingredients: Ingredients | None = None,
    ) -> None:
        self._row = [action for action in program.rows[rank] if action.kind in (Kind.F, Kind.B)]
        self._layers, self._loss, self._last = layers, loss, program.num_stages - 1
        held = sorted({stage for stage, _, _ in self._row})
        self._ingredients = ingredients or Ingredients()
        self._optimizer = optimizer([p for stage in held for p in layers[stage].parameters()])
        self._channels = {
            (source, target): Channel(
                directory / f"{source}-{target}", program.num_microbatches, 4 * num_numbers, self._ingredients
            )
            for stage in held
            for source, target in ((stage - 1, stage), (stage, stage - 1), (stage, stage + 1), (stage + 1, stage))
            if min(source, target) >= 0 and max(source, target) <= self._last
        }

    def train_step(self, inputs: Tensor, targets: Tensor) -> None:
        kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for stage, kind, k in self._row:
            if kind is Kind.F:
                x = self._channels[stage - 1, stage].get(k) if stage else inputs[k : k + 1]
                x, y = self._forward(stage, x)
                if stage < self._last:
                    self._channels[stage, stage + 1].put(k, y)
                elif self._ingredients.graph:
                    y = self._loss(y, targets[k : k + 1])
                kept[stage, k] = (x, y)
            else:
                dy = self._channels[stage + 1, stage].get(k) if stage < self._last else None
                dx = self._backward(stage, *kept.pop((stage, k)), dy)
                if stage:
                    self._channels[stage, stage - 1].put(k, dx)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _forward(self, stage: int, x: Tensor) -> tuple[Tensor, Tensor]:
        layer = self._layers[stage]
        if self._ingredients.graph:
            x = x.detach().requires_grad_()
            return x, layer(x)
        sleep_until(perf_counter() + layer.forward_seconds)
        return x, x

    def _backward(self, stage: int, x: Tensor, y: Tensor, dy: Tensor | None) -> Tensor:
        layer = self._layers[stage]
        if not self._ingredients.graph:
            sleep_until(perf_counter() + layer.input_grad_seconds + layer.weight_grad_seconds)
            return x
        torch.autograd.backward(y, dy)
        assert x.grad is not None, "a leaf has a gradient after its backward"
        return x.grad
