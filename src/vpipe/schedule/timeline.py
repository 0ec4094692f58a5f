"""The event loop that ``verify`` and ``simulate`` share.

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

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from vpipe.schedule.action import Kind
from vpipe.schedule.costs import Costs, StageCosts
from vpipe.schedule.flat import KINDS, NONE, Bools, Flat, Ints, padded
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import LANE, NEEDS, SEND_OF, Lane, Message


class Transport(StrEnum):
    """How a link behaves."""

    RENDEZVOUS = "rendezvous"
    BUFFERED = "buffered"


Event = int
"""The number of an action in ``Flat``; the number after the last is the start of time."""


@dataclass(frozen=True)
class Transfers:
    """Messages between ranks, link by link; within a link in the order in which their receives are posted."""

    send: Ints
    receive: Ints
    link: Ints
    """Numbers of the ordered pairs of ranks, from 0."""

    def __len__(self) -> int:
        return len(self.send)


@dataclass(frozen=True)
class Timeline:
    """When every action began and ended, and when every transfer began and its message arrived; -1 is never."""

    flat: Flat
    transfers: Transfers
    lanes: list[list[Event]]
    """The ranks' compute lanes first, then their swap lanes."""
    begin: list[float]
    end: list[float]
    departed: list[float]
    arrived: list[float]

    @property
    def stuck(self) -> list[Event]:
        """The first action that each lane could not run: empty if the program ends."""
        heads = (next((event for event in lane if self.end[event] < 0), None) for lane in self.lanes)
        return [event for event in heads if event is not None]

    def message(self, number: int) -> Message:
        """A transfer in words."""
        send, receive = int(self.transfers.send[number]), int(self.transfers.receive[number])
        flat = self.flat
        return Message(flat.action(send), flat.action(receive), int(flat.rank[send]), int(flat.rank[receive]))


def run(
    program: Program,
    costs: Costs | None = None,
    *,
    transport: Transport = Transport.RENDEZVOUS,
    blocking_sends: bool = False,
) -> Timeline:
    """The timeline of a lowered program. Without costs every compute action takes one unit of time."""
    flat = Flat(program)
    transfers = find_transfers(flat)
    graph = _Graph(flat, transfers, transport is Transport.RENDEZVOUS, blocking_sends)
    return Timeline(flat, transfers, graph.lanes, *_loop(graph, *_durations(flat, transfers, costs, blocking_sends)))


def find_transfers(flat: Flat) -> Transfers:
    """Every message whose SEND and RECV the program has."""
    program = flat.program
    nothing = np.empty(0, np.int64)
    parts: list[tuple[Ints, Ints, Ints]] = [(nothing, nothing, nothing)]
    for receive_kind, senders in ((Kind.RECV_F, program.writers), (Kind.RECV_B, program.readers)):
        receives = np.flatnonzero(flat.of([receive_kind]) & (flat.stage < program.num_stages))
        stage, microbatch = flat.stage[receives], flat.microbatch[receives]
        for turn, sender in enumerate(padded(senders)[stage].T):
            send = flat.find(SEND_OF[receive_kind], sender, microbatch)
            travels = (send != NONE) & (flat.rank_of(sender, microbatch) != flat.rank_of(stage, microbatch))
            parts.append((send[travels], receives[travels], np.full(int(travels.sum()), turn)))
    send, receive, turns = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    _, link = np.unique(flat.rank[send] * program.num_ranks + flat.rank[receive], return_inverse=True)
    order = np.lexsort((turns, receive, link))
    return Transfers(send[order], receive[order], link[order])


class _Graph:
    """Lanes of actions, and what each action needs from elsewhere: messages, and actions of other lanes."""

    def __init__(self, flat: Flat, transfers: Transfers, rendezvous: bool, blocking_sends: bool) -> None:
        self.start: Event = len(flat)
        in_lane = {lane: flat.of(kind for kind in KINDS if LANE[kind] is lane) for lane in Lane}
        blocking = in_lane[Lane.COMPUTE] | (flat.of(SEND_OF.values()) & blocking_sends)
        before = _previous(flat, blocking, self.start)
        self.sent: list[Event] = (transfers.send if blocking_sends else before[transfers.send]).tolist()
        posted = before[transfers.receive].tolist()
        self.posted: list[Event] = posted if rendezvous else [self.start] * len(posted)
        self.link: list[int] = transfers.link.tolist()
        self.lanes = [_numbers(flat, blocking, rank) for rank in range(flat.program.num_ranks)]
        self.message: list[int] = [NONE] * len(flat)
        """The last message that each action waits for; a link brings all before it."""
        self.more: dict[Event, list[int]] = defaultdict(list)
        """Further messages, from other links."""
        self.needs: dict[Event, list[Event]] = defaultdict(list)
        if rendezvous and blocking_sends:
            for send, event in zip(self.sent, posted, strict=True):
                self.needs[send].append(event)
        self._need_messages(flat, transfers)
        self._need_swaps(flat, in_lane[Lane.SWAP], before)
        self._need_replicas(flat, before)

    def _need_messages(self, flat: Flat, transfers: Transfers) -> None:
        """An action that reads from other stages waits for the messages of its receive."""
        stage, microbatch = flat.stage[transfers.receive], flat.microbatch[transfers.receive]
        users = np.full(len(transfers), NONE, np.int64)
        for receive_kind in SEND_OF:
            kinds = [kind for kind in KINDS if any(need.received_by is receive_kind for need in NEEDS[kind])]
            mine = flat.of([receive_kind])[transfers.receive]
            users[mine] = flat.find_any(kinds, stage[mine], microbatch[mine])
        for number, user in enumerate(users.tolist()):
            if user == NONE:
                continue
            if self.message[user] != NONE:
                self.more[user].append(self.message[user])
            self.message[user] = number

    def _need_swaps(self, flat: Flat, swaps: Bools, before: Ints) -> None:
        """A swap starts after the compute action it stands behind; who needs the unit back waits for its IN."""
        if not swaps.any():
            return
        for event in np.flatnonzero(swaps).tolist():
            self.needs[event].append(int(before[event]))
        users = [kind for kind in KINDS if any(Kind.IN in need.kinds for need in NEEDS[kind])]
        fetches = np.flatnonzero(flat.of([Kind.IN]))
        for kind in users:
            found = flat.find(kind, flat.stage[fetches], flat.microbatch[fetches])
            for fetch, user in zip(fetches.tolist(), found.tolist(), strict=True):
                if user != NONE:
                    self.needs[user].append(fetch)
        self.lanes += [_numbers(flat, swaps, rank) for rank in range(flat.program.num_ranks)]

    def _need_replicas(self, flat: Flat, before: Ints) -> None:
        """The replicas of a stage reduce together: round n of one waits until all have come to round n."""
        rounds: dict[tuple[int, int], int] = defaultdict(int)
        together: dict[tuple[int, int], list[Event]] = defaultdict(list)
        for event in np.flatnonzero(flat.of([Kind.REDUCE])).tolist():
            place = (int(flat.rank[event]), int(flat.stage[event]))
            together[place[1], rounds[place]].append(event)
            rounds[place] += 1
        for events in together.values():
            for event in events:
                for other in events:
                    self.needs[event].append(int(before[other]))


def _previous(flat: Flat, blocking: Bools, start: Event) -> Ints:
    """For each action, the last blocking action before it in its row."""
    last = np.maximum.accumulate(np.where(blocking, np.arange(len(flat)), NONE)) if len(flat) else np.empty(0, np.int64)
    before = np.concatenate(([NONE], last[:-1]))[: len(flat)]
    return np.where(before < flat.row_start[flat.rank], start, before)


def _numbers(flat: Flat, chosen: Bools, rank: int) -> list[Event]:
    begin, end = int(flat.row_start[rank]), int(flat.row_start[rank + 1])
    return (np.flatnonzero(chosen[begin:end]) + begin).tolist()


def _durations(
    flat: Flat, transfers: Transfers, costs: Costs | None, blocking_sends: bool
) -> tuple[list[float], list[float], float]:
    """Of every action, of every transfer, and the latency; a blocking SEND takes the time of its transfer itself."""
    costs = costs or Costs(tuple(_UNIT for _ in range(flat.program.num_stages)))
    price = np.array(
        [
            [_price(kind, cost) + costs.overhead * (LANE[kind] is Lane.COMPUTE) for cost in costs.stages]
            for kind in KINDS
        ]
    )
    transfer = np.array([cost.transfer for cost in costs.stages])
    if blocking_sends:
        price[[KINDS.index(kind) for kind in SEND_OF.values()]] = transfer + costs.latency
        return price[flat.kind, flat.stage].tolist(), [0.0] * len(transfers), 0.0
    return price[flat.kind, flat.stage].tolist(), transfer[flat.stage[transfers.send]].tolist(), costs.latency


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
        case Kind.REDUCE:
            return cost.reduce
        case Kind.STEP:
            return cost.step
        case _:
            return 0.0


def _loop(
    graph: _Graph, duration: list[float], transfer: list[float], latency: float
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Run each lane until it needs an action that has not ended; wake it when that action ends.

    A link needs no lane of its own: when an action asks for a message, every earlier one of its link was sent before.
    """
    lanes, message, more, needs = graph.lanes, graph.message, dict(graph.more), dict(graph.needs)
    sent, posted, link = graph.sent, graph.posted, graph.link
    begin, end = [-1.0] * (graph.start + 1), [-1.0] * (graph.start + 1)
    begin[graph.start] = end[graph.start] = 0.0
    departed, arrived = [-1.0] * len(sent), [-1.0] * len(sent)
    upcoming = {number: first for first, number in reversed(list(enumerate(link)))}
    free = dict.fromkeys(upcoming, 0.0)

    def deliver(number: int) -> Event | None:
        """Run the link up to this message; the event that it still waits for, if any."""
        line = link[number]
        now = free[line]
        for current in range(upcoming[line], number + 1):
            ready_at, posted_at = end[sent[current]], end[posted[current]]
            if ready_at < 0 or posted_at < 0:
                upcoming[line], free[line] = current, now
                return sent[current] if ready_at < 0 else posted[current]
            now = max(now, ready_at, posted_at)
            departed[current] = now
            now += transfer[current]
            arrived[current] = now + latency
        upcoming[line], free[line] = number + 1, now
        return None

    position, clock = [0] * len(lanes), [0.0] * len(lanes)
    waiting: dict[Event, list[int]] = {}
    runnable = list(range(len(lanes)))
    while runnable:
        lane = runnable.pop()
        events, now = lanes[lane], clock[lane]
        missing: Event | None = None
        for index in range(position[lane], len(events)):
            event = events[index]
            number = message[event]
            if number >= 0:
                if arrived[number] < 0 and (missing := deliver(number)) is not None:
                    break
                if arrived[number] > now:
                    now = arrived[number]
            if event in more:
                for number in more[event]:
                    if arrived[number] < 0 and (missing := deliver(number)) is not None:
                        break
                    now = max(now, arrived[number])
            if event in needs:
                for need in needs[event]:
                    if end[need] < 0:
                        missing = need
                        break
                    now = max(now, end[need])
            if missing is not None:
                break
            begin[event] = now
            now += duration[event]
            end[event] = now
            if event in waiting:
                runnable.extend(waiting.pop(event))
        else:
            continue
        position[lane], clock[lane] = index, now
        waiting.setdefault(missing, []).append(lane)
    return begin, end, departed, arrived
