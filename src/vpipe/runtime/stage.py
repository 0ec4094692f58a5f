"""A stage: a slice of the model's layers, and what it remembers of each unit between forward and backward.

    forward    runs the regions in order and keeps their graphs
    recompute  runs the regions that kept nothing once more
    leave      hands over what the swapped regions saved; come_back asks for it
    backward   runs the graphs in reverse order
    weight     runs what the backward deferred

The stage knows nothing of ranks, messages or schedules: values come in as dicts and leave as dicts.

Words: docs/glossary.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_leaves

from vpipe.runtime.buffers import (
    ChangingBuffers,
    FoundState,
    generators_of,
    refusing_foreign_draws,
    refusing_shared_changes,
)
from vpipe.runtime.crossing import copied, detached, edge_of, mapped, overlap, run_backward, tensors_of
from vpipe.runtime.flow import Flow, Pending, Value
from vpipe.runtime.memory.saved_tensors import SavedTensors
from vpipe.runtime.memory.swap import Swappable
from vpipe.runtime.region import Region, RegionGraph, Retention, Run
from vpipe.runtime.split.deferred import WeightQueue
from vpipe.runtime.updates.weights import VersionedWeights, Weights

Loss = Callable[[Any, Any], Tensor]


class Unit:
    """What a stage remembers of one microbatch."""

    __slots__ = ("added", "found", "graphs", "loss", "run", "saved", "targets", "tied", "values", "version", "weight")

    def __init__(self, version: int, run: Run, targets: Any = None, weight: float = 1.0) -> None:
        self.version, self.run, self.targets, self.weight = version, run, targets, weight
        self.graphs: list[RegionGraph | None] = []
        self.values: dict[Value, Any] = {}
        """Inputs of the regions that will be recomputed."""
        self.found: FoundState | None = None
        """Buffers and generators of the layers that will be recomputed."""
        self.saved: SavedTensors | None = None
        """What the swapped regions saved."""
        self.loss: Tensor | None = None
        self.added: list[tuple[int, Tensor]] = []
        self.tied: set[Value] = set()
        """Values that share memory with another one, or a part of theirs with another part, where the model is not cut:
        here each has a copy, so that a change of one would not be seen in the other."""


@dataclass(frozen=True)
class StageOptions:
    """How a stage runs; the same for all stages of a pipeline but for the layers named."""

    versioned: bool = False
    splits: bool = False
    """Whether the program separates I and W at this stage."""
    stashes: bool = False
    """Whether what I computes of the weight gradient must wait for W: the program runs I in another order, or updates
    in between."""
    recompute: Collection[int] = ()
    """Layers whose activations are computed again instead of kept."""
    swap: Collection[int] = ()
    """Layers whose activations wait outside memory; none of those that are recomputed."""
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext

    def retention(self, layer: int) -> Retention:
        if layer in self.recompute:
            return Retention.RECOMPUTED
        return Retention.SWAPPED if layer in self.swap else Retention.KEPT


class Stage:
    """Stage ``index`` of ``flow``, with the modules of its layers."""

    def __init__(
        self, index: int, flow: Flow, modules: Mapping[int, nn.Module], loss: Loss, options: StageOptions
    ) -> None:
        self.index = index
        self.flow = flow
        self.modules = dict(modules)
        self.is_last = index == flow.num_stages - 1
        self.owned = dict(modules)
        """The layers, and at the last stage, under the number after the last layer, a loss that has a state:
        parameters, buffers, generators."""
        self.called = dict(modules)
        """The same with any loss that is a module."""
        if self.is_last and isinstance(loss, nn.Module):
            self.called[len(flow.layers)] = loss
            if [*loss.parameters(), *loss.buffers(), *generators_of([loss])]:
                self.owned[len(flow.layers)] = loss
        self.weights = VersionedWeights(self.owned, options.swap) if options.versioned else Weights(self.owned)
        self.units: dict[int, Unit] = {}
        self.options = options
        names = list(self.weights.parameters)
        self.queue = WeightQueue(names, options.stashes) if options.splits else None
        """The weight gradients that wait for their W, where the program separates them."""
        self.loss = loss
        readers = Counter(value for reads in flow.reads for value in dict.fromkeys(reads))
        self._shared = {value for value, number in readers.items() if number > 1}
        self._last_reads = {value: layer for layer, reads in enumerate(flow.reads) for value in reads}
        again = [each for layer, each in self.called.items() if min(layer, len(flow.layers) - 1) in options.recompute]
        self._found_again = list(dict.fromkeys(part for module in again for part in module.modules()))
        """Parts of recomputed layers, once they are known only those that hold buffers."""
        self._counting: set[nn.Module] = set()
        """Those of which a forward has been seen to change a number that is an attribute."""
        self._generators = generators_of(again)
        self.changing = ChangingBuffers(self.called)
        self.regions = self._cut()
        self._behind = [self._read_behind(max(region.modules)) for region in self.regions]
        """Per region, what of the values known at its end is read later, and where."""
        self._is_plain = False
        """Whether a forward is known to be that of one region and nothing else; most are."""

    def state(self) -> FoundState:
        """What the layers and the loss hold beside weights."""
        parts = dict.fromkeys(part for module in self.called.values() for part in module.modules())
        return FoundState(parts, generators_of(self.called.values()))

    def _cut(self) -> list[Region]:
        """Neighbouring layers of one retention form one region."""
        alike = [(retention, list(run)) for retention, run in groupby(self.modules, self.options.retention)]
        end = max(self.modules) + 1
        return [self._region(run, retention, end) for retention, run in alike]

    def _region(self, run: list[int], retention: Retention, end: int) -> Region:
        flow, last = self.flow, run[-1]
        # One tensor may leave by several names: the gradients of what is read latest come first, as in one process.
        later = {value: layer for layer in range(len(flow.layers) - 1, last, -1) for value in flow.reads[layer]}
        written = [(name, layer) for layer in run for name in flow.layers[layer].writes]
        given = sorted((value for value in written if value in later), key=lambda value: -later[value])
        if self.is_last and last == end - 1:
            given = list(flow.outputs())
        return Region(
            {layer: self.modules[layer] for layer in run},
            {layer: flow.layers[layer] for layer in run},
            {layer: flow.reads[layer] for layer in run},
            given,
            retention,
            self._shared,
            self._last_reads,
        )

    def forward(self, microbatch: int, unit: Unit, values: dict[Value, Any]) -> dict[Value, Any]:
        """Run a unit; the values that other stages read, still attached to nothing but their gradient edges."""
        self.weights.read(unit.version)
        self.units[microbatch] = unit
        if self._is_plain:
            given = self._run(self.regions[0], unit, values, build_graph=True)
            self._tie(unit, values, given, 0)
            return given
        found = FoundState(self._found_again, self._generators) if self._found_again or self._generators else None
        retentions = {region.retention for region in self.regions}
        unit.saved = self._pack(unit, values) if Retention.SWAPPED in retentions else None
        with self.changing.kept(partial(self._roots, unit)), self._unshared(), self._watched():
            given = self._forward(unit, values)
        if found is not None:
            unit.found = found.settle(self.changing.changing)
            self._counting.update(part for part, _ in unit.found.numbers)
            self._found_again = [part for part in self._found_again if part._buffers or part in self._counting]
        self._is_plain = retentions == {Retention.KEPT} and self.changing.are_none
        return given

    def _roots(self, unit: Unit) -> Iterator[GradientEdge]:
        """Where the backwards of a unit begin that autograd itself keeps the saved tensors for."""
        for region, graph in zip(self.regions, unit.graphs, strict=True):
            if graph is not None and region.retention is not Retention.SWAPPED:
                yield from (edge_of(tensor) for _, tensors in graph.given for tensor in tensors)
                yield from (edge for edge, *_ in graph.scalars)

    def _unshared(self) -> AbstractContextManager[None]:
        """Around the first forward, where layers of several stages hold one Python object."""
        if not self.changing.shared or self.changing.have_shown:
            return nullcontext()
        return refusing_shared_changes(f"a layer of stage {self.index}", self.changing.shared)

    def _watched(self) -> AbstractContextManager[None]:
        """Around the first forward, where the order of draws is not that of one process that keeps all."""
        alone = self.flow.num_stages == self.flow.layout.num_ranks == 1 and not self.options.recompute
        if alone or self.changing.have_shown:
            return nullcontext()
        return refusing_foreign_draws(
            f"a layer of stage {self.index} (layers {min(self.modules)} to {max(self.modules)})"
        )

    def _forward(self, unit: Unit, values: dict[Value, Any]) -> dict[Value, Any]:
        given: dict[Value, Any] = {}
        for number, region in enumerate(self.regions):
            if region.recompute:
                unit.values.update(region.held(values))
            given.update(self._run(region, unit, values, build_graph=not region.recompute))
            self._tie(unit, values, given, number)
            if region is not self.regions[-1]:
                values.update(_cut_off(given, region.given))
                if region.recompute:
                    _keep_apart(values, region.given, unit.values)
        return given

    def _read_behind(self, last: int) -> dict[Value, int]:
        """Values that are known at layer ``last`` and read behind it → the stage of the next reader."""
        found: dict[Value, int] = {}
        for layer in range(last + 1, len(self.flow.reads)):
            for value in self.flow.reads[layer]:
                here = value[1] >= min(self.modules) or any(value in self.flow.reads[each] for each in self.modules)
                if value[1] <= last and here:
                    found.setdefault(value, self.flow.layout.stages[layer])
        return found

    def _tie(self, unit: Unit, values: Mapping[Value, Any], given: Mapping[Value, Any], number: int) -> None:
        """Note which values share memory at the end of a region. One tensor by two names stays one on its way to one
        stage."""
        behind = self._behind[number]
        if not unit.tied and (not behind or (len(behind) == 1 and type(given.get(next(iter(behind)))) is Tensor)):
            return  # mostly
        holders: dict[int, dict[tuple[int, int], tuple[Tensor, list[Value]]]] = {}
        for value in dict.fromkeys((*behind, *unit.tied)):
            for tensor in tensors_of(given[value] if value in given else values[value]):
                alike = holders.setdefault(tensor.untyped_storage()._cdata, {})
                alike.setdefault((id(tensor), behind.get(value, -1)), (tensor, []))[1].append(value)
        for alike in holders.values():
            found = {value for _, names in alike.values() for value in names}
            if found & unit.tied or (len(alike) > 1 and overlap([tensor for tensor, _ in alike.values()])):
                unit.tied |= found

    def part(self, microbatch: int) -> None:
        """What a unit's forward gave is on its way: the stage lets go of it."""
        for graph in self.units[microbatch].graphs:
            if graph is not None:
                graph.part()

    def _run(
        self, region: Region, unit: Unit, values: Mapping[Value, Any], build_graph: bool, wants_loss: bool = True
    ) -> dict[Value, Any]:
        at_end = wants_loss and self.is_last and region is self.regions[-1]
        judge = self.loss if unit.run.training else getattr(self.loss, "judging", self.loss)  # without smoothing
        loss = (lambda output: judge(output, unit.targets)) if at_end else None
        saved = unit.saved if region.retention is Retention.SWAPPED else None
        outcome = region.forward(values, unit.run, loss, build_graph, saved, unit.tied)
        unit.graphs.append(outcome.graph)
        if outcome.added and unit.run.training:
            unit.added.extend(outcome.added)
        if outcome.loss is not None:
            unit.loss = outcome.loss
        return outcome.given if build_graph else _cut_off(outcome.given, outcome.given)

    def _pack(self, unit: Unit, values: Mapping[Value, Any]) -> SavedTensors:
        """Nothing saved yet; knows what must stay: what belongs to the layers, and what came without a gradient."""
        own = [tensor for module in self.called.values() for tensor in (*module.parameters(), *module.buffers())]
        given = [tensor for tensor in tree_leaves((values, unit.targets)) if isinstance(tensor, Tensor)]
        return SavedTensors([*own, *(t for t in given if not t.requires_grad)], self.changing.note)

    def leave(self, microbatch: int) -> list[Swappable]:
        """What a unit's swapped regions saved, to be carried out, and old weights that no other unit needs now."""
        unit = self.units[microbatch]
        if unit.saved is None:
            return []
        return [*unit.saved.leave(), *self.weights.leave(unit.version)]

    def come_back(self, microbatch: int) -> list[Swappable]:
        """What must be brought back before the unit's backward."""
        unit = self.units[microbatch]
        if unit.saved is None:
            return []
        return [*unit.saved.come_back(), *self.weights.come_back(unit.version)]

    def evaluate(self, unit: Unit, values: dict[Value, Any], wants_loss: bool) -> dict[Value, Any]:
        """A forward without gradients; at the last stage the loss, or the output itself."""
        for number, region in enumerate(self.regions):
            given = self._run(region, unit, values, build_graph=False, wants_loss=wants_loss)
            self._tie(unit, values, given, number)
            values.update(given)
        return values

    def recompute(self, microbatch: int) -> None:
        """Fill in the graphs that the forward left out, with the weights, random numbers and buffers it had."""
        unit = self.units[microbatch]
        self.weights.read(unit.version)
        with nullcontext() if unit.found is None else unit.found.again():
            for index, region in enumerate(self.regions):
                if region.recompute:
                    again = Unit(unit.version, unit.run, unit.targets)
                    self._run(region, again, unit.values, build_graph=True)
                    unit.graphs[index] = again.graphs[0]
        unit.values.clear()
        unit.found = None

    def backward(self, microbatch: int, pending: Pending, defer_weights: bool) -> Pending:
        """Turn the gradients of what the unit gave into the gradients of what it took."""
        unit = self.units[microbatch]
        self.weights.read(unit.version)  # a layer may compute parts of its forward again in the backward
        queue = self.queue if defer_weights else None
        if queue is not None:
            queue.open(microbatch, self.weights.leaves(unit.version))
        run = run_backward if queue is None else queue.backward
        for region, graph in zip(reversed(self.regions), reversed(unit.graphs), strict=True):
            assert graph is not None, f"stage {self.index}: R must come before the backward of microbatch {microbatch}"
            region.backward(graph, pending, unit.weight, run)
        if queue is not None:
            queue.close()
        unit.graphs.clear()
        if not defer_weights:
            self._finish(microbatch)
        return pending

    def weight_gradient(self, microbatch: int) -> None:
        """Compute what the backward deferred."""
        if self.queue is not None:
            self.queue.run(microbatch)
        self._finish(microbatch)

    def abandon(self) -> None:
        """Forget all units and their gradients: the step has failed."""
        self.units.clear()
        if self.queue is not None:
            self.queue.clear()
        for parameter in self.weights.parameters.values():
            parameter.grad = None

    def _finish(self, microbatch: int) -> None:
        self.weights.gather(self.units.pop(microbatch).version)


def _cut_off(given: Mapping[Value, Any], chosen: Iterable[Value]) -> dict[Value, Any]:
    """Values outside their graph, together: what is one tensor by two names stays one."""
    names = tuple(chosen)
    return dict(zip(names, detached(tuple(given[name] for name in names)), strict=True))


def _keep_apart(values: dict[Value, Any], given: Iterable[Value], held: Mapping[Value, Any]) -> None:
    """Copy what a region has given of what its recompute reads again (its input as it came, a view of it): the next
    region may change it."""
    storages = {tensor.untyped_storage()._cdata for tensor in tensors_of(tuple(held.values()))}

    def apart(tensor: Tensor) -> Tensor:
        return copied(tensor) if tensor.untyped_storage()._cdata in storages else tensor

    names = tuple(given)
    values.update(zip(names, mapped(tuple(values[name] for name in names), apart), strict=True))
