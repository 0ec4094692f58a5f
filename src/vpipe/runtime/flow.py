"""Who reads what from whom: the names of the layer contract, resolved once for a partition.

A *value* is a name together with the layer that wrote it (-1 for an input of the model): ``("x", 3)`` is the ``x`` that
layer 3 wrote. A value goes directly from the stage that holds its writer to every stage that reads it, over any
distance. The model's inputs belong to stage 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from vpipe.errors import UserError
from vpipe.layer import Layer, bind_inputs, input_names
from vpipe.schedule.placement import Layout

Value = tuple[str, int]
INPUT = -1


@dataclass(frozen=True)
class Flow:
    """Reads and writes of every layer, as values; the layout says which stage holds a layer."""

    layers: tuple[Layer, ...]
    layout: Layout
    reads: tuple[tuple[Value, ...], ...]
    """Per layer, the values it reads, in the order of ``Layer.reads``."""
    inputs: tuple[str, ...]

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Per stage, its layers as a half-open interval."""
        return self.layout.bounds

    @property
    def num_stages(self) -> int:
        return self.layout.num_stages

    def stage_of(self, value: Value) -> int:
        """The stage that holds the writer of a value; the inputs are with the first layer, the loss with the last."""
        return self.layout.stages[min(max(value[1], 0), len(self.layers) - 1)]

    def bound(self, inputs: object) -> dict[Value, object]:
        """The model's inputs as values."""
        return {(name, INPUT): value for name, value in bind_inputs(self.inputs, inputs).items()}

    def outputs(self) -> tuple[Value, ...]:
        """What the last layer writes: the model's output."""
        last = len(self.layers) - 1
        return tuple((name, last) for name in self.layers[last].writes)

    def taken(self, begin: int, end: int) -> tuple[Value, ...]:
        """The values that layers ``begin..end-1`` read from before."""
        found = {value: None for layer in range(begin, end) for value in self.reads[layer] if value[1] < begin}
        return tuple(found)

    @cached_property
    def _sent(self) -> dict[tuple[int, int], tuple[Value, ...]]:
        found: dict[tuple[int, int], tuple[Value, ...]] = {}
        for target, bounds in enumerate(self.bounds):
            for value in self.taken(*bounds):
                key = (self.stage_of(value), target)
                found[key] = (*found.get(key, ()), value)
        return found

    def sent(self, source: int, target: int) -> tuple[Value, ...]:
        """The values that stage ``target`` reads from stage ``source``."""
        return self._sent.get((source, target), ())

    def skips(self) -> frozenset[tuple[int, int]]:
        """Pairs of stages that exchange values beside the chain."""
        return frozenset(
            (source, target)
            for target in range(self.num_stages)
            for source in range(target - 1)
            if self.sent(source, target)
        )


def resolve(layers: Sequence[Layer], layout: Layout) -> Flow:
    """The flow of ``layers`` between the stages of a layout."""
    if layout.num_layers != len(layers):
        raise UserError(
            f"the partition {list(layout.counts)} covers {layout.num_layers} layers, but the model has {len(layers)}; "
            f"make the sum {len(layers)}"
        )
    writer = dict.fromkeys(input_names(layers), INPUT)
    reads = []
    for index, layer in enumerate(layers):
        reads.append(tuple((name, writer[name]) for name in layer.reads))
        writer.update(dict.fromkeys(layer.writes, index))
    return Flow(tuple(layers), layout, tuple(reads), input_names(layers))
