"""The pass of ``lower`` that makes results travel: SEND after each, RECV some actions ahead of its use.

Where a receive is posted decides whether a pipeline hangs and whether transfers hide behind work, so it has a file.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise, product
from typing import NamedTuple

from vpipe.schedule.action import Action, Kind
from vpipe.schedule.collector import collector_paused
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import LANE, Lane, channel, peers

POST_AHEAD = 2
"""How many compute actions before its use a receive is posted. A receive that is posted late exposes the whole
transfer; one that is posted very early holds a buffer for nothing. With 2, data can arrive during the whole action
before the one that needs it."""


def communicate(program: Program, post_ahead: int = POST_AHEAD) -> Program:
    """``SEND`` right after each result that another rank needs; ``RECV`` some actions before its use.

    Between two ranks, receives are posted in the order of the sends: NCCL matches by order alone. A receive is posted
    ``post_ahead`` compute actions before its use, and before its send can happen: ahead of the last action of its rank
    whose result the sender has used by then. So even a blocking send never waits, and a program that runs at all runs
    on every transport.
    """
    with collector_paused():
        places = _places(program)
        bounds = _Numbers(program, NEVER)
        queues: list[dict[int, list[Action]]] = [defaultdict(list) for _ in program.rows]  # target → source → receives
        rows = [_with_sends(program, source, places, bounds, queues) for source in range(program.num_ranks)]
        return program.with_rows(
            _with_receives(row, list(queue.values()), post_ahead, bounds, _Numbers(program, NEVER, stages))
            for row, queue, stages in zip(rows, queues, program.placement.stages_of, strict=True)
        )


_CARRIERS = {
    Kind.F: (Kind.SEND_F, Kind.RECV_F),
    Kind.B: (Kind.SEND_B, Kind.RECV_B),
    Kind.I: (Kind.SEND_B, Kind.RECV_B),
}
"""Kind of a result → how it is sent and received."""
NEVER = sys.maxsize


class _Numbers(dict[Kind, dict[int, list[int]]]):
    """A number for every result: ``numbers[kind][stage][microbatch]``, by the result's own kind or that of its RECV."""

    def __init__(self, program: Program, value: int, stages: Iterable[int] | None = None) -> None:
        stages = list(range(program.num_stages) if stages is None else stages)
        forward, backward = ({stage: [value] * program.num_microbatches for stage in stages} for _ in range(2))
        super().__init__({Kind.F: forward, Kind.B: backward, Kind.I: backward})
        self[Kind.RECV_F], self[Kind.RECV_B] = forward, backward


def _places(program: Program) -> _Numbers:
    """The place of every result among the compute actions of its rank."""
    found = _Numbers(program, 0)
    for row in program.rows:
        index = 0
        for stage, kind, microbatch in row:
            if kind in _CARRIERS:
                found[kind][stage][microbatch] = index
                index += 1
            elif LANE[kind] is Lane.COMPUTE:
                index += 1
    return found


class _Route(NamedTuple):
    """What a result of one stage meets on its way: whose results it uses, and to whom it is sent."""

    used: list[tuple[int, list[int]]]
    """(rank, places of its results)"""
    send: Kind
    receive: Kind
    taken: list[tuple[int, int, list[Action], list[int]]]
    """(target rank, stage that reads, queue of receives, bounds of its receives)"""


def _routes(
    program: Program, source: int, places: _Numbers, bounds: _Numbers, queues: list[dict[int, list[Action]]]
) -> dict[Kind, dict[int, list[_Route]]]:
    """The routes of a rank's results, by kind and stage, for each microbatch of a period."""
    found: dict[Kind, dict[int, list[_Route]]] = {kind: {} for kind in _CARRIERS}
    rank_of = program.placement.rank
    for (kind, (send, receive)), stage in product(_CARRIERS.items(), program.placement.stages_of[source]):
        found[kind][stage] = []
        for turn in range(program.placement.period):
            readers, writers = peers(program, Action(stage, send, turn)), peers(program, Action(stage, receive, turn))
            used = [(rank_of(writer, turn), places[kind][writer]) for writer in writers]
            taken = [
                (target, reader, queues[target][channel(program, stage, reader, source)], bounds[kind][reader])
                for reader, target in ((reader, rank_of(reader, turn)) for reader in readers)
            ]
            found[kind][stage].append(_Route(used, send, receive, taken))
    return found


def _with_sends(
    program: Program, source: int, places: _Numbers, bounds: _Numbers, queues: list[dict[int, list[Action]]]
) -> list[Action]:
    """A row with its SENDs; their receives go into the queues, with a bound on where they are posted."""
    routes, period = _routes(program, source, places, bounds, queues), program.placement.period
    new = tuple.__new__  # Action(…) is a Python function, and this is called a million times
    row: list[Action] = []
    reached = [0] * program.num_ranks  # of every rank, the last action whose result this rank has used
    for action in program.rows[source]:
        row.append(action)
        stage, kind, microbatch = action
        if kind not in routes:
            continue
        used, send, receive, taken = routes[kind][stage][microbatch % period]
        for rank, place in used:
            if place[microbatch] > reached[rank]:
                reached[rank] = place[microbatch]
        if taken:
            row.append(new(Action, (stage, send, microbatch)))
        for target, reader, queue, bound in taken:
            queue.append(new(Action, (reader, receive, microbatch)))
            if reached[target] < bound[microbatch]:
                bound[microbatch] = reached[target]
    return row


def _with_receives(
    row: list[Action], queues: list[list[Action]], post_ahead: int, bounds: _Numbers, post_at: _Numbers
) -> list[Action]:
    """``row`` with each RECV placed before the compute action that it is posted ahead of, in the order of its queue."""
    compute = [position for position, action in enumerate(row) if LANE[action[1]] is Lane.COMPUTE]
    for index, position in enumerate(compute):
        stage, kind, microbatch = row[position]
        if kind in _CARRIERS and (bound := bounds[kind][stage][microbatch]) != NEVER:
            post_at[kind][stage][microbatch] = min(max(0, index - post_ahead), bound)
    while _moved_up(queues, post_at) and len(queues) > 1:
        pass  # once for a chain; a receive from several sources may have to move again
    before: dict[int, list[Action]] = defaultdict(list)
    for receive in _merged(queues):
        index = post_at[receive.kind][receive.stage][receive.microbatch]
        if index != NEVER:
            before[index].append(receive)
    lowered: list[Action] = []
    done = 0
    for index in sorted(before):
        lowered += row[done : compute[index]]
        lowered += before[index]
        done = compute[index]
    return lowered + row[done:]


def _moved_up(queues: list[list[Action]], post_at: _Numbers) -> bool:
    """Post each receive no later than the next of its queue; whether any had to move."""
    moved = False
    for queue in queues:
        latest = NEVER
        for stage, kind, microbatch in reversed(queue):
            places = post_at[kind][stage]
            if places[microbatch] == NEVER:
                continue
            if places[microbatch] > latest:
                places[microbatch] = latest
                moved = True
            latest = places[microbatch]
    return moved


def _merged(queues: list[list[Action]]) -> Iterator[Action]:
    """Every receive once, in an order that keeps the order of each queue, where they do not contradict each other."""
    if sum(map(len, queues)) == len({receive for queue in queues for receive in queue}):
        for queue in queues:
            yield from queue
        return
    order: TopologicalSorter[Action] = TopologicalSorter()
    for queue in queues:
        for receive in queue[:1]:
            order.add(receive)  # a queue of one has no pairs
        for earlier, later in pairwise(queue):
            order.add(later, earlier)
    try:
        yield from order.static_order()
    except CycleError:
        yield from dict.fromkeys(receive for queue in queues for receive in queue)  # verify names the pair of ranks
