"""The universal checker: one process, one unit after the other, no pipeline.

Given which weights every unit reads at every stage and which units every update consumes, ``replay`` computes the
losses and weights that any correct execution must produce, to the bit. It shares no machinery with the engine:
whole-model forwards through one autograd graph, ``functional_call`` for old weights, plain sums for gradients.

Words: docs/glossary.md.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from vpipe.layer import TiedWeight, collecting
from vpipe.runtime.flow import Flow, Value
from vpipe.runtime.surroundings import seed_layer, undisturbed
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import VersionTable, forward_orders, update_groups, version_table


@dataclass(frozen=True)
class ReplayUnit:
    """One microbatch and its part of the batch."""

    inputs: Any
    targets: Any
    weight: float
    """What its gradient is multiplied by."""
    share: float | None = None
    """Its part of the reported loss; the weight if not given."""


NamedGradients = dict[str, Tensor]


@dataclass
class Flight:
    """A unit on its way through the stages."""

    number: int
    unit: ReplayUnit
    values: dict[Value, Any] = field(default_factory=dict)
    leaves: dict[str, Tensor] = field(default_factory=dict)
    added: list[Tensor] = field(default_factory=list)
    parts: list[float] = field(default_factory=list)
    """Stage → what it adds to the unit's loss."""
    loss: Any = None


class Walk:
    """Which forward is next: one unit as far as it gets, then the next; every stage takes them in its own order."""

    def __init__(self, forwards: Sequence[Sequence[int]], replicas: Sequence[int]) -> None:
        self._replicas = replicas
        self._waiting: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        for stage, order in enumerate(forwards):
            for microbatch in order:
                self._waiting[stage, microbatch % replicas[stage]].append(microbatch)
        self._at = dict.fromkeys(sorted(forwards[0]), 0)
        """Microbatch → the stage that it comes to next."""

    def next(self, has_weights: Callable[[int, int], bool]) -> tuple[int, int]:
        """(stage, microbatch); the weights that it reads there must have been made."""
        for microbatch, stage in self._at.items():
            queue = self._waiting[stage, microbatch % self._replicas[stage]]
            if queue[0] == microbatch and has_weights(stage, microbatch):
                queue.popleft()
                self._at[microbatch] += 1
                if self._at[microbatch] == len(self._replicas):
                    del self._at[microbatch]
                return stage, microbatch
        raise AssertionError("no unit can go on: the tables contradict each other")


class Sums:
    """The gradients of one stage, added replica by replica in the order that the program has."""

    def __init__(self, groups: Sequence[Sequence[int]], num_replicas: int) -> None:
        self._groups = [[[k for k in group if k % num_replicas == r] for r in range(num_replicas)] for group in groups]
        self._has = [[bool(mine) for mine in group] for group in self._groups]
        self._there: dict[int, Mapping[str, Tensor | None]] = {}
        self._added: list[NamedGradients] = [{} for _ in range(num_replicas)]

    def add(self, microbatch: int, gradients: Mapping[str, Tensor | None]) -> None:
        """A unit's gradients are there; they are added when it is their turn."""
        self._there[microbatch] = gradients
        for total, order in zip(self._added, self._groups[0] if self._groups else (), strict=False):
            while order and order[0] in self._there:
                for name, gradient in self._there.pop(order.pop(0)).items():
                    if gradient is not None:
                        total[name] = total[name] + gradient if name in total else gradient

    @property
    def complete(self) -> bool:
        """Whether everything of the next update is there."""
        return bool(self._groups) and not any(self._groups[0])

    def take(self) -> list[NamedGradients]:
        """Per replica that has units in the update, the sum of their gradients."""
        del self._groups[0]
        found, self._added = (
            [total for total, has in zip(self._added, self._has.pop(0), strict=True) if has],
            [{} for _ in self._added],
        )
        for microbatch in list(self._there):  # what came early for the next update
            if microbatch in self._there:
                self.add(microbatch, self._there[microbatch])
        return found


class Replay:
    """A model trained sequentially by version tables. ``modules`` are copies: they are changed in place."""

    def __init__(
        self,
        flow: Flow,
        modules: Mapping[int, nn.Module],
        loss: Callable[[Any, Any], Tensor],
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        *,
        seed: int = 0,
        tied: Sequence[TiedWeight] = (),
        clip_norm: float | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        replicas: Sequence[int] | None = None,
        first_unit: int = 0,
    ) -> None:
        self.flow = flow
        self.modules = dict(modules)
        self._loss = loss
        self._seed = seed
        self._tied = tied
        self._clip_norm = clip_norm
        self._autocast = autocast
        self._replicas = list(replicas or [1] * flow.num_stages)
        self._parameters = [self._of_stage(stage) for stage in range(flow.num_stages)]
        trained = [[p for p in named.values() if p.requires_grad] for named in self._parameters]
        self._optimizers = [optimizer(parameters) if parameters else None for parameters in trained]
        self._num_units = first_unit

    def _of_stage(self, stage: int) -> dict[str, nn.Parameter]:
        layers = range(*self.flow.bounds[stage])
        return {f"{layer}.{name}": p for layer in layers for name, p in self.modules[layer].named_parameters()}

    def run(self, program: Program, units: Sequence[ReplayUnit]) -> float:
        """Train on the units of one program; the mean loss."""
        tables = (version_table(program), update_groups(program), forward_orders(program))
        return self.train(*tables, units)

    def train(
        self,
        versions: VersionTable,
        groups: Sequence[Sequence[Sequence[int]]],
        forwards: Sequence[Sequence[int]],
        units: Sequence[ReplayUnit],
    ) -> float:
        """The same from the tables themselves: versions per (stage, unit); per stage the units of each update, in the
        order in which their gradients are added; per stage the units in the order of their forwards."""
        history = [[self._snapshot(stage)] for stage in range(len(groups))]
        synchronous = all(len(of_stage) <= 1 for of_stage in groups)
        walk = Walk(forwards, self._replicas)
        sums = [Sums(of_stage, self._replicas[stage]) for stage, of_stage in enumerate(groups)]
        flying = {number: Flight(number, unit) for number, unit in enumerate(units)}
        total: dict[int, float] = {}
        with undisturbed():
            while flying:
                stage, number = walk.next(lambda stage, microbatch: versions[stage, microbatch] < len(history[stage]))
                flight = flying[number]
                self._forward(flight, stage, history[stage][versions[stage, number]])
                if stage < len(groups) - 1:
                    continue
                total[number] = self._backward(flying.pop(number))
                for mine, parameters in zip(sums, self._parameters, strict=True):
                    mine.add(number, {name: flight.leaves[name].grad for name in parameters})
                ending = [stage for stage, mine in enumerate(sums) if mine.complete]
                if ending and (not synchronous or len(ending) == len(groups)):
                    self._update(ending, [sums[stage].take() for stage in ending], synchronous)
                    for each in ending:
                        history[each].append(self._snapshot(each))
        self._num_units += len(units)
        return _added(total[number] for number in range(len(units)))

    def _snapshot(self, stage: int) -> dict[str, Tensor]:
        return {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in self._parameters[stage].items()}

    def _backward(self, flight: Flight) -> float:
        """What the layers, one after the other, and the loss function add to the unit's loss, times its share."""
        unit, loss = flight.unit, flight.loss
        for scalar in flight.added:
            loss = loss + scalar
        if loss.requires_grad:
            (loss * unit.weight).backward()
        share = unit.weight if unit.share is None else unit.share
        return share * _added(flight.parts) if share else 0.0

    def _forward(self, flight: Flight, stage: int, weights: Mapping[str, Tensor]) -> None:
        """One stage of a unit's way; its graph goes on where the stage before has ended."""
        if not stage:
            flight.values = self.flow.bound(flight.unit.inputs)
        leaves = {name: leaf.detach().clone().requires_grad_(leaf.requires_grad) for name, leaf in weights.items()}
        flight.leaves |= leaves
        with self._autocast():
            for layer in range(*self.flow.bounds[stage]):
                self._layer(flight, layer, leaves)
            if stage == self.flow.num_stages - 1:
                outputs = [flight.values[value] for value in self.flow.outputs()]
                loss: Any = self._loss(outputs[0] if len(outputs) == 1 else tuple(outputs), flight.unit.targets)
                flight.loss = loss
                flight.parts.append(float(loss.detach()))

    def _layer(self, flight: Flight, layer: int, leaves: Mapping[str, Tensor]) -> None:
        module = self.modules[layer]
        seed_layer(self._seed, self._num_units + flight.number, layer)
        prefix = f"{layer}."
        mine = {name.removeprefix(prefix): leaf for name, leaf in leaves.items() if name.startswith(prefix)}
        scalars: list[Tensor] = []
        with collecting(scalars):
            result = functional_call(module, mine, tuple(flight.values[value] for value in self.flow.reads[layer]))
        flight.added += scalars
        flight.parts.append(_added(float(scalar.detach()) for scalar in scalars))
        names = self.flow.layers[layer].writes
        parts = (result,) if len(names) == 1 else result
        flight.values.update({(name, layer): part for name, part in zip(names, parts, strict=True)})

    def _update(self, stages: Sequence[int], gathered: Sequence[list[NamedGradients]], synchronous: bool) -> None:
        for stage, replicas in zip(stages, gathered, strict=True):
            for name, parameter in self._parameters[stage].items():
                parts = [replica[name] for replica in replicas if name in replica]
                if parts:
                    gradient = parts[0]
                    for part in parts[1:]:
                        gradient = gradient + part
                    parameter.grad = gradient if synchronous or len(replicas) == 1 else gradient / len(replicas)
        self._sum_tied()
        self._clip([p for stage in stages for p in self._counted(stage)] if synchronous else None, stages)
        for stage in stages:
            optimizer = self._optimizers[stage]
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    def _sum_tied(self) -> None:
        named = {name: p for parameters in self._parameters for name, p in parameters.items()}
        for tie in self._tied:
            owners = [named[f"{layer}.{name}"] for layer, name in sorted(tie.owners, key=lambda owner: -owner[0])]
            parts = [p.grad if p.grad is not None else torch.zeros_like(p) for p in owners]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            for parameter in owners:
                parameter.grad = total.clone()

    def _counted(self, stage: int) -> list[nn.Parameter]:
        later = {f"{layer}.{name}" for tie in self._tied for layer, name in tie.owners[1:]}
        return [p for name, p in self._parameters[stage].items() if name not in later]

    def _clip(self, together: list[nn.Parameter] | None, stages: Sequence[int]) -> None:
        if self._clip_norm is None:
            return
        for parameters in [together] if together is not None else [self._counted(stage) for stage in stages]:
            everything = (
                [p for stage in stages for p in self._parameters[stage].values()]
                if together is not None
                else parameters
            )
            norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            nn.utils.clip_grads_with_norm_(everything, self._clip_norm, norm)

    def state_dict(self) -> dict[str, Tensor]:
        return {
            f"{layer}.{name}": tensor
            for layer, module in self.modules.items()
            for name, tensor in module.state_dict().items()
        }


def _added(parts: Iterable[float]) -> float:
    """One after the other: ``sum`` compensates in some versions of Python."""
    total = 0.0
    for part in parts:
        total += part
    return total
