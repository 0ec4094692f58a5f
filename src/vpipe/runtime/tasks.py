"""What a compiled program knows of its messages before it runs: where each comes from, where it goes, what it carries.

A ``Hop`` is one message between two stages. It is made once and used in every step, so that the loop looks nothing up:
the handler that makes a message leaves it in its hop, and the handler that sends or uses it finds it there.

    0F3 ──payload──▶ hop 0→1 of unit 3 ──payload──▶ 0SEND_F3          to another rank
    0F3 ──payload──▶ hop 0→1 of unit 3 ──payload──▶ 1F3               to a stage of this rank: the same hop
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from vpipe.runtime.flow import Flow, Value
from vpipe.runtime.stage import Stage
from vpipe.runtime.transport.wire import Envelope
from vpipe.schedule.program import Program


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
        self._hops: dict[Envelope, Hop] = {}
        self._tasks = {
            (stage, microbatch): self._task(stages[stage], microbatch) for stage, _, microbatch in program.rows[rank]
        }

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

    @property
    def are_empty(self) -> bool:
        """Whether no message waits."""
        return all(hop.payload is None for hop in self._hops.values())

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
            ranks = [self._program.placement.rank(stage, microbatch) for stage in (source, target)]
            peer = ranks[1] if ranks[0] == self._rank else ranks[0]
            values = self._flow.sent(target, source) if backward else self._flow.sent(source, target)
            self._hops[place] = Hop(place, peer, ranks[0] == ranks[1], values)
        return self._hops[place]


def remote(hops: Iterable[Hop]) -> tuple[Hop, ...]:
    """Those that leave this rank."""
    return tuple(hop for hop in hops if not hop.is_local)
