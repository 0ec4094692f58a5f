"""Which messages share an order: a queue of the threads of a process, a communicator between devices.

Both match messages by their order alone. The verifier has checked that order queue by queue (``semantics.channel``):
the messages between neighbouring stages from one rank to another are one queue, and every skip is one of its own. So
neither direction ever waits for the other.
"""

from __future__ import annotations

from typing import NamedTuple

from vpipe.runtime.transport.wire import Envelope
from vpipe.schedule.placement import Layout
from vpipe.schedule.program import Program

CHAIN = (-1, -1)


class Route(NamedTuple):
    """A queue of messages from one rank to another."""

    source: int
    target: int
    skip: tuple[int, int] = CHAIN
    """(stage that sends, stage that receives) of a skip."""


def route_of(envelope: Envelope, source: int, target: int) -> Route:
    """The route of a message between two ranks. Buffers for the replicas of a stage go with the chain."""
    return Route(
        source, target, CHAIN if abs(envelope.source - envelope.target) <= 1 else (envelope.source, envelope.target)
    )


def routes(program: Program, layout: Layout) -> list[Route]:
    """All routes of a program, in the same order on every rank."""
    found: dict[Route, None] = {}
    placement = program.placement
    for stage, readers in enumerate(program.readers):
        for reader in readers:
            for microbatch in range(min(program.num_microbatches, placement.period)):
                here, there = placement.rank(stage, microbatch), placement.rank(reader, microbatch)
                if here != there:
                    found[route_of(Envelope(0, stage, reader, microbatch, 0), here, there)] = None
                    found[route_of(Envelope(0, reader, stage, microbatch, 1), there, here)] = None
    for first, *others in layout.circles():
        found |= {Route(first, other): None for other in others}
    return list(found)
