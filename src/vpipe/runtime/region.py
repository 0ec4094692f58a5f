"""A run of consecutive layers that one autograd graph covers: a whole stage, or neighbours of one retention.

                 ┌──────────── region ────────────┐
    taken value ─┤ leaf ─ layer ─ layer ─┐        │
                 │ leaf ───────── layer ─┴─ root ─┼─ given value
                 └────────────────────────────────┘

What enters is detached into leaves, one for each layer that reads it, because the gradients of several readers must be
added in an order that does not depend on where the stages are cut: latest reader first, which is the order of autograd
in a single process. A layer gets no leaf but what is behind it, so it may change its input in place, and the gradient
is taken on the way, because a leaf would store it with other strides. What leaves is remembered only by its gradient
edge; its data may be dropped.

Words: docs/glossary.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from vpipe.errors import UserError
from vpipe.layer import Layer, collect_into, describe
from vpipe.runtime.crossing import (
    DTYPES,
    Gradients,
    check_tensor,
    edge_of,
    entrance,
    flatten,
    mapped,
    run_backward,
    summed,
    tell_change,
    versions_of,
)
from vpipe.runtime.device import scalar
from vpipe.runtime.flow import Pending, Value
from vpipe.runtime.memory.saved_tensors import SavedTensors
from vpipe.runtime.surroundings import seed_layer

_IN_PLACE = (
    "changes its input in place, which others read again (another layer, or the recompute); set the attribute "
    "`inplace = True` on that module, so that it gets a copy, or let it compute a new tensor"
)
Backward = Callable[[list[GradientEdge], list[Tensor]], None]
"""Runs a graph from (edges, their gradients)."""


class Retention(Enum):
    """What becomes of the tensors that a layer saves for its backward."""

    KEPT = "kept"
    RECOMPUTED = "recomputed"
    SWAPPED = "swapped"


class RegionGraph:
    """What a region's forward leaves behind for its backward."""

    __slots__ = ("given", "roots", "scalars", "taken")

    def __init__(self) -> None:  # not a dataclass: one is made for every unit, and literals are made fastest
        self.taken: list[tuple[Value, int, Gradients]] = []
        """(value, reading layer, the gradients of its tensors that need one), filled by the backward."""
        self.given: list[tuple[Value, list[Tensor]]] = []
        """The tensors that leave and need a gradient, until ``part``."""
        self.roots: list[tuple[Value, list[GradientEdge]]] = []
        self.scalars: Sequence[tuple[GradientEdge, torch.dtype, torch.device]] = ()
        """Losses: the unit's own at the last stage, and those that layers added."""

    def part(self) -> None:
        """Let go of what the region gave: from now on it is known by its edges. A neighbour waits for the data, and
        nobody for this, so it comes after the send."""
        for value, tensors in self.given:
            self.roots.append((value, [*map(edge_of, tensors)]))
        self.given.clear()


class Outcome:
    """What a region's forward yields."""

    __slots__ = ("added", "given", "graph", "loss")

    def __init__(self, graph: RegionGraph | None) -> None:
        self.given: dict[Value, Any] = {}
        self.graph = graph
        self.loss: Tensor | None = None
        self.added: list[tuple[int, Tensor]] = []
        """(layer, value) of the losses that layers added."""


class Run(NamedTuple):
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
        retention: Retention = Retention.KEPT,
        shared: Collection[Value] = (),
    ) -> None:
        self.modules = dict(modules)
        self.layers = dict(layers)
        self.reads = dict(reads)
        self.given = tuple(given)
        self.retention = retention
        self.recompute = retention is Retention.RECOMPUTED
        self.shared = frozenset(shared)
        """Values that several layers read, wherever they are."""
        self.begin = min(modules)
        self.taken = tuple({value: None for layer in modules for value in reads[layer] if value[1] < self.begin})
        self._watched = {
            layer: [place for place, value in enumerate(reads[layer]) if value in self.shared or value in self.taken]
            for layer in modules
        }
        """Per layer, the places of the arguments that are not the layer's alone."""
        self._known: set[int] = set()
        """Layers of a recomputed region that have shown whether they change their input."""
        self._changes_input = {
            layer
            for layer, module in modules.items()
            if any(getattr(part, "inplace", False) for part in module.modules())
        }

        self._plan = [
            (
                layer,
                module,
                self.reads[layer],
                [(name, layer) for name in layers[layer].writes],
                bool(self._watched[layer]),
            )
            for layer, module in modules.items()
        ]
        """(layer, module, values read and written, whether some arguments are not its alone), in order."""

    def forward(
        self,
        values: Mapping[Value, Any],
        run: Run,
        loss: Callable[[Any], Tensor] | None = None,
        build_graph: bool = True,
        saved: SavedTensors | None = None,
    ) -> Outcome:
        """Run the layers. ``values`` has everything in ``taken``.

        Without ``build_graph``, a training run still finds out which results need a gradient, but saves nothing for a
        backward. With ``saved``, what is saved may be swapped out.
        """
        graph = RegionGraph() if build_graph else None
        outcome = Outcome(graph)
        plain = saved is None and run.autocast is nullcontext and (build_graph or not run.training)
        if plain and run.training is torch.is_grad_enabled():  # mostly
            local = self._compute(values, run, loss, outcome, saved)
        else:
            with self._around(run, build_graph, saved):
                local = self._compute(values, run, loss, outcome, saved)
        for value in self.given if loss is None else ():
            found = outcome.given[value] = local[value]
            if type(found) is Tensor and found.dtype in DTYPES and found.layout is torch.strided:  # mostly
                tensors = [found] if found.requires_grad else []
            else:
                tensors = [tensor for tensor in self._checked(value, found) if tensor.requires_grad]
            if graph is not None:
                graph.given.append((value, tensors))
        if outcome.added or outcome.loss is not None:
            self._part_with_scalars(outcome)
        return outcome

    def _compute(
        self,
        values: Mapping[Value, Any],
        run: Run,
        loss: Callable[[Any], Tensor] | None,
        outcome: Outcome,
        saved: SavedTensors | None,
    ) -> dict[Value, Any]:
        """The values that the layers write; ``outcome`` gets the losses."""
        local: dict[Value, Any] = {}
        scalars: list[Tensor] = []
        before = collect_into(scalars)
        try:
            for layer, module, reads, writes, watched in self._plan:
                arguments = []
                for value in reads:
                    if value in local:
                        found = local[value]
                        arguments.append(self._within(found, value, layer) if value in self.shared else found)
                    else:
                        arguments.append(self._enter(values[value], value, layer, outcome.graph, run.training, saved))
                seed_layer(run.seed, run.unit, layer)
                if watched and layer not in self._changes_input:
                    result = self._call(layer, module, arguments, values)
                else:
                    result = module(*arguments)
                if len(writes) == 1:
                    local[writes[0]] = result
                else:
                    self._keep(layer, result, local)
                if scalars:
                    outcome.added.extend((layer, scalar) for scalar in scalars)
                    scalars.clear()
            if loss is not None:
                outcome.loss = self._loss(loss, [local[value] for value in self.given])
        finally:
            collect_into(before)
        return local

    def _part_with_scalars(self, outcome: Outcome) -> None:
        """Of losses, too, the graph keeps the edges, and the outcome the numbers."""
        parts = [scalar for _, scalar in outcome.added] + ([outcome.loss] if outcome.loss is not None else [])
        if outcome.graph is not None:
            scalars = [(edge_of(scalar), scalar.dtype, scalar.device) for scalar in parts if scalar.requires_grad]
            outcome.graph.scalars = scalars
        # Copies: some losses (mse_loss) lie in memory of their terms' size, and the number keeps all of it.
        outcome.added = [(layer, scalar.detach().clone()) for layer, scalar in outcome.added]
        outcome.loss = outcome.loss.detach().clone() if outcome.loss is not None else None

    def _around(self, run: Run, build_graph: bool, saved: SavedTensors | None) -> AbstractContextManager[Any]:
        """Number formats, and what becomes of saved tensors."""
        with ExitStack() as around:
            around.enter_context(torch.set_grad_enabled(run.training))
            if run.training and not build_graph:
                around.enter_context(saved_tensors_hooks(_forget, _forgotten))
            if saved is not None:
                around.enter_context(saved_tensors_hooks(saved.pack, saved.unpack))
            if run.autocast is not nullcontext:
                around.enter_context(run.autocast())
            return around.pop_all()

    def _call(self, layer: int, module: nn.Module, arguments: list[Any], values: Mapping[Value, Any]) -> Any:
        """Run a layer, some of whose arguments are not its alone, and see whether it changes them in place.

        What another layer reads must stay, wherever that layer is. What the recompute reads again is a copy the first
        time, and ever after for a layer that has changed it. What an earlier region has given may be changed; autograd
        must know of it there, as it does in a single graph.
        """
        trial = self.recompute and layer not in self._known
        if trial:
            arguments = mapped(arguments, Tensor.clone)
            self._known.add(layer)
        places = self._watched[layer]
        if len(arguments) == 1 and type(arguments[0]) is Tensor and arguments[0].requires_grad:  # most layers
            version = arguments[0]._version
            result = module(arguments[0])
            if arguments[0]._version == version:
                return result
            before = [[version]]
        else:
            before = [versions_of(arguments[place]) for place in places]
            result = module(*arguments)
        for place, versions in zip(places, before, strict=True):
            if versions == versions_of(arguments[place]):
                continue
            value = self.reads[layer][place]
            if value in self.shared or (self.recompute and not trial):
                raise UserError(f"{self.name(layer)} {_IN_PLACE}")
            if trial:
                self._changes_input.add(layer)
            else:
                mapped(values[value], tell_change)
        return result

    def _enter(
        self,
        given: Any,
        value: Value,
        layer: int,
        graph: RegionGraph | None,
        training: bool,
        saved: SavedTensors | None,
    ) -> Any:
        """What a layer gets of a value from outside: where gradients are needed, by an edge of its own."""
        gradients: Gradients = []
        if graph is not None:
            graph.taken.append((value, layer, gradients))
        if type(given) is Tensor and saved is None and layer not in self._changes_input:  # most values
            if not training or not given.requires_grad:
                return given
            gradients.append(None)
            return entrance(given if given.is_leaf else given.detach().requires_grad_(), gradients, 0)

        def enter(tensor: Tensor) -> Tensor:
            if training and tensor.requires_grad:
                gradients.append(None)
                leaf = tensor.detach().requires_grad_()
                if saved is not None:
                    saved.enter(leaf)
                tensor = entrance(leaf, gradients, len(gradients) - 1)
            return tensor.clone() if layer in self._changes_input else tensor

        return mapped(given, enter)

    def _within(self, given: Any, value: Value, layer: int) -> Any:
        """What a layer gets of a value of its own region that several layers read.

        It is given to each by an edge of its own, so that the gradients are added reader by reader, as they are where
        the readers are on other stages; and a reader that changes its input must not change that of the others.
        """
        if layer in self._changes_input:
            return mapped(given, Tensor.clone)
        return mapped(given, lambda tensor: tensor.view_as(tensor) if tensor.requires_grad else tensor)

    def _checked(self, value: Value, found: Any) -> list[Tensor]:
        """The tensors of a value that leaves the region, all of a kind that can travel."""
        tensors: list[Tensor] = [found] if type(found) is Tensor else []
        try:
            if not tensors:
                flatten(found, tensors)
            for tensor in tensors:
                check_tensor(tensor)
        except UserError as error:
            raise UserError(f"{self.name(value[1])} returned {describe(found)} as {value[0]!r}: {error}") from None
        return tensors

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
            raise UserError(
                f"the loss must be a scalar tensor, but loss_fn returned {describe(found)}; "
                "reduce it, for example by .mean()"
            )
        return found.reshape(())

    def name(self, layer: int) -> str:
        """What errors call a layer."""
        return f"layer {layer} ({self.layers[layer].name or type(self.modules[layer]).__name__})"

    def backward(self, graph: RegionGraph, pending: Pending, weight: float, run: Backward = run_backward) -> None:
        """Take the gradients of what the region gave from ``pending``, add those of what it took."""
        if graph.given:
            graph.part()
        roots: list[GradientEdge] = []
        gradients: list[Tensor] = []
        for value, edges in graph.roots:
            total = summed(pending.pop(value, []), len(edges))
            for edge, gradient in zip(edges, total, strict=True):
                if gradient is not None:
                    roots.append(edge)
                    gradients.append(gradient)
        for edge, dtype, device in graph.scalars:
            roots.append(edge)
            gradients.append(scalar(weight, dtype, device))
        if roots:
            run(roots, gradients)
        for value, layer, taken in reversed(graph.taken):
            pending.setdefault(value, []).append((layer, taken))


def _forget(tensor: Tensor) -> None:
    """Save nothing: the forward of a region that will be recomputed has no backward of its own."""


def _forgotten(nothing: None) -> Tensor:
    raise UserError(
        "a layer computes a gradient inside its forward, for which a recomputed layer has kept nothing; "
        "leave it out of `recompute`"
    )
