"""The reference that shares nothing with the engine: plain modules, a plain loop, plain torch.

A checker that imports what it checks agrees with its mistakes. So the rules that a reader needs are stated here a
second time, on purpose, as short as they can be: what a layer reads and writes, from what its random numbers follow,
in which order gradients are added, how tied weights, clipping and a skipped update work. Asynchronous schedules have
weight versions, which one loop over units cannot have; their reference is ``runtime.replay``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from vpipe.layer import Layer, TiedWeight, collecting

UnitSums = Sequence[Sequence[int]]
"""Per replica, the units whose gradients it adds, in order; the replicas' sums are then added."""


@dataclass(frozen=True)
class PlainUnit:
    """One microbatch, and its part of the batch."""

    inputs: Any
    targets: Any
    share: float
    weight: float = 1.0
    """What the batch's gradients are multiplied by."""


def additions(rows: Sequence[Sequence[tuple[int, str, int]]], bounds: Sequence[tuple[int, int]]) -> list[UnitSums]:
    """Per layer, what a program's rows (stage, kind, unit) say about the order of its gradients."""
    found: list[UnitSums] = []
    for stage, (begin, end) in enumerate(bounds):
        holders = [
            [microbatch for other, kind, microbatch in row if other == stage and kind in ("B", "W")] for row in rows
        ]
        found += [sorted((units for units in holders if units), key=min)] * (end - begin)
    return found


class Plain:
    """A model trained by a plain loop. ``modules`` are changed in place."""

    def __init__(
        self,
        layers: Sequence[Layer],
        modules: Sequence[nn.Module],
        loss: Callable[[Any, Any], Tensor],
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        *,
        seed: int,
        tied: Sequence[TiedWeight],
        clip_norm: float | None,
        autocast: Callable[[], AbstractContextManager[Any]],
        scale: float = 1.0,
        first_unit: int = 0,
    ) -> None:
        self._layers, self._modules, self._loss = layers, modules, loss
        self._seed, self._clip_norm, self._autocast, self._scale = seed, clip_norm, autocast, scale
        self._trained = [*modules, loss] if isinstance(loss, nn.Module) else modules
        self.parameters = {
            f"{index}.{name}": p for index, module in enumerate(self._trained) for name, p in module.named_parameters()
        }
        self._owners = [[f"{layer}.{name}" for layer, name in tie.owners] for tie in tied]
        self._optimizer = optimizer([p for p in self.parameters.values() if p.requires_grad])
        self._num_units = first_unit
        self.sums: dict[str, list[Tensor | None]] = {}
        """Parameter → what each replica has added up in the last step."""

    def step(
        self, units: Sequence[PlainUnit], sums: Sequence[UnitSums], learning_rate: float | None, update: bool = True
    ) -> float:
        """One batch, one update; the mean loss. Without ``learning_rate`` the optimizer keeps its own."""
        gradients: list[dict[str, Tensor]] = []
        losses: list[float] = []
        state = torch.get_rng_state()
        for unit in units:
            losses.append(self._unit(unit))
            gradients.append({name: p.grad for name, p in self.parameters.items() if p.grad is not None})
            for parameter in self.parameters.values():
                parameter.grad = None
        torch.set_rng_state(state)
        for name, parameter in self.parameters.items():
            self.sums[name] = [
                _added([gradients[microbatch][name] for microbatch in order if name in gradients[microbatch]])
                for order in sums[min(int(name.split(".", 1)[0]), len(sums) - 1)]
            ]
            parameter.grad = _added([each for each in self.sums[name] if each is not None])
        if update:
            self._update(learning_rate)
        mean = 0.0
        for loss in losses:
            mean += loss
        return mean

    def _unit(self, unit: PlainUnit) -> float:
        """Forward and backward of one microbatch; its part of the mean loss."""
        values = self._named(tree_map_only(Tensor, Tensor.clone, unit.inputs))  # a layer may change its own
        added: list[Tensor] = []
        with self._autocast(), collecting(added):
            for index, (layer, module) in enumerate(zip(self._layers, self._modules, strict=True)):
                torch.manual_seed(_number(self._seed, self._num_units, index))
                result = module(*(values[name] for name in layer.reads))
                values.update(zip(layer.writes, (result,) if len(layer.writes) == 1 else result, strict=True))
            outputs = tuple(values[name] for name in self._layers[-1].writes)
            loss = self._loss(outputs[0] if len(outputs) == 1 else outputs, unit.targets)
        for extra in added:
            loss = loss + extra
        weight = unit.share * (unit.weight * self._scale)
        if loss.requires_grad:
            loss.backward(torch.tensor(weight, dtype=loss.dtype, device=loss.device))  # type: ignore[no-untyped-call]
        self._num_units += 1
        return unit.share * float(loss.detach()) if unit.share else 0.0  # a mean over no label is not a number

    def _named(self, inputs: Any) -> dict[str, Any]:
        """The inputs by the names under which layers read them before any layer writes them."""
        written: set[str] = set()
        names: list[str] = []
        for layer in self._layers:
            names += [name for name in layer.reads if name not in written and name not in names]
            written.update(layer.writes)
        if isinstance(inputs, Mapping) and set(names) <= set(inputs):
            return dict(inputs)
        return dict(zip(names, (inputs,) if len(names) == 1 else inputs, strict=True))

    def _update(self, learning_rate: float | None) -> None:
        for parameter in self.parameters.values():
            if self._scale != 1.0 and parameter.grad is not None:
                parameter.grad /= self._scale
        for owners in self._owners:
            parts = [self.parameters[name] for name in sorted(owners, key=lambda name: -int(name.split(".", 1)[0]))]
            total = _added([p.grad if p.grad is not None else torch.zeros_like(p) for p in parts])
            for parameter in parts:
                parameter.grad = None if total is None else total.clone()
        again = {name for owners in self._owners for name in owners[1:]}
        counted = [p.grad for name, p in self.parameters.items() if name not in again and p.grad is not None]
        norm = nn.utils.get_total_norm(counted)
        if not isfinite(float(norm)):
            self._optimizer.zero_grad()
            return
        if self._clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self.parameters.values(), self._clip_norm, norm)
        for group in self._optimizer.param_groups if learning_rate is not None else ():
            group["lr"] = learning_rate * group.get("rate_part", 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def state_dict(self) -> dict[str, Tensor]:
        """``"<layer>.<name>"`` → parameter or buffer."""
        return {
            f"{index}.{name}": tensor
            for index, module in enumerate(self._trained)
            for name, tensor in module.state_dict().items()
        }


def _added(parts: Sequence[Tensor]) -> Tensor | None:
    """One after the other."""
    if not parts:
        return None
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total


def _number(*numbers: int) -> int:
    """The law of random numbers, stated a second time: splitmix64 over (seed, unit of the run, layer)."""
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    state = golden
    for number in numbers:
        state = (state + number + golden) % 2**64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = ((state ^ (state >> shift)) * factor) & mask
        state ^= state >> 31
    return state - 2**64 if state >= 2**63 else state
