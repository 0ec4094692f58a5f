"""What actions cost, and when they happen under these costs: ``verify`` and ``simulate`` share it.

Times of a stage are its own. ``uniform`` takes the numbers that papers use, the time of one rank's whole share of a
microbatch, and divides them by the number of stages a rank holds for one direction.

A program becomes lanes: a compute lane for every rank, a swap lane for every rank that swaps, and links between ranks.
A lane runs its actions one after the other; an action also waits for what comes from elsewhere: a backward for the
message with its gradient, a swap for the action it stands behind. A link carries its messages one after the other, in
the order of their receives. ``graph`` has when all that happens; what never does is a deadlock, and the first such
actions of the lanes say why.

A transfer starts when its send and its receive are both posted (gloo at any size, NCCL). ``blocking_sends`` makes a
rank wait at each SEND until its message has arrived, as a plain blocking ``send`` does. A program that passes this
hangs on no transport. With ``blocking_receives`` it also waits at each RECV
until its messages have come, and at a SEND for the neighbouring stage alone: a program that passes this runs on devices
that wait for their transfers.

Needs between actions of one compute lane are met by their order; that the order is right is ``verify``'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import isfinite

import numpy as np

from vpipe.errors import UserError
from vpipe.schedule.flat import KINDS, EventNumber, Flat
from vpipe.schedule.graph import Array, ProgramGraph
from vpipe.schedule.placement import Placement
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import LANE, PRICE, Lane


@dataclass(frozen=True)
class StageCosts:
    """Time and memory of one stage for one unit."""

    forward: float
    input_grad: float
    weight_grad: float
    recompute: float = 0.0
    swap: float = 0.0
    """One way: the time that an OUT or an IN occupies the swap lane."""
    reduce: float = 0.0
    step: float = 0.0
    activations: float = 1.0
    """What a unit's forward saves until its backward."""
    kept: float = 0.0
    """What remains of it between F and R, or OUT and IN, where the program has them."""
    transfer: float = 0.0
    """The time a message that leaves the stage occupies its link."""
    transfer_back: float | None = None
    """The same for a gradient, which leaves over the link before the stage; ``None``: as ``transfer``."""
    latency: float | None = None
    """Of the link behind the stage, where links differ; ``None``: ``Costs.latency``."""
    latency_back: float | None = None
    """Of the link before the stage."""


@dataclass(frozen=True)
class Costs:
    """Costs of every stage, and what a message or an action costs beside."""

    stages: tuple[StageCosts, ...]
    latency: float = 0.0
    """From the end of a send's transfer to the arrival: it delays and occupies nothing."""
    overhead: float = 0.0
    """Added to every compute action: what the runtime itself takes."""


def uniform(
    placement: Placement,
    *,
    forward: float = 1.0,
    input_grad: float = 1.0,
    weight_grad: float = 1.0,
    latency: float = 0.0,
    transfer: float = 0.0,
    overhead: float = 0.0,
    scale: Sequence[float] | None = None,
) -> Costs:
    """Every rank's share costs the same; its stages cost equal parts of it, times their factors in ``scale``."""
    given = locals()
    for name in ("forward", "input_grad", "weight_grad", "latency", "transfer", "overhead"):
        if not isfinite(given[name]) or given[name] < 0:
            raise UserError(f"--{name.replace('_', '-')} is {given[name]}, but a time is a finite number of at least 0")
    scale = [1.0] * placement.num_stages if scale is None else scale
    if len(scale) != placement.num_stages:
        raise UserError(f"--scale has {len(scale)} factors, but the program has {placement.num_stages} stages")
    for stage, factor in enumerate(scale):
        if not isfinite(factor) or factor < 0:
            raise UserError(f"--scale is {factor} for stage {stage}, but a factor is a finite number of at least 0")
    stages = []
    for stage in range(placement.num_stages):
        share = 1 / max(len(placement.stages_of[r]) / placement.num_directions(r) for r in placement.ranks_of[stage])
        stages.append(
            StageCosts(
                forward * share * scale[stage],
                input_grad * share * scale[stage],
                weight_grad * share * scale[stage],
                recompute=forward * share * scale[stage],
                activations=share,
                transfer=transfer,
            )
        )
    return Costs(tuple(stages), latency, overhead)


@dataclass(frozen=True)
class Timeline:
    """When every action began and ended; -1 is never."""

    flat: Flat
    lanes: list[list[EventNumber]]
    """The ranks' compute lanes first, then their swap lanes."""
    begins: Array
    """By event; the last is that of the start of time."""
    ends: Array

    @cached_property
    def begin(self) -> list[float]:
        """``begins`` as a list, from which single times are read fastest."""
        listed: list[float] = self.begins.tolist()
        return listed

    @cached_property
    def end(self) -> list[float]:
        listed: list[float] = self.ends.tolist()
        return listed

    @cached_property
    def stuck(self) -> list[EventNumber]:
        """The first action that each lane could not run: empty if the program ends."""
        halted = (lane for lane in self.lanes if lane and self.ends[lane[-1]] < 0)  # a lane runs in its order
        return [next(event for event in lane if self.end[event] < 0) for lane in halted]


def run(
    program: Program,
    costs: Costs | None = None,
    *,
    blocking_sends: bool = False,
    blocking_receives: bool = False,
) -> Timeline:
    """The timeline of a lowered program. Without costs every compute action takes one unit of time."""
    graph = ProgramGraph(program, blocking=blocking_sends, blocking_receives=blocking_receives)
    price, hop, lag = price_tables(costs or Costs((_UNIT,) * program.num_stages))
    return Timeline(graph.flat, graph.lanes, *graph.times(graph.table(price, hop, lag), lag))


def price_tables(costs: Costs) -> tuple[Array, Array, Array]:
    """Seconds of (kind, stage), and of (direction, stage) what a message occupies its link and what it then waits."""
    stages = costs.stages
    times = {part: np.array([getattr(cost, part) for cost in stages]) for part in {*chain(*PRICE.values())}}
    price = np.zeros((len(KINDS), len(stages)))
    for code, kind in enumerate(KINDS):
        price[code] = sum(times[part] for part in PRICE[kind]) + costs.overhead * (LANE[kind] is Lane.COMPUTE)
    back = [cost.transfer if cost.transfer_back is None else cost.transfer_back for cost in stages]
    lag = [[cost.latency for cost in stages], [cost.latency_back for cost in stages]]
    waits = [[costs.latency if each is None else each for each in row] for row in lag]
    return price, np.array([[cost.transfer for cost in stages], back]), np.array(waits)


_UNIT = StageCosts(1.0, 1.0, 1.0, recompute=1.0, swap=1.0)
