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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn, strided
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from vpipe.runtime.crossing import detached, run_backward
from vpipe.runtime.device import is_host
from vpipe.runtime.flow import Flow, Pending, Value
from vpipe.runtime.memory.saved_tensors import SavedTensor, SavedTensors
from vpipe.runtime.memory.swap import Swappable
from vpipe.runtime.region import Region, RegionGraph, Retention, Run
from vpipe.runtime.split.deferred import WeightQueue
from vpipe.runtime.updates.weights import VersionedWeights, Weights

Loss = Callable[[Any, Any], Tensor]


class Unit:
    """What a stage remembers of one microbatch."""

    __slots__ = ("added", "buffers", "graphs", "loss", "run", "saved", "targets", "values", "version", "weight")

    def __init__(self, version: int, run: Run, targets: Any = None, weight: float = 1.0) -> None:
        self.version, self.run, self.targets, self.weight = version, run, targets, weight
        self.graphs: list[RegionGraph | None] = []
        self.values: dict[Value, Any] = {}
        """Inputs of the regions that will be recomputed."""
        self.buffers: list[tuple[nn.Module, str, Tensor | None]] = []
        """The buffers of recomputed layers as the forward found them: (module, slot, buffer)."""
        self.saved: SavedTensors | None = None
        """What the swapped regions saved."""
        self.loss: Tensor | None = None
        self.added: list[tuple[int, Tensor]] = []


@dataclass(frozen=True)
class StageOptions:
    """How a stage runs; the same for all stages of a pipeline but for the layers named."""

    versioned: bool = False
    splits: bool = False
    """Whether the program separates I and W at this stage."""
    stashes: bool = False
    """Whether what I computes of the weight gradient must wait for W: the program runs I in another order, or updates
    in between."""
    fused: bool = False
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
        """The layers, and at the last stage, under the number after the last layer, a loss that has parameters."""
        called = dict(modules)
        if self.is_last and isinstance(loss, nn.Module):
            called[len(flow.layers)] = loss
            if any(True for _ in loss.parameters()):
                self.owned[len(flow.layers)] = loss
        self.weights = VersionedWeights(self.owned, options.swap) if options.versioned else Weights(self.owned)
        self.units: dict[int, Unit] = {}
        self.options = options
        names = list(self.weights.parameters)
        self.queue = WeightQueue(names, options.fused, options.stashes) if options.splits else None
        """The weight gradients that wait for their W, where the program separates them."""
        self.loss = loss
        readers = Counter(value for reads in flow.reads for value in dict.fromkeys(reads))
        self._shared = {value for value, number in readers.items() if number > 1}
        self._buffers = [
            (part, slot)
            for layer, module in called.items()
            if min(layer, len(flow.layers) - 1) in options.recompute
            for part in module.modules()
            for slot, buffer in part.named_buffers(recurse=False)
        ]
        self._called = list(called.values())
        self._changing = ChangingBuffers(self._called)
        self.regions = self._cut()
        self._swapped = [region for region in self.regions if region.retention is Retention.SWAPPED]
        kept = len(self.regions) == 1 and self.regions[0].retention is Retention.KEPT
        self._is_plain = kept and not self._buffers and self._changing.are_none
        """Whether a forward is that of one region and nothing else; most are."""

    @property
    def buffer_slots(self) -> list[tuple[nn.Module, str]]:
        """Where the layers and the loss hold buffers."""
        parts = [part for module in self._called for part in module.modules()]
        return [(part, slot) for part in parts for slot, _ in part.named_buffers(recurse=False)]

    def _cut(self) -> list[Region]:
        """Neighbouring layers of one retention form one region."""
        alike = [(retention, list(run)) for retention, run in groupby(self.modules, self.options.retention)]
        end = max(self.modules) + 1
        return [self._region(run, retention, end) for retention, run in alike]

    def _region(self, run: list[int], retention: Retention, end: int) -> Region:
        flow, last = self.flow, run[-1]
        later = {value for layer in range(last + 1, len(flow.layers)) for value in flow.reads[layer]}
        written = [(name, layer) for layer in run for name in flow.layers[layer].writes]
        given = [value for value in written if value in later]
        if self.is_last and last == end - 1:
            given = list(flow.outputs())
        return Region(
            {layer: self.modules[layer] for layer in run},
            {layer: flow.layers[layer] for layer in run},
            {layer: flow.reads[layer] for layer in run},
            given,
            retention,
            self._shared,
        )

    def forward(self, microbatch: int, unit: Unit, values: dict[Value, Any]) -> dict[Value, Any]:
        """Run a unit; the values that other stages read, still attached to nothing but their gradient edges."""
        self.weights.read(unit.version)
        self.units[microbatch] = unit
        if self._is_plain:
            return self._run(self.regions[0], unit, values, build_graph=True)
        before = [_Seen(part, slot) for part, slot in self._buffers]
        unit.saved = self._pack(unit, values) if self._swapped else None
        if self._changing.are_none:
            given = self._forward(unit, values)
        else:
            with self._changing.kept():
                given = self._forward(unit, values)
        unit.buffers.extend([(seen.part, seen.slot, seen.as_found()) for seen in before])
        return given

    def _forward(self, unit: Unit, values: dict[Value, Any]) -> dict[Value, Any]:
        given: dict[Value, Any] = {}
        for region in self.regions:
            given.update(self._run(region, unit, values, build_graph=not region.recompute))
            if region.recompute:
                unit.values.update({value: values[value] for value in region.taken})
            if region is not self.regions[-1]:
                values.update({value: detached(given[value]) for value in region.given})
        return given

    def part(self, microbatch: int) -> None:
        """What a unit's forward gave is on its way: the stage lets go of it."""
        for graph in self.units[microbatch].graphs:
            if graph is not None:
                graph.part()

    def _run(self, region: Region, unit: Unit, values: Mapping[Value, Any], build_graph: bool) -> dict[Value, Any]:
        at_end = self.is_last and region is self.regions[-1]
        loss = (lambda output: self.loss(output, unit.targets)) if at_end else None
        saved = unit.saved if region.retention is Retention.SWAPPED else None
        outcome = region.forward(values, unit.run, loss, build_graph, saved)
        unit.graphs.append(outcome.graph)
        if outcome.added:
            unit.added.extend(outcome.added)
        if outcome.loss is not None:
            unit.loss = outcome.loss
        return outcome.given if build_graph else {value: detached(given) for value, given in outcome.given.items()}

    def _pack(self, unit: Unit, values: Mapping[Value, Any]) -> SavedTensors:
        """Nothing saved yet; knows what must stay: what belongs to the layers, and what came without a gradient."""
        own = [tensor for module in self._called for tensor in (*module.parameters(), *module.buffers())]
        given = [tensor for tensor in tree_leaves((values, unit.targets)) if isinstance(tensor, Tensor)]
        return SavedTensors([*own, *(t for t in given if not t.requires_grad)], self._changing.note)

    def leave(self, microbatch: int) -> list[Swappable]:
        """What a unit's swapped regions saved, to be carried out, and old weights that nobody else needs now."""
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

    def evaluate(
        self, values: dict[Value, Any], run: Run, targets: Any, wants_loss: bool
    ) -> tuple[dict[Value, Any], Tensor | None]:
        """A forward without gradients; at the last stage the loss, or the output itself."""
        loss = None
        for region in self.regions:
            at_end = wants_loss and self.is_last and region is self.regions[-1]
            outcome = region.forward(
                values, run, (lambda output: self.loss(output, targets)) if at_end else None, build_graph=False
            )
            values.update(outcome.given)
            loss = outcome.loss
        return values, loss

    def recompute(self, microbatch: int) -> None:
        """Fill in the graphs that the forward left out, with the weights, random numbers and buffers it had."""
        unit = self.units[microbatch]
        self.weights.read(unit.version)
        # The slots get what the forward found: copying into the buffers would tell autograd that they have changed.
        current = [(part, slot, part._buffers[slot]) for part, slot in self._buffers]
        _set_buffers(unit.buffers)
        for index, region in enumerate(self.regions):
            if region.recompute:
                again = Unit(unit.version, unit.run, unit.targets)
                self._run(region, again, unit.values, build_graph=True)
                unit.graphs[index] = again.graphs[0]
        unit.values.clear()
        unit.buffers.clear()
        _set_buffers(current)

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


class _Seen:
    """A buffer as a forward found it: itself where the forward leaves it alone, else a copy."""

    def __init__(self, part: nn.Module, slot: str) -> None:
        self.part, self.slot = part, slot
        self._buffer = part._buffers[slot]
        self._copy = None if self._buffer is None else self._buffer.clone()
        self._version = 0 if self._buffer is None else self._buffer._version

    def as_found(self) -> Tensor | None:
        buffer, copy = self._buffer, self._copy
        if buffer is None or copy is None:
            return None
        if is_host(buffer.device):
            return buffer if torch.equal(buffer, copy) else copy
        # To compare values the host would wait. Normalisations change their statistics behind the version's back.
        counts = not (isinstance(self.part, _NormBase) and self.part.training)
        return buffer if counts and buffer._version == self._version else copy


def _set_buffers(buffers: Sequence[tuple[nn.Module, str, Tensor | None]]) -> None:
    for part, slot, buffer in buffers:
        part._buffers[slot] = buffer


class ChangingBuffers:
    """The buffers of a stage that a forward changes in place and then reads: a running mean of the user's own, a
    codebook, a counter.

    One process runs a unit's backward before the next unit's forward. A pipeline does not, so the backward would find
    the buffer as a later unit has left it, and autograd would refuse it. Where a stage's forward has changed a buffer,
    what autograd has saved of its buffers therefore becomes a copy at the forward's end:

        unit 0   buffer += 1; y = x * buffer      has saved the buffer; then a copy of it
        unit 1   buffer += 1; y = x * buffer      changes the buffer, not the copy

    The first forward finds out; a stage whose buffers stay constant pays nothing later. One that begins to change them
    afterwards is refused by autograd once, in words, if units were under way, and runs from the next step on.
    Statistics of torch's own norms are left out: their kernels change them and read them as they should.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parts = {part: None for module in modules for part in module.modules() if not isinstance(part, _NormBase)}
        self._slots = [(part, slot) for part in parts for slot, _ in part.named_buffers(recurse=False)]
        self._seen = False
        self._change = False
        self._storages: frozenset[int] = frozenset()
        self._held: list[SavedTensor] = []

    @property
    def are_none(self) -> bool:
        return not self._slots

    def note(self, tensor: Tensor, saved: SavedTensor) -> None:
        """Autograd has saved a tensor; perhaps a part of a buffer."""
        if self._storages and tensor.layout is strided and tensor.untyped_storage()._cdata in self._storages:
            self._held.append(saved)

    def _pack(self, tensor: Tensor) -> SavedTensor:
        saved = SavedTensor(tensor, None)
        self.note(tensor, saved)
        return saved

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around a forward: what it saves of a changing buffer stays as it is at the end."""
        if not self._slots:
            yield
            return
        buffers = [buffer for part, slot in self._slots if (buffer := part._buffers[slot]) is not None]
        before = [buffer._version for buffer in buffers]
        try:
            if self._seen and not self._change:
                yield
            else:
                self._storages = frozenset(buffer.untyped_storage()._cdata for buffer in buffers)
                with saved_tensors_hooks(self._pack, SavedTensor.get):
                    yield
            self._seen = True
            self._change = self._change or before != [buffer._version for buffer in buffers]
            for saved in self._held if self._change else ():
                saved.keep()
        finally:
            self._held.clear()
            self._storages = frozenset()
