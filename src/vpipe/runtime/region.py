"""A run of consecutive layers that one autograd graph covers: a whole stage, or neighbours of one retention.

                 ┌──────────── region ────────────┐
    taken value ─┤ leaf ┬ layer ─ layer ─┐        │
                 │      └──────── layer ─┴─ root ─┼─ given value
                 └────────────────────────────────┘

Each tensor that enters is detached into one leaf. A layer gets no leaf but what is behind it, so it may change its
input in place, and the gradient is taken on the way, because a leaf would store it with other strides. What leaves is
remembered only by its gradient edge; its data may be dropped.

A change in place is let through where nothing else reads the same memory. Versions tell, by storage and not by name: a
view, or what a layer has returned as it came, counts the changes of the tensor behind it. A value that a later layer
reads must be as it was after each layer; what the recompute reads again is copied before, once the first forward has
shown that it changes.

Where readers of a value are behind the region as well, the sum of their gradients goes to the entrance before the
region's own backward, and autograd goes on adding to it, use by use: the latest use first, as in a single process,
wherever the model is cut.

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
    copied,
    edge_of,
    entrance,
    flatten,
    mapped,
    run_backward,
    tell_change,
    tensors_of,
    versions_of,
)
from vpipe.runtime.device import scalar
from vpipe.runtime.flow import Pending, Value
from vpipe.runtime.memory.saved_tensors import SavedTensors
from vpipe.runtime.surroundings import seed_layer

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
        self.taken: list[tuple[Value, Gradients, list[GradientEdge]]] = []
        """(value, the gradients of its tensors that need one, filled by the backward; the edges of these tensors, where
        other regions may read the value)."""
        self.given: list[tuple[Value, list[Tensor]]] = []
        """The tensors that leave and need a gradient, until ``part``."""
        self.roots: list[tuple[Value, list[GradientEdge]]] = []
        self.scalars: Sequence[tuple[GradientEdge, torch.dtype, torch.device]] = ()
        """Losses: the unit's own at the last stage, and those that layers added."""

    def part(self) -> None:
        """Let go of what the region gave: from now on it is known by its edges. A neighbour waits for the data, and
        no rank for this, so it comes after the send."""
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
        retention: Retention,
        shared: Collection[Value],
        last_reads: Mapping[Value, int],
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
        self.changes: set[Value] | None = None if self.recompute else set()
        """Of a region that is recomputed, what it changes of what it takes: known from its first forward on."""
        self._plan = []
        """(layer, module, values read and written, values of before that a later layer reads), in order."""
        known = list(self.taken)
        for layer, module in modules.items():
            writes = [(name, layer) for name in layers[layer].writes]
            later = [value for value in known if last_reads.get(value, -1) > layer]
            self._plan.append((layer, module, self.reads[layer], writes, later))
            known += writes
        self._watched = {value for *_, later in self._plan for value in later}

    def forward(
        self,
        values: Mapping[Value, Any],
        run: Run,
        loss: Callable[[Any], Tensor] | None = None,
        build_graph: bool = True,
        saved: SavedTensors | None = None,
        tied: Collection[Value] = (),
    ) -> Outcome:
        """Run the layers. ``values`` has everything in ``taken``.

        Without ``build_graph``, a training run still finds out which results need a gradient, but saves nothing for a
        backward. With ``saved``, what is saved may be swapped out. Values that are ``tied`` share memory with others
        where the model is not cut.
        """
        graph = RegionGraph() if build_graph else None
        outcome = Outcome(graph)
        plain = saved is None and run.autocast is nullcontext and (build_graph or not run.training)
        if plain and run.training is torch.is_grad_enabled():  # mostly
            local = self._compute(values, run, loss, outcome, saved, tied)
        else:
            with self._around(run, build_graph, saved):
                local = self._compute(values, run, loss, outcome, saved, tied)
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
        tied: Collection[Value],
    ) -> dict[Value, Any]:
        """The values that the layers write; ``outcome`` gets the losses."""
        local: dict[Value, Any] = {}
        versions: dict[Value, list[int]] = {}
        inside: dict[int, Tensor] = {}
        scalars: list[Tensor] = []
        before = collect_into(scalars)
        try:
            for value in self.taken:
                local[value] = self._enter(value, values, outcome.graph, run.training, saved, inside)
                versions[value] = versions_of(local[value])
            for layer, module, reads, writes, later in self._plan:
                seed_layer(run.seed, run.unit, layer)
                result = module(*[local[value] for value in reads])
                if later:
                    self._check_unchanged(layer, later, local, versions)
                if len(writes) == 1:
                    local[writes[0]] = result
                else:
                    self._keep(layer, result, local)
                if self._watched:
                    versions.update({value: versions_of(local[value]) for value in writes if value in self._watched})
                if scalars:
                    outcome.added.extend((layer, scalar) for scalar in scalars)
                    scalars.clear()
            if loss is not None:
                outcome.loss = self._loss(loss, [local[value] for value in self.given])
        finally:
            collect_into(before)
        changed = {value for value in self.taken if versions_of(local[value]) != versions[value]}
        for name, _ in changed.intersection(tied):
            raise UserError(
                f"layers {self.begin} to {max(self.modules)} change {name!r} in place, which shares memory with "
                "another value or another part of it, perhaps on another rank; let one of them be a clone"
            )
        if changed or self.changes is None:
            self._note_changed(changed, values, local, run.training and outcome.graph is None)
        return local

    def _check_unchanged(
        self, layer: int, later: Sequence[Value], local: Mapping[Value, Any], versions: dict[Value, list[int]]
    ) -> None:
        """Refuse a change of what a later layer reads: wherever that is, it may have a copy of its own."""
        for value in later:
            if versions_of(local[value]) != versions[value]:
                raise UserError(
                    f"{self.name(layer)} changes its input in place, and with it {value[0]!r}, which another layer "
                    "reads later, perhaps on another rank; let it compute a new tensor (a torch module: inplace=False)"
                )

    def _note_changed(
        self, changed: set[Value], values: Mapping[Value, Any], local: Mapping[Value, Any], first_of_two: bool
    ) -> None:
        """Layers have changed what the region took. Where they got an alias, autograd must know of it in the graph of
        an earlier region, as it does in a single graph; the forward of a recomputed region notes it for the next."""
        for value in changed:
            for outer, inner in zip(tensors_of(values[value]), tensors_of(local[value]), strict=True):
                if outer is not inner:
                    tell_change(outer)
        if self.recompute and first_of_two:
            if self.changes is not None and not changed <= self.changes:
                names = ", ".join(repr(name) for name, _ in changed - self.changes)
                raise UserError(
                    f"layers {self.begin} to {max(self.modules)} change {names} in place, which they have not done at "
                    "first, and their recompute reads it again; leave them out of `recompute`"
                )
            self.changes = (self.changes or set()) | changed

    def held(self, values: Mapping[Value, Any]) -> dict[Value, Any]:
        """What the recompute will read: the region's values, in memory of their own where its layers change them."""
        changing = [value for value in self.taken if self.changes is None or value in self.changes]
        own = mapped(tuple(values[value] for value in changing), copied) if changing else ()
        return {value: values[value] for value in self.taken} | dict(zip(changing, own, strict=True))

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

    def _enter(
        self,
        value: Value,
        values: Mapping[Value, Any],
        graph: RegionGraph | None,
        training: bool,
        saved: SavedTensors | None,
        inside: dict[int, Tensor],
    ) -> Any:
        """What layers get of a value from outside. ``inside`` has what they get of each tensor: one that comes by
        several names has one leaf, and its gradient goes back by the first of them."""
        gradients: Gradients = []
        edges: list[GradientEdge] = []
        if graph is not None:
            graph.taken.append((value, gradients, edges))

        def enter(tensor: Tensor) -> Tensor:
            if not training or not tensor.requires_grad:
                return tensor
            gradients.append(None)
            found = inside.get(id(tensor))
            if found is None:
                leaf = tensor if tensor.is_leaf and saved is None else tensor.detach().requires_grad_()
                if saved is not None:
                    saved.enter(leaf)
                found = inside[id(tensor)] = entrance(leaf, gradients, len(gradients) - 1)
            if value in self.shared:
                edges.append(edge_of(found))
            return found

        given = values[value]
        return enter(given) if type(given) is Tensor else mapped(given, enter)

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
        taken = ((value, edges) for value, _, edges in graph.taken if edges)
        for value, edges in (*graph.roots, *taken):
            found = pending.pop(value, None)
            for edge, gradient in zip(edges, found, strict=True) if found else ():
                if gradient is not None:
                    roots.append(edge)
                    gradients.append(gradient)
        for edge, dtype, device in graph.scalars:
            roots.append(edge)
            gradients.append(scalar(weight, dtype, device))
        if roots:
            run(roots, gradients)
        pending.update((value, found) for value, found, _ in graph.taken)


def _forget(tensor: Tensor) -> None:
    """Save nothing: the forward of a region that will be recomputed has no backward of its own."""


def _forgotten(nothing: None) -> Tensor:
    raise UserError(
        "a layer computes a gradient inside its forward, for which a recomputed layer has kept nothing; "
        "leave it out of `recompute`"
    )
