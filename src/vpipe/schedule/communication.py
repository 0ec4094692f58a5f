"""The pass of ``lower`` that makes results travel: SEND after each, RECV some actions ahead of its use.

Where a receive is posted decides whether a pipeline hangs and whether transfers hide behind work, so it has a file. It
works on all actions at once, as arrays: every run starts with it, and large programs have a million results.
"""

from __future__ import annotations

from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import chain, pairwise, product, repeat

import numpy as np

from vpipe.schedule.action import Action, Kind
from vpipe.schedule.flat import CODE, KINDS, NONE, Bools, Flat, Ints, collector_paused, padded, with_flat
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import INPUT_GRADIENT, Lane, channel
from vpipe.schedule.timeline import run, uniform

POST_AHEAD = 2
"""How many compute actions before its use a receive is posted. A receive that is posted late exposes the whole
transfer; one that is posted very early holds a buffer for nothing. With 2, data can arrive during the whole action
before the one that needs it."""
LAG = 0.7
"""How long a message takes, as a part of a rank's forward, in the run that says where receives are posted that block.
Of 0 to 2 it made the shortest steps, on near links and on far ones."""


def communicate(program: Program, post_ahead: int = POST_AHEAD, *, receives_block: bool = False) -> Program:
    """``SEND`` right after each result that another rank needs; ``RECV`` some actions before its use.

    Between two ranks, receives are posted in the order of the sends: NCCL matches by order alone. A receive is posted
    ``post_ahead`` compute actions before its use, and before its send can happen: ahead of the last action of its rank
    whose result the sender has used by then. So even a blocking send never waits, and a program that runs at all runs
    on every transport, unless ``receives_block``: a receive that has been posted may then keep its rank from going on
    until its message is there, as a device's does if anything waits for the whole device.
    """
    with collector_paused():
        flat = program.flat
        results = _results(flat)
        messages = _messages(flat, results)
        post_at = _post_at(flat, results, messages, post_ahead)
        lowered = _assembled(flat, messages, post_at)
        return _met(flat, results, messages, lowered) if receives_block else lowered


@dataclass(frozen=True)
class _Results:
    """The actions whose results travel: forwards, and backwards as far as they yield the gradient of an input."""

    number: Ints
    way: Ints
    """0 for a forward, 1 for a gradient."""
    stage: Ints
    microbatch: Ints
    place: Ints
    """Among the compute actions of its rank."""

    def __len__(self) -> int:
        return len(self.number)


@dataclass(frozen=True)
class _Messages:
    """What ranks send each other, queue by queue, in the order in which they are sent."""

    result: Ints
    """Number of the action that makes it."""
    way: Ints
    reader: Ints
    microbatch: Ints
    queue: Ints
    target: Ints
    used: Ints
    """The place of the last action of the target whose result the sender has used by then."""


def _results(flat: Flat) -> _Results:
    number = np.flatnonzero(flat.of((Kind.F, *INPUT_GRADIENT)))
    way = (flat.kind[number] != CODE[Kind.F]).astype(np.int64)
    return _Results(number, way, flat.stage[number], flat.microbatch[number], _among_compute(flat)[number])


def _among_compute(flat: Flat) -> Ints:
    """Of every action, how many compute actions of its rank come before it."""
    before = np.concatenate(([0], np.cumsum(_computes(flat))))
    places: Ints = before[:-1] - before[flat.row_start[flat.rank]]
    return places


def _computes(flat: Flat) -> Bools:
    return flat.on(Lane.COMPUTE)


def _table(flat: Flat, fill: int) -> Ints:
    """A number for every result: by way, stage and microbatch."""
    return np.full((2, flat.program.num_stages, max(flat.program.num_microbatches, 1)), fill, np.int64)


def _messages(flat: Flat, results: _Results) -> _Messages:
    """Every message, with the bound on where its receive may be posted."""
    program = flat.program
    places = _table(flat, 0)
    places[results.way, results.stage, results.microbatch] = results.place
    queues = _queue_numbers(program)
    home = flat.rank_of(results.stage, results.microbatch)
    used: list[Ints] = []  # rows of: number of the action that uses, rank that is used, place of the result
    sent: list[Ints] = []  # rows of: number of the result, way, reader, microbatch, queue, target rank
    for way, (onward, back) in enumerate(((program.readers, program.writers), (program.writers, program.readers))):
        mine = np.flatnonzero(results.way == way)
        number, stage, microbatch = results.number[mine], results.stage[mine], results.microbatch[mine]
        for writer in padded(back)[stage].T:
            rank = flat.rank_of(writer, microbatch)
            far = (writer != NONE) & (rank != home[mine])
            used.append(np.stack((number, rank, places[way, np.maximum(writer, 0), microbatch]))[:, far])
        for slot, reader in enumerate(padded(onward)[stage].T):
            rank = flat.rank_of(reader, microbatch)
            far = (reader != NONE) & (rank != home[mine])
            queue = queues[way][stage, microbatch % program.placement.period, slot]
            rows = (number, np.full(len(mine), way), reader, microbatch, queue, rank)
            sent.append(np.stack(rows)[:, far])
    columns = np.concatenate(sent, axis=1) if sent else np.empty((6, 0), np.int64)
    columns = columns[:, np.lexsort((columns[0], columns[4]))]
    reached = _reached(flat, np.concatenate(used, axis=1) if used else np.empty((3, 0), np.int64), columns)
    result, way, reader, microbatch, queue, target = columns
    return _Messages(result, way, reader, microbatch, queue, target, reached)


def _queue_numbers(program: Program) -> tuple[Ints, Ints]:
    """For each way, the queue of every (stage, turn of the placement, slot among its readers)."""
    placement, rank_of = program.placement, program.placement.rank
    shape = (program.num_stages, placement.period, max(map(len, (*program.readers, *program.writers)), default=0))
    tables = np.full(shape, NONE, np.int64), np.full(shape, NONE, np.int64)
    known: dict[tuple[int, int], int] = {}
    for source, stages in enumerate(placement.stages_of):
        for table, onward in zip(tables, (program.readers, program.writers), strict=True):
            for stage, turn in product(stages, range(placement.period)):
                for slot, reader in enumerate(onward[stage]):
                    target = rank_of(reader, turn)
                    number = known.setdefault((target, channel(program, stage, reader, source)), len(known))
                    if rank_of(stage, turn) == source:
                        table[stage, turn, slot] = number
    return tables


def _reached(flat: Flat, used: Ints, sent: Ints) -> Ints:
    """For every message, the last action of its target whose result its sender has used when it sends."""
    ranks = flat.program.num_ranks
    number = np.concatenate((used[0], sent[0]))
    pair = flat.rank[number] * ranks + np.concatenate((used[1], sent[5]))
    place = np.concatenate((used[2], np.zeros(sent.shape[1], np.int64)))
    asks = np.arange(len(number)) >= used.shape[1]  # after what the same action uses
    order = np.argsort((pair * max(len(flat), 1) + number) * 2 + asks)
    far = len(flat) + 1
    first = np.concatenate(([0], np.cumsum(np.diff(pair[order]) != 0))) * far if len(order) else pair
    most = np.empty(len(order), np.int64)
    most[order] = np.maximum.accumulate(first + place[order]) - first
    return most[used.shape[1] :]


def _post_at(flat: Flat, results: _Results, messages: _Messages, post_ahead: int) -> Ints:
    """Of every receive, by way, stage and microbatch: the compute action of its rank that it is posted ahead of."""
    never = len(flat)
    bounds, post_at = _table(flat, never), _table(flat, never)
    receives = (messages.way, messages.reader, messages.microbatch)
    np.minimum.at(bounds, receives, messages.used)
    takes = (results.way, results.stage, results.microbatch)
    early = np.minimum(np.maximum(results.place - post_ahead, 0), bounds[takes])
    post_at[takes] = np.where(bounds[takes] == never, never, early)
    floor = messages.queue * (never + 1)
    while True:  # each no later than the next of its queue; a receive from several sources may have to move again
        place = post_at[receives]
        latest = np.minimum.accumulate((place + floor)[::-1])[::-1] - floor
        moved = (latest < place) & (place != never)
        if not moved.any():
            return post_at
        np.minimum.at(post_at, tuple(column[moved] for column in receives), latest[moved])


def _met(flat: Flat, results: _Results, messages: _Messages, lowered: Program) -> Program:
    """The same with every receive where its message is sent, so that none waits for what its own rank does later.

    A run of the program says where: by their ends, all actions of all ranks stand in one order, which keeps that of the
    rows and that of needs. A receive is posted between what its rank does before the message is sent, in this order,
    and what it does after that. So ranks that did one action after the other, in this order, would run the program with
    each message sent and received at once: no cycle of waits is there, whichever rank waits. (Of a receive from
    several stages the last message counts. The sends of skips therefore do not wait.)
    """
    timeline = run(lowered, uniform(lowered.placement, latency=LAG))
    if timeline.stuck:
        return lowered  # verify says why
    compute, never = np.flatnonzero(_computes(flat)), len(flat)
    there = np.flatnonzero(_computes(lowered.flat))
    turn = np.empty(len(flat), np.int64)
    turn[compute[np.lexsort((there, timeline.begins[there], timeline.ends[there]))]] = np.arange(len(compute))
    receives = (messages.way, messages.reader, messages.microbatch)
    turns, post_at = _table(flat, NONE), _table(flat, never)
    np.maximum.at(turns, receives, turn[messages.result])
    floor = messages.queue * (never + 1)
    while ((least := np.maximum.accumulate(turns[receives] + floor) - floor) > turns[receives]).any():
        np.maximum.at(turns, receives, least)  # each no earlier than the one before of its queue
    rows, first = flat.rank[compute] * never + turn[compute], messages.target * never
    post_at[receives] = np.searchsorted(rows, first + turns[receives]) - np.searchsorted(rows, first)
    return _assembled(flat, messages, post_at, turns)


def _assembled(flat: Flat, messages: _Messages, post_at: Ints, turns: Ints | None = None) -> Program:
    """The program with its SENDs and RECVs in place; receives at one place in the order of their ``turns``."""
    program = flat.program
    sends = np.zeros(len(flat), np.bool_)
    sends[messages.result] = True
    sender = np.flatnonzero(sends)
    send_kind = np.where(flat.kind[sender] == CODE[Kind.F], CODE[Kind.SEND_F], CODE[Kind.SEND_B])
    columns = _receives(flat, messages, post_at)
    if turns is not None:
        columns = columns[:, np.argsort(turns[tuple(columns[:3])], kind="stable")]
    way, reader, microbatch, target = columns
    compute = np.flatnonzero(_computes(flat))
    before = compute[np.searchsorted(compute, flat.row_start[target]) + post_at[way, reader, microbatch]]
    receive_kind = np.where(way == 0, CODE[Kind.RECV_F], CODE[Kind.RECV_B])
    order = np.argsort(np.concatenate((np.arange(len(flat)) * 3 + 1, sender * 3 + 2, before * 3)), kind="stable")
    stage = np.concatenate((flat.stage, flat.stage[sender], reader))
    kind = np.concatenate((flat.kind, send_kind, receive_kind))
    microbatches = np.concatenate((flat.microbatch, flat.microbatch[sender], microbatch))
    rank = np.concatenate((flat.rank, flat.rank[sender], target))
    names = np.array(KINDS, object)[kind[len(flat) :]].tolist()
    values = zip(stage[len(flat) :].tolist(), names, microbatches[len(flat) :].tolist(), strict=True)
    made = map(tuple.__new__, repeat(Action), values)  # Action(…) is a Python function
    actions = np.fromiter(chain(*program.rows, made), object, len(order))[order].tolist()
    ends = np.cumsum(np.bincount(rank, minlength=program.num_ranks)).tolist()
    lowered = program.with_rows(actions[begin:end] for begin, end in pairwise([0, *ends]))
    return with_flat(lowered, stage[order], kind[order], microbatches[order])


def _receives(flat: Flat, messages: _Messages, post_at: Ints) -> Ints:
    """Every receive once, as (way, stage, microbatch, rank), in an order that keeps the order of each queue."""
    columns = np.stack((messages.way, messages.reader, messages.microbatch, messages.target))
    often = _table(flat, 0)
    np.add.at(often, tuple(columns[:3]), 1)
    again = np.unique(columns[3][often[tuple(columns[:3])] > 1])
    if len(again):
        several = np.isin(columns[3], again)
        merged = [_merged(columns[:, columns[3] == rank], messages.queue[columns[3] == rank]) for rank in again]
        columns = np.concatenate((columns[:, ~several], *merged), axis=1)
    return columns[:, post_at[tuple(columns[:3])] != len(flat)]


def _merged(receives: Ints, queue: Ints) -> Ints:
    """The receives of a rank that takes from several sources at once: in the order of each queue, where these do not
    contradict each other."""
    order: TopologicalSorter[tuple[int, ...]] = TopologicalSorter()
    rows = list(map(tuple, receives.T.tolist()))
    for row in rows:
        order.add(row)  # a queue of one has no pairs
    for (earlier, first), (later, second) in pairwise(zip(rows, queue.tolist(), strict=True)):
        if first == second:
            order.add(later, earlier)
    try:
        found = list(order.static_order())
    except CycleError:
        found = list(dict.fromkeys(rows))  # verify names the pair of ranks
    return np.array(found, np.int64).T
