"""A run of consecutive layers that one autograd graph covers: a whole stage, or a part of it between recomputed layers.

                 ┌──────────── region ────────────┐
    taken value ─┤ leaf ─ layer ─ layer ─┐        │
                 │ leaf ───────── layer ─┴─ root ─┼─ given value
                 └────────────────────────────────┘

What enters is detached into leaves, one for each layer that reads it, because the gradients of several readers must be added in an order
that does not depend on where the stages are cut: latest reader first, which is the order of autograd in a single process. What leaves is
remembered only by its gradient edge; its data may be dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from vpipe.errors import UserError
from vpipe.layer import Layer, collecting_losses, describe
from vpipe.runtime.flow import Value
from vpipe.runtime.randomness import seed_layer
from vpipe.runtime.wire import flatten, unflatten

Gradients = list[Tensor | None]
Pending = dict[Value, list[tuple[int, Gradients]]]
"""Value → (reading layer, gradients of the value's tensors that need one) of every reader so far."""


@dataclass
class Graph:
    """What a region's forward leaves behind for its backward."""

    leaves: list[tuple[Value, int, list[Tensor]]] = field(default_factory=list)
    roots: list[tuple[Value, list[GradientEdge | None]]] = field(default_factory=list)
    scalars: list[GradientEdge] = field(default_factory=list)
    """Losses: the unit's own at the last stage, and those that layers added."""


@dataclass
class Outcome:
    """What a region's forward yields."""

    given: dict[Value, Any]
    graph: Graph | None
    loss: Tensor | None = None
    added: list[tuple[int, Tensor]] = field(default_factory=list)
    """(layer, value) of the losses that layers added."""


@dataclass(frozen=True)
class Run:
    """The circumstances of one forward."""

    seed: int
    unit: int
    training: bool
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext


class Region:
    """Layers ``begin..end-1`` of the model."""

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        layers: Mapping[int, Layer],
        reads: Mapping[int, tuple[Value, ...]],
        given: Sequence[Value],
        recompute: bool = False,
    ) -> None:
        self.modules = dict(modules)
        self.layers = dict(layers)
        self.reads = dict(reads)
        self.given = tuple(given)
        self.recompute = recompute
        self.begin = min(modules)
        self.taken = tuple({value: None for layer in modules for value in reads[layer] if value[1] < self.begin})
        self._changes_input = {
            layer for layer, module in modules.items() if any(getattr(part, "inplace", False) for part in module.modules())
        }

    def forward(
        self, values: Mapping[Value, Any], run: Run, loss: Callable[[Any], Tensor] | None = None, build_graph: bool = True
    ) -> Outcome:
        """Run the layers. ``values`` has everything in ``taken``."""
        graph = Graph() if build_graph else None
        local: dict[Value, Any] = {}
        added: list[tuple[int, Tensor]] = []
        outcome = Outcome({}, graph)
        with torch.set_grad_enabled(build_graph), run.autocast():
            for layer, module in self.modules.items():
                arguments = [
                    local[value] if value in local else self._enter(values[value], value, layer, graph)
                    for value in self.reads[layer]
                ]
                if run.training:
                    seed_layer(run.seed, run.unit, layer)
                with collecting_losses() as scalars:
                    result = module(*arguments)
                added.extend((layer, scalar) for scalar in scalars)
                self._keep(layer, result, local)
            if loss is not None:
                outcome.loss = self._loss(loss, [local[value] for value in self.given])
        for value in self.given if loss is None else ():
            outcome.given[value] = local[value]
            if graph is not None:
                graph.roots.append((value, [_edge(tensor) for tensor in _tensors(local[value])]))
        outcome.added = [(layer, scalar.detach()) for layer, scalar in added]
        if graph is not None:
            scalars = [scalar for _, scalar in added] + ([outcome.loss] if outcome.loss is not None else [])
            graph.scalars = [edge for scalar in scalars if (edge := _edge(scalar)) is not None]
        if outcome.loss is not None:
            outcome.loss = outcome.loss.detach()
        return outcome

    def _enter(self, given: Any, value: Value, layer: int, graph: Graph | None) -> Any:
        """What a layer gets of a value from outside: leaves of its own where gradients are needed."""
        if graph is None:
            return given
        leaves: list[Tensor] = []

        def leaf(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            leaves.append(tensor.detach().requires_grad_())
            return leaves[-1].clone() if layer in self._changes_input else leaves[-1]

        entered = mapped(given, leaf)
        graph.leaves.append((value, layer, leaves))
        return entered

    def _keep(self, layer: int, result: Any, local: dict[Value, Any]) -> None:
        names = self.layers[layer].writes
        if len(names) == 1:
            local[names[0], layer] = result
            return
        if not isinstance(result, tuple | list) or len(result) != len(names):
            raise UserError(f"{self.name(layer)} writes {', '.join(names)}, but returned {describe(result)}")
        for name, part in zip(names, result, strict=True):
            local[name, layer] = part

    def _loss(self, loss: Callable[[Any], Tensor], outputs: list[Any]) -> Tensor:
        found = loss(outputs[0] if len(outputs) == 1 else tuple(outputs))
        if not isinstance(found, Tensor) or found.numel() != 1:
            raise UserError(f"the loss must be a scalar tensor, but loss_fn returned {describe(found)}; reduce it, for example by .mean()")
        return found.reshape(())

    def name(self, layer: int) -> str:
        """What errors call a layer."""
        return f"layer {layer} ({self.layers[layer].name or type(self.modules[layer]).__name__})"

    def backward(self, graph: Graph, pending: Pending, weight: float) -> None:
        """Take the gradients of what the region gave from ``pending``, add those of what it took."""
        roots: list[GradientEdge] = []
        gradients: list[Tensor] = []
        for value, edges in graph.roots:
            total = summed(pending.pop(value, []), len(edges))
            for edge, gradient in zip(edges, total, strict=True):
                if edge is not None and gradient is not None:
                    roots.append(edge)
                    gradients.append(gradient)
        for edge in graph.scalars:
            roots.append(edge)
            gradients.append(torch.tensor(weight))
        if roots:
            torch.autograd.backward(roots, gradients)
        for value, layer, leaves in graph.leaves:
            pending.setdefault(value, []).append((layer, [leaf.grad for leaf in leaves]))


def summed(readers: list[tuple[int, Gradients]], num_tensors: int) -> Gradients:
    """The sum over a value's readers, latest layer first, of the gradient of each tensor that needs one."""
    total: Gradients = [None] * num_tensors
    for _, gradients in sorted(readers, key=lambda reader: -reader[0]):
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                before = total[index]
                total[index] = gradient if before is None else before + gradient
    return total


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    tensors: list[Tensor] = []
    structure = flatten(value, tensors)
    changed = iter([change(tensor) for tensor in tensors])
    return unflatten(structure, lambda: next(changed))


def detached(value: Any) -> Any:
    """The same data outside the graph; which tensors need gradients stays marked."""
    return mapped(value, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))


def _tensors(value: Any) -> list[Tensor]:
    """The tensors of a value that can carry a gradient to their reader."""
    tensors: list[Tensor] = []
    flatten(value, tensors)
    return [tensor for tensor in tensors if tensor.requires_grad]


def _edge(tensor: Tensor) -> GradientEdge | None:
    return get_gradient_edge(tensor) if tensor.requires_grad else None
