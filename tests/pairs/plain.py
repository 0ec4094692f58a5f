"""A plain torch loop that trains a list of modules as a pipeline promises to. It imports nothing of vpipe.

What a schedule decides is told: which units each holder of a layer adds up, in which order, and for an asynchronous schedule
which weight version a unit reads.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

Unit = tuple[Any, Any, float]
"""Inputs, targets, share of the batch."""
Orders = Sequence[Sequence[tuple[int, ...]]]
"""Per layer, the units that each of its holders adds up, in order."""
LayerTuple = tuple[nn.Module, tuple[str, ...], tuple[str, ...]]
"""Module, names of what it reads, names of what it writes."""


class Plain:
    """Modules, one optimizer, one loop over units."""

    def __init__(
        self,
        layers: Callable[[Callable[[Tensor], None]], Sequence[LayerTuple]],
        loss: Callable[[Any, Any], Tensor],
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        *,
        seed: int,
        ties: Sequence[Sequence[str]] = (),
        clip: float | None = None,
        scale: float = 1.0,
        average: float | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.added: list[Tensor] = []
        """What the layers of a unit add to its loss."""
        self.layers = layers(self.added.append)
        found = [module for module, _, _ in self.layers]
        self.modules = [
            copy.deepcopy(module) if module in found[:place] else module for place, module in enumerate(found)
        ]
        self.loss, self.seed, self.ties = loss, seed, ties
        self.clip, self.scale, self.autocast = clip, scale, autocast
        self.average = average
        self.averages: dict[str, Tensor] = {}
        """Of the weights that have been updated, beginning with what they were before."""
        parameters = self.parameters()
        for first, *others in ties:
            for name in others:
                parameters[name].data.copy_(parameters[first].data)
        self.optimizer = optimizer(list(parameters.values()))
        self.num_units = 0
        self.waiting: dict[tuple[int, ...], dict[str, Tensor]] = {}
        self.drawn: dict[tuple[int, int], Tensor] = {}
        """State of the generators that layers have of their own, for each holder."""

    def owners(self) -> list[nn.Module]:
        """The layers, and a loss that has parameters."""
        return [*self.modules, *([self.loss] if isinstance(self.loss, nn.Module) else [])]

    def parameters(self) -> dict[str, nn.Parameter]:
        return {f"{i}.{name}": p for i, m in enumerate(self.owners()) for name, p in m.named_parameters()}

    def state_dict(self) -> dict[str, Tensor]:
        return {f"{i}.{name}": t for i, m in enumerate(self.owners()) for name, t in m.state_dict().items()}

    def forward(self, modules: Sequence[nn.Module], inputs: Any, unit: int | None) -> Any:
        """The model's output; ``unit`` counts over the whole run and keys the random numbers."""
        values = {"x": tree_map_only(Tensor, Tensor.clone, inputs)}  # a layer may change its own
        for index, ((_, reads, writes), module) in enumerate(zip(self.layers, modules, strict=False)):
            if unit is not None:
                torch.manual_seed(key(self.seed, unit, index))
            result = module(*(values[name] for name in reads))
            values.update(zip(writes, (result,) if len(writes) == 1 else result, strict=True))
        (output,) = (values[name] for name in self.layers[-1][2])
        return output

    def evaluate(self, units: Sequence[Unit]) -> float:
        modes = [(m, m.training) for module in self.owners() for m in module.modules()]
        for module in self.owners():
            module.eval()
        total = 0.0
        with torch.no_grad(), uncached(), self.autocast():
            for inputs, targets, share in units:
                total += share * float(self.loss(self.forward(self.modules, inputs, None), targets))
        for module, mode in modes:
            module.training = mode
        return total

    def _unit(self, modules: Sequence[nn.Module], unit: Unit, number: int, weight: float) -> float:
        """Forward and backward of one unit; its part of the mean loss."""
        inputs, targets, share = unit
        state = torch.get_rng_state()
        self.added.clear()
        loss_of = modules[-1] if isinstance(self.loss, nn.Module) else self.loss
        with uncached(), self.autocast():
            loss = loss_of(self.forward(modules, inputs, number), targets)
        torch.set_rng_state(state)
        parts = [float(extra.detach()) for extra in self.added] + [float(loss.detach())]
        for extra in self.added:
            loss = loss + extra
        loss.backward(torch.tensor(weight * self.scale, dtype=loss.dtype))
        total = 0.0
        for part in parts:
            total += part
        return share * total

    def step(self, units: Sequence[Unit], orders: Orders, *, update: bool = True, weight: float = 1.0) -> float:
        """One batch of a synchronous schedule."""
        parameters, buffers = self.parameters(), dict(self._buffers())
        orders = [*orders, *[orders[-1]] * (len(self.owners()) - len(orders))]
        before = {name: tensor.clone() for name, tensor in buffers.items()}
        after: dict[tuple[int, ...], dict[str, Tensor]] = {}
        losses: dict[int, float] = {}
        begin = {number: g.get_state() for number, g in enumerate(self._generators())}
        for holder, order in enumerate(dict.fromkeys(order for holders in orders for order in holders)):
            for name, parameter in parameters.items():
                parameter.grad = self.waiting.get(order, {}).get(name)
            for name, tensor in buffers.items():
                tensor.copy_(before[name])
            for number, generator in enumerate(self._generators()):
                generator.set_state(self.drawn.get((holder, number), begin[number]))
            for k in order:
                losses[k] = self._unit(self.owners(), units[k], self.num_units + k, weight * units[k][2])
            self.waiting[order] = {name: p.grad for name, p in parameters.items() if p.grad is not None}
            after[order] = {name: tensor.clone() for name, tensor in buffers.items()}
            for number, generator in enumerate(self._generators()):
                self.drawn[holder, number] = generator.get_state()
        for name, tensor in buffers.items():
            tensor.copy_(after[orders[int(name.split(".")[0])][0]][name])
        self.num_units += len(units)
        if update:
            for name, parameter in parameters.items():
                parts = [self.waiting[order].get(name) for order in orders[int(name.split(".")[0])]]
                parameter.grad = added([part for part in parts if part is not None])
            self.waiting = {}
            self._update()
        mean = 0.0
        for k in range(len(units)):
            mean += losses[k]
        return mean

    def step_asynchronously(
        self,
        units: Sequence[Unit],
        bounds: Sequence[tuple[int, int]],
        version: Callable[[int, int], int],
        updates: Sequence[bool],
        weights: Sequence[float],
    ) -> float:
        """Units one after the other; stage ``s`` reads the weights after ``version(s, k)`` updates of this step, and the
        gradients go onto the newest."""
        *first, (begin, _) = bounds
        bounds = [*first, (begin, len(self.owners()))]
        histories: list[list[list[nn.Module]]] = [[self._copies(range(*each))] for each in bounds]
        parameters, mean = self.parameters(), 0.0
        for parameter in parameters.values():
            parameter.grad = None
        for k, unit in enumerate(units):
            read = [module for stage, history in enumerate(histories) for module in history[version(stage, k)]]
            for module in read:
                for parameter in module.parameters():
                    parameter.grad = None
            mean += self._unit(read, unit, self.num_units + k, weights[k])
            found = [p for module in read for p in module.parameters()]
            for newest, old in zip(parameters.values(), found, strict=True):
                newest.grad = old.grad if newest.grad is None else added([newest.grad, old.grad])
            if updates[k]:
                self._update(bounds)
                for history, each in zip(histories, bounds, strict=True):
                    history.append(self._copies(range(*each)))
        self.num_units += len(units)
        return mean

    def _copies(self, layers: range) -> list[nn.Module]:
        """Modules with weights of now, and the buffers and generators that all versions share."""
        copies = []
        for layer in layers:
            module = self.owners()[layer]
            shared: dict[int, Any] = {id(tensor): tensor for tensor in module.buffers()}
            shared |= {
                id(each): each for part in module.modules() for each in vars(part).values() if is_generator(each)
            }
            copies.append(copy.deepcopy(module, shared))
        return copies

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The averages as weights."""
        held = {name: p.data for name, p in self.parameters().items() if name in self.averages}
        for name in held:
            self.parameters()[name].data = self.averages[name]
        torch.clear_autocast_cache()
        yield
        for name, weight in held.items():
            self.parameters()[name].data = weight
        torch.clear_autocast_cache()

    def _buffers(self) -> Iterable[tuple[str, Tensor]]:
        return ((f"{i}.{name}", t) for i, m in enumerate(self.owners()) for name, t in m.named_buffers())

    def _generators(self) -> list[torch.Generator]:
        parts = [part for module in self.modules for part in module.modules()]
        return [each for part in parts for each in vars(part).values() if isinstance(each, torch.Generator)]

    def _update(self, bounds: Sequence[tuple[int, int]] = ()) -> None:
        """Clip by the norm of all gradients, or stage by stage, and step; where they are not finite, do not."""
        parameters = self.parameters()
        if self.scale != 1.0:
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad / self.scale
        for owners in self.ties:
            parts = [parameters[name] for name in sorted(owners, key=lambda name: -int(name.split(".")[0]))]
            total = added([p.grad for p in parts if p.grad is not None])
            for parameter in parts:
                parameter.grad = None if total is None else total.clone()
        again, updated = {name for owners in self.ties for name in owners[1:]}, []
        for begin, end in bounds or [(0, len(self.owners()))]:
            part = {name: p for name, p in parameters.items() if begin <= int(name.split(".")[0]) < end}
            counted = [p.grad for name, p in part.items() if name not in again and p.grad is not None]
            norm = nn.utils.get_total_norm(counted)
            if not torch.isfinite(norm):
                for parameter in part.values():
                    parameter.grad = None
                continue
            updated += part
            if self.clip is not None and part:
                nn.utils.clip_grads_with_norm_(part.values(), self.clip, norm)
        if self.average is not None:
            fresh = {name: p.detach().clone() for name, p in parameters.items() if p.grad is not None}
            self.averages = fresh | self.averages
        self.optimizer.step()
        for name in updated if self.average is not None else ():
            if name in self.averages:
                self.averages[name] = self.averages[name].lerp(parameters[name].detach(), 1 - self.average)
        self.optimizer.zero_grad()


@contextmanager
def uncached() -> Iterator[None]:
    """Let an autocast around keep no casts: the next update makes them those of old weights."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def is_generator(value: Any) -> bool:
    return isinstance(value, torch.Generator | random.Random | np.random.Generator)


def added(parts: Sequence[Tensor]) -> Tensor | None:
    total = None
    for part in parts:
        if part is not None:
            total = part.clone() if total is None else total + part
    return total


def key(*numbers: int) -> int:
    """splitmix64 over (seed, unit of the run, layer)."""
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    state = golden
    for number in numbers:
        state = (state + number + golden) % 2**64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = ((state ^ (state >> shift)) * factor) & mask
        state ^= state >> 31
    return state - 2**64 if state >= 2**63 else state
