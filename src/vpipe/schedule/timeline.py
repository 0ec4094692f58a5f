"""What actions cost, and the event loop that turns their order into a timeline: ``verify`` and ``simulate`` share it.

Times of a stage are its own. ``uniform`` takes the numbers that papers use, the time of one rank's whole share of a
microbatch, and divides them by the number of stages a rank holds for one direction.

A program becomes lanes: a compute lane for every rank, a swap lane for every rank that swaps, and links between ranks.
A lane runs its actions one after the other; an action also waits for what comes from elsewhere: a backward for the
message with its gradient, a swap for the action it stands behind. A link carries its messages one after the other, in
the order of their receives. The loop runs every lane as far as it gets. What is left when no lane can move is a
deadlock, and the actions at the heads of the lanes say why.

Two models of a link:

    rendezvous   a transfer starts when its send and its receive are both posted (gloo at any size, NCCL)
    buffered     a transfer starts when its send is posted

``blocking_sends`` makes a rank wait at each SEND until its message has arrived, as a plain blocking ``send`` does. A
program that passes this under rendezvous hangs on no transport.

Needs between actions of one compute lane are met by their order; that the order is right is ``verify``'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import isfinite

import numpy as np

from vpipe.errors import UserError
from vpipe.schedule import wavefront
from vpipe.schedule.action import Kind
from vpipe.schedule.flat import (
    CODE,
    KINDS,
    NONE,
    EventNumber,
    Flat,
    Ints,
    Lanes,
    Transfers,
    collector_paused,
    find_transfers,
    previous,
)
from vpipe.schedule.placement import Placement
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import LANE, MEETINGS, SEND_OF, Lane, Message, rounds, sent_ahead
from vpipe.schedule.wavefront import Array, EventTimes


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
    weights: float = 0.0
    """One version of the stage's weights."""


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
                weights=share,
            )
        )
    return Costs(tuple(stages), latency, overhead)


WIDE = 128
"""Lanes, and actions of a lane, from which on running them all at once is worth a try."""


class LinkModel(StrEnum):
    """How a link behaves."""

    RENDEZVOUS = "rendezvous"
    BUFFERED = "buffered"


@dataclass(frozen=True)
class Timeline:
    """When every action began and ended, and when every transfer began and its message arrived; -1 is never."""

    flat: Flat
    transfers: Transfers
    lanes: list[list[EventNumber]]
    """The ranks' compute lanes first, then their swap lanes, then those of gradients."""
    begins: Array
    """By event; the last is that of the start of time."""
    ends: Array
    departed: Array
    arrived: Array

    @cached_property
    def begin(self) -> list[float]:
        """``begins`` for who asks for one after the other."""
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

    def message(self, number: int) -> Message:
        """A transfer in words."""
        send, receive = int(self.transfers.send[number]), int(self.transfers.receive[number])
        flat = self.flat
        return Message(flat.action(send), flat.action(receive), int(flat.rank[send]), int(flat.rank[receive]))


def run(
    program: Program,
    costs: Costs | None = None,
    *,
    transport: LinkModel = LinkModel.RENDEZVOUS,
    blocking_sends: bool = False,
) -> Timeline:
    """The timeline of a lowered program. Without costs every compute action takes one unit of time."""
    with collector_paused():
        flat = program.flat
        transfers = find_transfers(flat)
        lanes = Lanes(flat, transfers, transport is LinkModel.RENDEZVOUS, blocking_sends)
        times = loop(lanes, *_durations(flat, transfers, costs, blocking_sends))
        return Timeline(flat, transfers, lanes.lanes, *times)


def usual(program: Program) -> Timeline:
    """The timeline of a lowered program at ``uniform`` costs: ``verify`` and ``simulate`` both ask for it, so it is
    kept with the program."""
    known: Timeline | None = program.__dict__.get("usual")
    if known is None:
        known = program.__dict__["usual"] = run(program, uniform(program.placement))
    return known


def never_waits(timeline: Timeline) -> bool:
    """Whether the timeline proves that no blocking send hangs: each was posted for strictly before it is made.

    Give every action its time here, a SEND that of the end of the work before it. Along a row times do not fall; from a
    SEND to the action that takes its message neither, and that action takes time. If a SEND is also strictly later than
    what stands before its RECV, a cycle of waits would have to come back to an earlier time: there is none. Swaps and
    meetings wait for more: of them this says nothing. (``timeline`` is ``usual``: whatever takes a message takes time.)
    """
    flat, transfers = timeline.flat, timeline.transfers
    if flat.kinds & (MEETINGS | {Kind.OUT, Kind.IN}) or timeline.stuck:
        return False
    at = timeline.begins.copy()
    compute = flat.of(kind for kind in KINDS if LANE[kind] is Lane.COMPUTE)
    sends = flat.of(SEND_OF.values())
    at[:-1][sends] = timeline.ends[previous(flat, compute)[sends]]
    before = previous(flat, compute | sends)[transfers.receive]
    asked = before != len(flat)
    return bool((at[before[asked]] < at[transfers.send[asked]]).all())


def _durations(
    flat: Flat, transfers: Transfers, costs: Costs | None, blocking_sends: bool
) -> tuple[Array, Array, Array]:
    """Of every action, of every transfer, and the latency of each; a blocking SEND takes its transfer's time itself."""
    costs = costs or Costs(tuple(_UNIT for _ in range(flat.program.num_stages)))
    price, hop, lag = price_tables(costs)
    if blocking_sends:
        price[[CODE[Kind.SEND_F], CODE[Kind.SEND_B]]] = hop + lag
        nothing = np.zeros(len(transfers))
        return price[priced_as(flat), flat.stage], nothing, nothing
    way = directions(flat, transfers)
    stage = flat.stage[transfers.send]
    return price[priced_as(flat), flat.stage], hop[way, stage], lag[way, stage]


def priced_as(flat: Flat) -> Ints:
    """Per action the kind whose price it has: a REDUCE of what was sent ahead has only to come, as to an AGREE."""
    places = [*sent_ahead(flat.program)]
    if not places:
        return flat.kind
    kinds, met = flat.kind.copy(), rounds(flat.program)
    for meeting in places:
        for rank, index in met.get(meeting, {}).items():
            kinds[flat.row_start[rank] + index] = CODE[Kind.AGREE]
    return kinds


def directions(flat: Flat, transfers: Transfers) -> Ints:
    """0 for a message that goes forward, 1 for a gradient."""
    found: Ints = (flat.kind[transfers.send] == CODE[Kind.SEND_B]).astype(np.int64)
    return found


def price_tables(costs: Costs) -> tuple[Array, Array, Array]:
    """Seconds of (kind, stage), and of (direction, stage) what a message occupies its link and what it then waits."""
    stages = costs.stages
    price = [[_price(kind, cost) + costs.overhead * (LANE[kind] is Lane.COMPUTE) for cost in stages] for kind in KINDS]
    back = [cost.transfer if cost.transfer_back is None else cost.transfer_back for cost in stages]
    lag = [[cost.latency for cost in stages], [cost.latency_back for cost in stages]]
    waits = [[costs.latency if each is None else each for each in row] for row in lag]
    return np.array(price), np.array([[cost.transfer for cost in stages], back]), np.array(waits)


_UNIT = StageCosts(1.0, 1.0, 1.0, recompute=1.0, swap=1.0)


def _price(kind: Kind, cost: StageCosts) -> float:
    """How long an action occupies its lane. SEND and RECV only post: the transfer takes the time."""
    match kind:
        case Kind.F:
            return cost.forward
        case Kind.B:
            return cost.input_grad + cost.weight_grad
        case Kind.I:
            return cost.input_grad
        case Kind.W:
            return cost.weight_grad
        case Kind.R:
            return cost.recompute
        case Kind.OUT | Kind.IN:
            return cost.swap
        case Kind.REDUCE | Kind.SEND_W:
            return cost.reduce
        case Kind.STEP:
            return cost.step
        case _:
            return 0.0


def loop(graph: Lanes, duration: Array, transfer: Array, latency: Array) -> EventTimes:
    """When everything happens: of all lanes at once where the program is wide, else of one after the other."""
    num_lanes, num_events = len(graph.lanes), sum(map(len, graph.lanes))
    wide = not graph.extra and num_lanes >= WIDE and num_events >= num_lanes * WIDE
    found = wavefront.loop(graph, duration, transfer, latency) if wide else None
    return found or _loop(graph, duration.tolist(), transfer.tolist(), latency.tolist())


def _loop(graph: Lanes, duration: list[float], transfer: list[float], latency: list[float]) -> EventTimes:
    """Run each lane until it needs an action that has not ended; wake it when that action ends.

    A link needs no lane of its own: when an action asks for a message, every earlier one of its link was sent before.
    This is the inner loop of every simulation, so it keeps to local lists and calls nothing.
    """
    lanes, message, extra = graph.lanes, graph.message.tolist(), graph.extra
    sent, posted, link = graph.sent.tolist(), graph.posted.tolist(), graph.link.tolist()
    upcoming = graph.first_of_link.tolist()
    begin, end = [-1.0] * (graph.start + 1), [-1.0] * (graph.start + 1)
    begin[graph.start] = end[graph.start] = 0.0
    departed, arrived = [-1.0] * len(sent), [-1.0] * len(sent)
    free = [0.0] * len(upcoming)
    position, clock = [0] * len(lanes), [0.0] * len(lanes)
    waiter, after = [NONE] * (graph.start + 1), [NONE] * len(lanes)
    """The last lane that waits for an event, and for each lane the one that waited before it for the same."""
    runnable = list(range(len(lanes)))[::-1]  # the first ranks fill the pipeline without waiting
    while runnable:
        lane = runnable.pop()
        events, now = lanes[lane], clock[lane]
        missing: EventNumber = NONE
        for index in range(position[lane], len(events)):
            event = events[index]
            number = message[event]
            further = _NOTHING
            if extra and event in extra:
                further = extra[event].messages.copy()
                for need in extra[event].events:
                    if end[need] < 0:
                        missing = need
                        break
                    now = max(now, end[need])
            while number >= 0 and missing < 0:
                at = arrived[number]
                if at < 0:  # run the link up to this message
                    line = link[number]
                    current, free_at = upcoming[line], free[line]
                    while current <= number:
                        sender, receiver = sent[current], posted[current]
                        at, other = end[sender], end[receiver]
                        if at < 0 or other < 0:
                            missing = sender if at < 0 else receiver
                            break
                        if other > at:
                            at = other
                        if free_at > at:
                            at = free_at
                        departed[current] = at
                        free_at = at + transfer[current]
                        arrived[current] = at = free_at + latency[current]
                        current += 1
                    upcoming[line], free[line] = current, free_at
                if at > now:
                    now = at
                number = further.pop() if further else NONE
            if missing >= 0:
                position[lane], clock[lane] = index, now
                after[lane], waiter[missing] = waiter[missing], lane
                break
            begin[event] = now
            now += duration[event]
            end[event] = now
            asleep = waiter[event]
            while asleep >= 0:
                runnable.append(asleep)
                asleep = after[asleep]
    return np.array(begin), np.array(end), np.array(departed), np.array(arrived)


_NOTHING: list[int] = []
