"""The universal checker: one process, one unit after the other, no pipeline.

Given which weights every unit reads at every stage and which units every update consumes, ``replay`` computes the
losses and weights that any correct execution must produce, to the bit. It shares no machinery with the engine:
whole-model forwards through one autograd graph, ``functional_call`` for old weights, plain sums for gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from vpipe.layer import TiedWeight, collecting
from vpipe.runtime.flow import Flow, Value, bind_inputs
from vpipe.runtime.randomness import seed_layer, undisturbed
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import VersionTable, update_groups, version_table


@dataclass(frozen=True)
class ReplayUnit:
    """One microbatch and its part of the batch."""

    inputs: Any
    targets: Any
    weight: float
    """What its gradient is multiplied by."""
    share: float | None = None
    """Its part of the reported loss; the weight if not given."""


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
        self._num_units = 0

    def _of_stage(self, stage: int) -> dict[str, nn.Parameter]:
        layers = range(*self.flow.bounds[stage])
        return {f"{layer}.{name}": p for layer in layers for name, p in self.modules[layer].named_parameters()}

    def run(self, program: Program, units: Sequence[ReplayUnit]) -> float:
        """Train on the units of one program; the mean loss."""
        return self.train(version_table(program), update_groups(program), units, program.num_stages)

    def train(
        self,
        versions: VersionTable,
        groups: Sequence[Sequence[Sequence[int]]],
        units: Sequence[ReplayUnit],
        num_stages: int,
    ) -> float:
        """The same from the tables themselves: versions per (stage, unit), and per stage the units of each update."""
        history = [[self._snapshot(stage)] for stage in range(num_stages)]
        gathered: list[dict[int, dict[str, Tensor]]] = [defaultdict(dict) for _ in range(num_stages)]
        synchronous = all(len(of_stage) <= 1 for of_stage in groups)
        total = 0.0
        with undisturbed():
            for number, unit in enumerate(units):
                weights = {
                    name: leaf
                    for stage in range(num_stages)
                    for name, leaf in history[stage][versions[stage, number]].items()
                }
                leaves = {
                    name: leaf.detach().clone().requires_grad_(leaf.requires_grad) for name, leaf in weights.items()
                }
                share = unit.weight if unit.share is None else unit.share
                for parts in self._forward_backward(leaves, unit, number):
                    total += share * sum(parts)
                for stage in range(num_stages):
                    self._gather(gathered[stage][number % self._replicas[stage]], self._parameters[stage], leaves)
                ending = [stage for stage in range(num_stages) if any(max(group) == number for group in groups[stage])]
                if ending:
                    self._update(ending, gathered, synchronous)
                for stage in ending:
                    history[stage].append(self._snapshot(stage))
        self._num_units += len(units)
        return total

    def _snapshot(self, stage: int) -> dict[str, Tensor]:
        return {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in self._parameters[stage].items()}

    def _forward_backward(self, leaves: Mapping[str, Tensor], unit: ReplayUnit, number: int) -> list[list[float]]:
        """Per stage, what its layers and the loss function add to the unit's loss."""
        parts_of_loss: list[list[float]] = [[] for _ in self.flow.bounds]
        with self._autocast():
            loss = self._forward(leaves, unit, number, parts_of_loss)
        if loss.requires_grad:
            (loss * unit.weight).backward()
        return parts_of_loss

    def _forward(
        self, leaves: Mapping[str, Tensor], unit: ReplayUnit, number: int, parts_of_loss: list[list[float]]
    ) -> Any:
        values = dict(bind_inputs(self.flow, unit.inputs))
        added: list[Tensor] = []
        for layer, module in self.modules.items():
            module.train()
            seed_layer(self._seed, self._num_units + number, layer)
            prefix = f"{layer}."
            mine = {name.removeprefix(prefix): leaf for name, leaf in leaves.items() if name.startswith(prefix)}
            scalars: list[Tensor] = []
            with collecting(scalars):
                result = functional_call(
                    module, mine, tuple(self._read(values, value) for value in self.flow.reads[layer])
                )
            added += scalars
            parts_of_loss[self.flow.stage_of(("", layer))] += [float(scalar.detach()) for scalar in scalars]
            names = self.flow.layers[layer].writes
            parts = (result,) if len(names) == 1 else result
            values.update({(name, layer): part for name, part in zip(names, parts, strict=True)})
        outputs = [values[value] for value in self.flow.outputs()]
        loss: Any = self._loss(outputs[0] if len(outputs) == 1 else tuple(outputs), unit.targets)
        parts_of_loss[-1].append(float(loss.detach()))
        for scalar in added:
            loss = loss + scalar
        return loss

    def _read(self, values: Mapping[Value, Any], value: Value) -> Any:
        """A value of several readers is given to each by an edge of its own: gradients are added reader by reader."""
        if sum(value in reads for reads in self.flow.reads) < 2:
            return values[value]
        return tree_map_only(
            Tensor, lambda tensor: tensor.view_as(tensor) if tensor.requires_grad else tensor, values[value]
        )

    def _gather(
        self, total: dict[str, Tensor], parameters: Mapping[str, nn.Parameter], leaves: Mapping[str, Tensor]
    ) -> None:
        for name in parameters:
            gradient = leaves[name].grad
            if gradient is not None:
                total[name] = total[name] + gradient if name in total else gradient

    def _update(self, stages: Sequence[int], gathered: list[dict[int, dict[str, Tensor]]], synchronous: bool) -> None:
        for stage in stages:
            replicas = [gathered[stage][replica] for replica in sorted(gathered[stage])]
            for name, parameter in self._parameters[stage].items():
                parts = [replica[name] for replica in replicas if name in replica]
                if parts:
                    gradient = parts[0]
                    for part in parts[1:]:
                        gradient = gradient + part
                    parameter.grad = gradient if synchronous or len(replicas) == 1 else gradient / len(replicas)
            gathered[stage].clear()
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
            owners = [named[f"{layer}.{name}"] for layer, name in tie.owners]
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
