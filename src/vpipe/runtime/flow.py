"""Who reads what from whom: the names of the layer contract, resolved once for a partition, and the messages of it.

A *value* is a name together with the layer that wrote it (-1 for an input of the model): ``("x", 3)`` is the ``x`` that
layer 3 wrote. A value goes from the stage that holds its writer to the first stage that reads it, over any distance,
and from there to the next one. Its gradient comes back the same way, and each reader adds to it, the latest first: so
the sum has the brackets that autograd gives it in one process. The model's inputs belong to stage 0.

A ``Hop`` is one message between two stages: where it comes from, where it goes, what it carries. It is made when a
program is compiled and used in every step, so that the loop looks nothing up: the handler that makes a message leaves
it in its hop, and the handler that sends or uses it finds it there.

    0F3 ──payload──▶ hop 0→1 of unit 3 ──payload──▶ 0SEND_F3          to another rank
    0F3 ──payload──▶ hop 0→1 of unit 3 ──payload──▶ 1F3               to a stage of this rank: the same hop

Words: docs/glossary.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from vpipe.errors import UserError
from vpipe.layer import Layer, bind_inputs, input_names
from vpipe.runtime.crossing import Gradients
from vpipe.runtime.transport.wire import Envelope
from vpipe.schedule.placement import Layout
from vpipe.schedule.program import Program

if TYPE_CHECKING:
    from vpipe.runtime.stage import Stage

Value = tuple[str, int]
INPUT = -1
Pending = dict[Value, Gradients]
"""Value → the gradients of its tensors that need one, summed over the readers so far."""


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
        return self.layout.stage_of(max(value[1], 0))

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
        holders: dict[Value, int] = {}
        for target, bounds in enumerate(self.bounds):
            for value in self.taken(*bounds):
                key = (holders.get(value, self.stage_of(value)), target)
                found[key] = (*found.get(key, ()), value)
                holders[value] = target
        return found

    def sent(self, source: int, target: int) -> tuple[Value, ...]:
        """The values that stage ``target`` gets from stage ``source``: their writer, or the reader before."""
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


def listed(values: Sequence[Value], pending: Pending) -> tuple[Any, ...]:
    """The gradients of these values as a message: of each value the number of its gradients, and they themselves.
    (What is flat is described, packed and read fastest.)"""
    found: list[Any] = []
    for value in values:
        gradients = pending.get(value, ())
        found.append(len(gradients))
        found.extend(gradients)
    return tuple(found)


def unlisted(values: Sequence[Value], message: Sequence[Any], pending: Pending) -> None:
    """Put what a message of ``listed`` says into ``pending``."""
    at = 0
    for value in values:
        begin = at + 1
        at = begin + message[at]
        pending[value] = list(message[begin:at])


@dataclass(slots=True, eq=False)
class Hop:
    """A message, seen from one rank. ``values`` are those of the stage that writes them, in both directions."""

    envelope: Envelope
    peer: int
    """The rank at the other end."""
    is_local: bool
    values: tuple[Value, ...]
    payload: Any = None


class Task(NamedTuple):
    """One unit at one stage, and the messages that it exchanges with other stages."""

    stage: Stage
    microbatch: int
    inputs: tuple[Hop, ...]
    outputs: tuple[Hop, ...]
    output_gradients: tuple[Hop, ...]
    input_gradients: tuple[Hop, ...]
    sends: bool
    """Whether an output goes to another rank."""


class Tasks:
    """The tasks of one rank in a program."""

    def __init__(self, program: Program, flow: Flow, rank: int, stages: Mapping[int, Stage]) -> None:
        self._program, self._flow, self._rank = program, flow, rank
        self._row = flow.layout.row(rank)
        self._hops: dict[Envelope, Hop] = {}
        places = ((stage, microbatch) for stage, _, microbatch in program.rows[self._row])
        self._tasks = {(stage, microbatch): self._task(stages[stage], microbatch) for stage, microbatch in places}

    def __getitem__(self, place: tuple[int, int]) -> Task:
        """The task of (stage, microbatch)."""
        return self._tasks[place]

    def begin(self, step: int) -> None:
        """Address all messages for a step."""
        make = tuple.__new__  # as Envelope does, without a call of Python for each
        for hop in self._hops.values():
            hop.envelope = make(Envelope, (step, *hop.envelope[1:]))

    def clear(self) -> None:
        """Drop what a failed step has left."""
        for hop in self._hops.values():
            hop.payload = None

    def _task(self, stage: Stage, microbatch: int) -> Task:
        here, program = stage.index, self._program

        def hops(others: Iterable[int], arrives: bool, backward: bool) -> tuple[Hop, ...]:
            ends = [(other, here) if arrives else (here, other) for other in others if microbatch >= 0]
            return tuple(self._hop(source, target, microbatch, backward) for source, target in ends)

        writers, readers = program.writers[here], program.readers[here]
        outputs = hops(readers, arrives=False, backward=False)
        return Task(
            stage,
            microbatch,
            inputs=hops(writers, arrives=True, backward=False),
            outputs=outputs,
            output_gradients=hops(readers, arrives=True, backward=True),
            input_gradients=hops(writers, arrives=False, backward=True),
            sends=any(not hop.is_local for hop in outputs),
        )

    def _hop(self, source: int, target: int, microbatch: int, backward: bool) -> Hop:
        place = Envelope(0, source, target, microbatch, int(backward))
        if place not in self._hops:
            rows = [self._program.placement.rank(stage, microbatch) for stage in (source, target)]
            peer = self._flow.layout.opposite(self._rank, rows[1] if rows[0] == self._row else rows[0])
            values = self._flow.sent(target, source) if backward else self._flow.sent(source, target)
            self._hops[place] = Hop(place, peer, rows[0] == rows[1], values)
        return self._hops[place]


def remote(hops: Iterable[Hop]) -> tuple[Hop, ...]:
    """Those that leave this rank."""
    return tuple(hop for hop in hops if not hop.is_local)
