"""A program as arrays, and as lanes and links: what the readers of large programs work on.

Half a million actions are too many to look at one by one in Python for every question. ``Flat`` holds stage, kind,
microbatch and rank of every action, rank by rank, and finds actions by value in one look-up.

``Lanes`` are what the event loop of ``timeline`` runs. A lane is a list of actions that run one after the other: the
compute actions of a rank, its swaps, or the gradients that it sends to the replicas of its stages. Every action may
also wait for messages, which links carry in the order of their receives, and for actions of other lanes.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from vpipe.schedule.action import Action, Kind
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import LANE, MEETINGS, NEEDS, SEND_OF, Lane, rounds, sent_ahead

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

KINDS = tuple(Kind)
CODE = {kind: code for code, kind in enumerate(KINDS)}
NONE = -1


class Flat:
    """The actions of ``program``, numbered rank by rank in the order of their rows."""

    def __init__(self, program: Program, stage: Ints, kind: Ints, microbatch: Ints) -> None:
        self.program = program
        self.stage, self.kind, self.microbatch = stage, kind, microbatch
        lengths = np.array([len(row) for row in program.rows], np.int64)
        self.row_start: Ints = np.concatenate(([0], np.cumsum(lengths)))
        self.rank: Ints = np.repeat(np.arange(program.num_ranks), lengths)

    def __len__(self) -> int:
        return len(self.stage)

    def action(self, number: int) -> Action:
        rank = int(self.rank[number])
        return self.program.rows[rank][number - int(self.row_start[rank])]

    def index(self, number: int) -> int:
        """The place of an action in its row."""
        return number - int(self.row_start[self.rank[number]])

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """Those that the program has."""
        return frozenset(KINDS[code] for code in np.unique(self.kind).tolist())

    def of(self, kinds: Iterable[Kind]) -> Bools:
        """Which actions are of these kinds."""
        wanted = np.zeros(len(KINDS), np.bool_)
        wanted[[CODE[kind] for kind in kinds]] = True
        found: Bools = wanted[self.kind]
        return found

    @cached_property
    def _known(self) -> Bools:
        """Which actions are of a stage and a microbatch that the program has."""
        units = max(self.program.num_microbatches, 1)
        return (self.microbatch >= 0) & (self.microbatch < units) & (self.stage < self.program.num_stages)

    @cached_property
    def _table(self) -> Ints:
        table = np.full((len(KINDS), self.program.num_stages, max(self.program.num_microbatches, 1)), NONE, np.int64)
        known = self._known
        table[self.kind[known], self.stage[known], self.microbatch[known]] = np.flatnonzero(known)
        return table

    def present(self, kind: Kind) -> Bools:
        """Of every stage and microbatch, whether the program has this action."""
        found: Bools = self._table[CODE[kind], :, : self.program.num_microbatches] != NONE
        return found

    @cached_property
    def repeated(self) -> Bools:
        """Which actions may be there twice: those that share a place in the table, and those that have none there."""
        own = np.full(len(self), NONE, np.int64)
        known = self._known
        own[known] = self._table[self.kind[known], self.stage[known], self.microbatch[known]]
        lost = own != np.arange(len(self))
        found: Bools = lost.copy()
        found[own[lost & known]] = True
        return found

    def find(self, kind: Kind, stage: Ints, microbatch: Ints) -> Ints:
        """The numbers of these actions, ``NONE`` where the program has no such action."""
        known = (stage >= 0) & (stage < self._table.shape[1]) & (microbatch >= 0) & (microbatch < self._table.shape[2])
        found = self._table[CODE[kind], np.where(known, stage, 0), np.where(known, microbatch, 0)]
        return np.where(known, found, NONE)

    def find_any(self, kinds: Iterable[Kind], stage: Ints, microbatch: Ints) -> Ints:
        """The first of ``kinds`` that the program has, for each place."""
        found = np.full(len(stage), NONE, np.int64)
        for kind in kinds:
            found = np.where(found == NONE, self.find(kind, stage, microbatch), found)
        return found

    @cached_property
    def _rank_of(self) -> Ints:
        placement = self.program.placement
        return np.array([[placement.rank(s, k) for k in range(placement.period)] for s in range(placement.num_stages)])

    def rank_of(self, stage: Ints, microbatch: Ints) -> Ints:
        """The rank that runs each place; ``NONE`` where the stage is ``NONE`` or beyond the placement."""
        known = (stage >= 0) & (stage < len(self._rank_of))
        ranks = self._rank_of[np.where(known, stage, 0), microbatch % self.program.placement.period]
        return np.where(known, ranks, NONE)


def flatten(program: Program) -> Flat:
    """Read from the rows; ``Program.flat`` keeps it."""
    count = len(program)
    stages, kinds, microbatches = (map(itemgetter(field), chain(*program.rows)) for field in range(3))
    return Flat(
        program,
        np.fromiter(stages, np.int64, count),
        np.fromiter(map(CODE.__getitem__, kinds), np.int64, count),
        np.fromiter(microbatches, np.int64, count),
    )


def with_flat(program: Program, stage: Ints, kind: Ints, microbatch: Ints) -> Program:
    """``program``, of which the arrays are known already."""
    program.__dict__["flat"] = Flat(program, stage, kind, microbatch)
    return program


def padded(lists: Sequence[Sequence[int]]) -> Ints:
    """A matrix with one row a list, filled up with ``NONE``."""
    width = max(map(len, lists), default=0)
    filled = [[*values, *[NONE] * (width - len(values))] for values in lists]
    return np.array(filled, np.int64).reshape(len(lists), width)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Nothing is collected inside; a collector that was off stays off."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


EventNumber = int
"""The number of an action in ``Flat``; the number after the last is the start of time."""


@dataclass(frozen=True)
class Transfers:
    """Messages between ranks, link by link; within a link in the order in which their receives are posted."""

    send: Ints
    receive: Ints
    link: Ints
    """Numbers of the queues that keep their order (``semantics.channel``), from 0."""

    def __len__(self) -> int:
        return len(self.send)


def find_transfers(flat: Flat) -> Transfers:
    """Every message whose SEND and RECV the program has: found once, and kept with the program's arrays."""
    known: Transfers | None = flat.__dict__.get("transfers")
    if known is None:
        known = flat.__dict__["transfers"] = _transfers(flat)
    return known


def _transfers(flat: Flat) -> Transfers:
    program = flat.program
    nothing = np.empty(0, np.int64)
    parts: list[tuple[Ints, Ints, Ints, Ints]] = [(nothing,) * 4]
    for receive_kind, senders in ((Kind.RECV_F, program.writers), (Kind.RECV_B, program.readers)):
        receives = np.flatnonzero(flat.of([receive_kind]) & (flat.stage < program.num_stages))
        stage, microbatch = flat.stage[receives], flat.microbatch[receives]
        for turn, sender in enumerate(padded(senders)[stage].T):
            send = flat.find(SEND_OF[receive_kind], sender, microbatch)
            travels = (send != NONE) & (flat.rank_of(sender, microbatch) != flat.rank_of(stage, microbatch))
            edge = np.where(np.abs(sender - stage) == 1, 0, 1 + sender * program.num_stages + stage)
            parts.append((send[travels], receives[travels], edge[travels], np.full(int(travels.sum()), turn)))
    send, receive, edge, turns = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    ranks = flat.rank[send] * program.num_ranks + flat.rank[receive]
    _, link = np.unique(edge * program.num_ranks**2 + ranks, return_inverse=True)
    order = np.lexsort((turns, receive, link))
    return Transfers(send[order], receive[order], link[order])


@dataclass
class Waits:
    """What a few actions wait for beside one message."""

    messages: list[int] = field(default_factory=list)
    events: list[EventNumber] = field(default_factory=list)


class Lanes:
    """Lanes of actions, and what each action needs from elsewhere."""

    def __init__(self, flat: Flat, transfers: Transfers, rendezvous: bool, blocking_sends: bool) -> None:
        self.start: EventNumber = len(flat)
        in_lane = {lane: flat.of(kind for kind in KINDS if LANE[kind] is lane) for lane in Lane}
        blocking = in_lane[Lane.COMPUTE] | (flat.of(SEND_OF.values()) & blocking_sends)
        before = previous(flat, blocking)
        self.lanes: list[list[EventNumber]] = [_numbers(flat, blocking, rank) for rank in range(flat.program.num_ranks)]
        self.sent: Ints = transfers.send if blocking_sends else before[transfers.send]
        """Per message, the event whose end sends it."""
        posted = before[transfers.receive]
        self.posted: Ints = posted if rendezvous else np.full(len(posted), self.start)
        """Per message, the event whose end posts its receive."""
        self.link: Ints = transfers.link
        self.first_of_link: Ints = np.flatnonzero(np.diff(transfers.link, prepend=NONE))
        self.extra: dict[EventNumber, Waits] = defaultdict(Waits)
        self.message: Ints = self._messages(flat, transfers)
        """Per action, the message it waits for; a link brings all before it."""
        if rendezvous and blocking_sends:
            for send, event in zip(self.sent.tolist(), posted.tolist(), strict=True):
                self.extra[send].events.append(event)
        self._swaps(flat, in_lane[Lane.SWAP], before)
        self._meetings(flat, before)
        self._gradients(flat, in_lane[Lane.GRADIENTS], before)

    def _messages(self, flat: Flat, transfers: Transfers) -> Ints:
        """An action that reads from other stages waits for the messages of its receive."""
        stage, microbatch = flat.stage[transfers.receive], flat.microbatch[transfers.receive]
        users = np.full(len(transfers), NONE, np.int64)
        for receive_kind in SEND_OF:
            kinds = [kind for kind in KINDS if any(need.received_by is receive_kind for need in NEEDS[kind])]
            mine = flat.of([receive_kind])[transfers.receive]
            users[mine] = flat.find_any(kinds, stage[mine], microbatch[mine])
        used = np.flatnonzero(users != NONE)
        message = np.full(len(flat), NONE, np.int64)
        message[users[used]] = used
        for number in used[message[users[used]] != used].tolist():  # a second message, from another link
            self.extra[int(users[number])].messages.append(number)
        return message

    def _swaps(self, flat: Flat, swaps: Bools, before: Ints) -> None:
        """A swap starts after the compute action it stands behind; who needs the unit back waits for its IN."""
        if not swaps.any():
            return
        for event in np.flatnonzero(swaps).tolist():
            self.extra[event].events.append(int(before[event]))
        users = [kind for kind in KINDS if any(Kind.IN in need.kinds for need in NEEDS[kind])]
        fetches = np.flatnonzero(flat.of([Kind.IN]))
        for kind in users:
            found = flat.find(kind, flat.stage[fetches], flat.microbatch[fetches])
            for fetch, user in zip(fetches.tolist(), found.tolist(), strict=True):
                if user != NONE:
                    self.extra[user].events.append(fetch)
        self.lanes += [_numbers(flat, swaps, rank) for rank in range(flat.program.num_ranks)]

    def _meetings(self, flat: Flat, before: Ints) -> None:
        """Members of a meeting go on together, when the last has come."""
        if not flat.kinds & MEETINGS:
            return
        ahead = sent_ahead(flat.program)
        for meeting, places in rounds(flat.program).items():
            events = [int(flat.row_start[rank]) + index for rank, index in places.items()]
            sent = [int(flat.row_start[rank]) + index for rank, index in ahead.get(meeting, {}).items()]
            needs = sent or [int(before[event]) for event in events]
            for event in events:
                self.extra[event].events += needs

    def _gradients(self, flat: Flat, sends: Bools, before: Ints) -> None:
        """What is sent ahead leaves after the compute action that it stands behind."""
        for event in np.flatnonzero(sends).tolist():
            self.extra[event].events.append(int(before[event]))
        if sends.any():
            self.lanes += [_numbers(flat, sends, rank) for rank in range(flat.program.num_ranks)]


def previous(flat: Flat, blocking: Bools) -> Ints:
    """For each action, the last blocking action before it in its row, or the start of time."""
    last = np.maximum.accumulate(np.where(blocking, np.arange(len(flat)), NONE)) if len(flat) else flat.stage
    before = np.concatenate(([NONE], last[:-1]))[: len(flat)]
    return np.where(before < flat.row_start[flat.rank], len(flat), before)


def _numbers(flat: Flat, chosen: Bools, rank: int) -> list[EventNumber]:
    begin, end = int(flat.row_start[rank]), int(flat.row_start[rank + 1])
    return (np.flatnonzero(chosen[begin:end]) + begin).tolist()
