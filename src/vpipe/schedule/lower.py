"""From what an author writes to what a rank executes: a visible list of pure passes.

    recompute   R before the backward of every unit of the given stages
    swap        OUT after the forward, IN before the backward, of every unit of the given stages
    reduce      REDUCE before the STEP of every stage that has replicas
    communicate SEND after the result, RECV some actions ahead of its use

Each pass takes a program and returns another; every result verifies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from vpipe.schedule.action import Action, Kind
from vpipe.schedule.program import Program, Row
from vpipe.schedule.semantics import COMMUNICATION, INPUT_GRADIENT, LANE, WEIGHT_GRADIENT, Lane, peers

POST_AHEAD = 2
"""How many compute actions before its use a receive is posted. A receive that is posted late exposes the whole
transfer; one that is posted very early holds a buffer for nothing. With 2, data can arrive during the whole action
before the one that needs it."""

SWAP_AHEAD = 2
"""How many compute actions before its use a swapped unit is fetched."""


def lower(
    program: Program,
    *,
    recompute_stages: Collection[int] = (),
    swap_stages: Collection[int] = (),
    post_ahead: int = POST_AHEAD,
) -> Program:
    """The executable program."""
    program = recompute(program, recompute_stages)
    program = swap(program, swap_stages)
    program = reduce(program)
    return communicate(program, post_ahead)


def is_lowered(program: Program) -> bool:
    """Whether the program says how results travel (or none need to)."""
    return any(action.kind in COMMUNICATION for _, action in program.actions())


def recompute(program: Program, stages: Collection[int]) -> Program:
    """``R`` directly before the backward of every unit of ``stages``."""
    chosen = frozenset(stages)

    def row(actions: Row) -> Iterator[Action]:
        for action in actions:
            if action.kind in INPUT_GRADIENT and action.stage in chosen:
                yield Action(action.stage, Kind.R, action.microbatch)
            yield action

    return program.with_rows(map(row, program.rows)) if chosen else program


def swap(program: Program, stages: Collection[int]) -> Program:
    """``OUT`` after each forward of ``stages``, ``IN`` shortly before its backward; nothing where they would touch."""
    chosen = frozenset(stages)

    def row(actions: Row) -> Iterator[Action]:
        forward = {(a.stage, a.microbatch): i for i, a in enumerate(actions) if a.kind is Kind.F}
        before: dict[int, list[Action]] = defaultdict(list)
        gone: set[tuple[int, int]] = set()
        for index, (stage, kind, microbatch) in enumerate(actions):
            if kind in INPUT_GRADIENT and stage in chosen:
                recomputed = index > 0 and actions[index - 1] == Action(stage, Kind.R, microbatch)
                fetch = index - recomputed - SWAP_AHEAD
                if fetch > forward[stage, microbatch] + 1:
                    gone.add((stage, microbatch))
                    before[fetch].append(Action(stage, Kind.IN, microbatch))
        for index, action in enumerate(actions):
            yield from before[index]
            yield action
            if action.kind is Kind.F and (action.stage, action.microbatch) in gone:
                yield Action(action.stage, Kind.OUT, action.microbatch)

    return program.with_rows(map(row, program.rows)) if chosen else program


def reduce(program: Program) -> Program:
    """``REDUCE`` before every ``STEP`` of a stage that has replicas, where it is not there already."""

    def row(actions: Row) -> Iterator[Action]:
        reduced: set[int] = set()
        for action in actions:
            stage, kind, _ = action
            if kind is Kind.STEP and program.placement.num_replicas(stage) > 1 and stage not in reduced:
                yield Action(stage, Kind.REDUCE)
            if kind is Kind.REDUCE:
                reduced.add(stage)
            elif kind is Kind.STEP or kind in WEIGHT_GRADIENT:
                reduced.discard(stage)
            yield action

    return program.with_rows(map(row, program.rows)) if program.placement.has_replicas else program


def communicate(program: Program, post_ahead: int = POST_AHEAD) -> Program:
    """``SEND`` right after each result that another rank needs; ``RECV`` some actions before its use.

    Between two ranks, receives are posted in the order of the sends: NCCL matches by order alone. A receive is posted
    ``post_ahead`` compute actions before its use, and before its send can happen: ahead of the last action of its rank
    whose result the sender has used by then. So even a blocking send never waits, and a program that runs at all runs
    on every transport.
    """
    targets, period = _targets(program), program.placement.period
    place = _places(program)
    rows: list[list[Action]] = []
    queues: list[dict[int, list[Action]]] = [defaultdict(list) for _ in program.rows]  # target → source → receives
    posted_by: dict[Action, int] = {}
    for source, actions in enumerate(program.rows):
        row: list[Action] = []
        reached: dict[int, int] = {}  # rank → its last action whose result this rank has used
        for action in actions:
            row.append(action)
            stage, kind, microbatch = action
            if kind not in _CARRIERS:
                continue
            forward, turn = kind is Kind.F, microbatch % period
            for sender, rank in targets[not forward, stage, turn]:
                index = place.get((sender, forward, microbatch), 0)
                if index > reached.get(rank, 0):
                    reached[rank] = index
            send, receive = _CARRIERS[kind]
            readers = targets[forward, stage, turn]
            if readers:
                row.append(Action(stage, send, microbatch))
            for reader, target in readers:
                taken = Action(reader, receive, microbatch)
                queues[target][source].append(taken)
                bound = reached.get(target, 0)
                posted_by[taken] = min(bound, posted_by.get(taken, bound))
        rows.append(row)
    return program.with_rows(
        _with_receives(row, list(queue.values()), post_ahead, posted_by)
        for row, queue in zip(rows, queues, strict=True)
    )


def _places(program: Program) -> dict[tuple[int, bool, int], int]:
    """(stage, forward?, microbatch) → the place of that result in the compute actions of its rank."""
    found: dict[tuple[int, bool, int], int] = {}
    for row in program.rows:
        index = 0
        for stage, kind, microbatch in row:
            if LANE[kind] is Lane.COMPUTE:
                if kind in _CARRIERS:
                    found[stage, kind is Kind.F, microbatch] = index
                index += 1
    return found


_CARRIERS = {
    Kind.F: (Kind.SEND_F, Kind.RECV_F),
    Kind.B: (Kind.SEND_B, Kind.RECV_B),
    Kind.I: (Kind.SEND_B, Kind.RECV_B),
}
"""Kind of a result → how it is sent and received."""
_RECEIVED_BY = {kind: receive for kind, (_, receive) in _CARRIERS.items()}


def _targets(program: Program) -> dict[tuple[bool, int, int], list[tuple[int, int]]]:
    """(forward?, stage, microbatch modulo the period) → the (stage, rank) pairs that its result is sent to."""
    return {
        (forward, stage, turn): [
            (peer, program.placement.rank(peer, turn))
            for peer in peers(program, Action(stage, Kind.SEND_F if forward else Kind.SEND_B, turn))
        ]
        for forward in (True, False)
        for stage in range(program.num_stages)
        for turn in range(program.placement.period)
    }


def _with_receives(
    row: list[Action], queues: list[list[Action]], post_ahead: int, posted_by: Mapping[Action, int]
) -> Iterator[Action]:
    """``row`` with each RECV placed before the compute action that it is posted ahead of, in the order of its queue."""
    post_at: dict[Action, int] = {}
    compute = [action for action in row if LANE[action.kind] is Lane.COMPUTE]
    for index, (stage, kind, microbatch) in enumerate(compute):
        if kind in _RECEIVED_BY:
            receive = Action(stage, _RECEIVED_BY[kind], microbatch)
            if receive in posted_by:
                post_at[receive] = min(max(0, index - post_ahead), posted_by[receive])
    settled = False
    while not settled:  # once for a chain; a receive from several sources may have to move again
        settled = True
        for queue in queues:
            latest = len(compute)
            for receive in reversed(queue):
                if post_at.get(receive, latest) > latest:
                    post_at[receive] = latest
                    settled = len(queues) == 1
                latest = post_at.get(receive, latest)
    before: dict[int, list[Action]] = defaultdict(list)
    for receive in _merged(queues):
        if receive in post_at:
            before[post_at[receive]].append(receive)
    index = 0
    for action in row:
        if LANE[action.kind] is Lane.COMPUTE:
            if index in before:
                yield from before[index]
            index += 1
        yield action


def _merged(queues: list[list[Action]]) -> Iterator[Action]:
    """Every receive once, in an order that keeps the order of each queue, where they do not contradict each other."""
    if sum(map(len, queues)) == len({receive for queue in queues for receive in queue}):
        for queue in queues:
            yield from queue
        return
    order: TopologicalSorter[Action] = TopologicalSorter()
    for queue in queues:
        for earlier, later in pairwise(queue):
            order.add(later, earlier)
    try:
        yield from order.static_order()
    except CycleError:
        yield from dict.fromkeys(receive for queue in queues for receive in queue)  # verify names the pair of ranks
