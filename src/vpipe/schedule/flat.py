"""A program as arrays: what the readers of large programs work on.

Half a million actions are too many to look at one by one in Python for every question. ``Flat`` holds stage, kind,
microbatch and rank of every action, rank by rank, and finds actions by value in one look-up. ``Transfers`` are the
messages between ranks.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from vpipe.schedule.action import Action, Kind
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import LANE, SEND_OF, Lane

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

    def on(self, lane: Lane) -> Bools:
        """Which actions occupy such a lane."""
        return self.of(kind for kind in KINDS if LANE[kind] is lane)

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
    queue = (edge * program.num_ranks + flat.rank[send]) * program.num_ranks + flat.rank[receive]
    order = np.lexsort((turns, receive, queue))
    link = np.cumsum(np.diff(queue[order], prepend=queue[order][:1]) != 0)
    return Transfers(send[order], receive[order], link)


def previous(flat: Flat, blocking: Bools) -> Ints:
    """For each action, the last blocking action before it in its row, or the start of time."""
    last = np.maximum.accumulate(np.where(blocking, np.arange(len(flat)), NONE)) if len(flat) else flat.stage
    before = np.concatenate(([NONE], last[:-1]))[: len(flat)]
    return np.where(before < flat.row_start[flat.rank], len(flat), before)
