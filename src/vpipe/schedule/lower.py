"""From what an author writes to what a rank executes: a visible list of pure passes.

    recompute   R before the backward of every unit of the given stages
    swap        OUT after the forward, IN before the backward, of every unit of the given stages
    reduce      REDUCE before the STEP of every stage that has replicas
    communicate SEND after the result, RECV some actions ahead of its use

Each pass takes a program and returns another; every result verifies.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from vpipe.schedule.action import Action, Kind
from vpipe.schedule.program import Program, Row
from vpipe.schedule.semantics import COMMUNICATION, INPUT_GRADIENT, LANE, WEIGHT_GRADIENT, Lane, peers
from vpipe.schedule.timeline import Transport, run

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
    """``SEND`` right after each result that another rank needs; ``RECV`` ``post_ahead`` compute actions before its use.

    Between two ranks, receives are posted in the order of the sends: NCCL matches by order alone. A message that is
    sent early and used late is therefore received early. Where a rank holds several stages, or tensors skip stages, two
    ranks may send to each other long before either needs what it gets; there a receive is also posted no later than its
    send, so that even a blocking send never waits for a rank that waits for it.
    """
    lowered = _communicate(program, post_ahead, None)
    if program.num_stages == program.num_ranks and not program.skips:
        return lowered
    return _communicate(program, post_ahead, _sent_during(lowered))


def _sent_during(lowered: Program) -> dict[Action, int]:
    """For each RECV, the compute action of its rank (its place in the lane) that runs when the message is sent."""
    timeline = run(lowered, transport=Transport.BUFFERED)
    if timeline.stuck:
        return {}
    flat = timeline.flat
    ends = [[timeline.end[event] for event in lane] for lane in timeline.lanes]
    found: dict[Action, int] = {}
    for send, receive, departed in zip(
        timeline.transfers.send, timeline.transfers.receive, timeline.departed, strict=True
    ):
        assert flat.rank[send] != flat.rank[receive]
        action = flat.action(int(receive))
        during = bisect_left(ends[int(flat.rank[receive])], departed)
        found[action] = min(during, found.get(action, during))
    return found


def _communicate(program: Program, post_ahead: int, posted_by: Mapping[Action, int] | None) -> Program:
    """One round of placing; ``posted_by`` are further bounds on the places of receives."""
    targets = _targets(program)
    rows: list[list[Action]] = []
    queues: list[dict[int, list[Action]]] = [
        defaultdict(list) for _ in program.rows
    ]  # target rank → source rank → receives
    for source, actions in enumerate(program.rows):
        row: list[Action] = []
        for action in actions:
            row.append(action)
            stage, kind, microbatch = action
            if kind in _CARRIERS:
                send, receive = _CARRIERS[kind]
                readers = targets[kind is Kind.F, stage, microbatch % program.placement.period]
                if readers:
                    row.append(Action(stage, send, microbatch))
                    for reader, target in readers:
                        queues[target][source].append(Action(reader, receive, microbatch))
        rows.append(row)
    return program.with_rows(
        _with_receives(row, list(queue.values()), post_ahead, posted_by or {})
        for row, queue in zip(rows, queues, strict=True)
    )


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
    post_at: dict[tuple[int, Kind, int], int] = {}
    compute = [action for action in row if LANE[action.kind] is Lane.COMPUTE]
    for index, (stage, kind, microbatch) in enumerate(compute):
        if kind in _RECEIVED_BY:
            post_at[stage, _RECEIVED_BY[kind], microbatch] = max(0, index - post_ahead)
    for receive, index in posted_by.items():
        if receive in post_at:
            post_at[receive] = min(post_at[receive], index)
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
