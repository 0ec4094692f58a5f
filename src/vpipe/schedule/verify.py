"""Whether a program is right, before anything runs.

``verify`` returns every violation, not the first: what is missing, what comes twice, what stands on the wrong rank or
in the wrong order, sends and receives that do not match, a deadlock under the chosen transport, memory beyond a bound,
and updates that lose or mix gradients. What an action needs it asks ``semantics``; what hangs, the event loop of
``timeline``; what becomes of weights, ``updates``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import product

from vpipe.schedule import meetings, updates
from vpipe.schedule.action import OF_A_STAGE, Action, Kind
from vpipe.schedule.collector import collector_paused
from vpipe.schedule.lower import communicate, is_lowered, reduce
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import (
    COMMUNICATION,
    MEETINGS,
    NEEDS,
    SEND_OF,
    Where,
    channel,
    peers,
)
from vpipe.schedule.simulate import simulate
from vpipe.schedule.timeline import Transport, run
from vpipe.schedule.violation import Violation


def verify(
    program: Program,
    *,
    transport: Transport = Transport.RENDEZVOUS,
    max_activations: float | None = None,
) -> list[Violation]:
    """Every violation, in the order of ranks and actions; none: the program runs and computes the right thing.

    A program that says nothing of communication is completed by lowering first. The index of a violation counts the
    actions of the program as it was given. What makes other checks meaningless ends the search.
    """
    with collector_paused():
        return _verify(program, transport, max_activations)


def _verify(program: Program, transport: Transport, max_activations: float | None) -> list[Violation]:
    place = _places(program)
    strangers = [*_strangers(program)]
    found = [*strangers, *_duplicates(program), *_incomplete(program)]
    if strangers:
        return sorted(set(found))
    lowered = is_lowered(program)
    found += updates.violations(program, lowered)
    executable = program if lowered else communicate(reduce(program))
    everywhere = place if executable is program else _places(executable)
    found += [*_unmet_needs(executable, everywhere, place), *_unmatched(executable, everywhere, place)]
    found += _crossed(executable, place)
    found += meetings.violations(executable, program)
    found += _lost_swaps(program)
    if not found:
        found += _deadlock(executable, program, transport, place)
    if not found and max_activations is not None:
        found += _too_much(executable, max_activations)
    return sorted(set(found))


_RECEIVE_OF = {send: receive for receive, send in SEND_OF.items()}
Places = dict[Action, tuple[int, int]]
"""Where the program as given has each action: (rank, index)."""


def _places(program: Program) -> Places:
    return {action: (rank, index) for rank, row in enumerate(program.rows) for index, action in enumerate(row)}


def _at(place: Places, action: Action, rank: int, reason: str) -> Violation:
    """A violation at an action, or at its rank where lowering added the action."""
    known_rank, index = place.get(action, (rank, -1))
    return Violation(known_rank, index, str(action), reason)


def _strangers(program: Program) -> Iterator[Violation]:
    """Actions of stages or units that do not exist, or on a rank that does not run them."""
    placement = program.placement
    for rank, row in enumerate(program.rows):
        for index, action in enumerate(row):
            stage, kind, microbatch = action
            if stage >= placement.num_stages:
                reason = f"there is no stage {stage}: the program has stages 0..{placement.num_stages - 1}"
            elif microbatch >= program.num_microbatches:
                reason = f"there is no microbatch {microbatch}: the program has 0..{program.num_microbatches - 1}"
            elif kind in OF_A_STAGE and rank not in placement.ranks_of[stage]:
                reason = f"stage {stage} lives on rank {_words(placement.ranks_of[stage])}, not on rank {rank}"
            elif kind not in OF_A_STAGE and placement.rank(stage, microbatch) != rank:
                reason = f"{action} belongs on rank {placement.rank(stage, microbatch)}"
            else:
                continue
            yield Violation(rank, index, str(action), reason)


def _duplicates(program: Program) -> Iterator[Violation]:
    for rank, row in enumerate(program.rows):
        first: dict[Action, int] = {}
        for index, action in enumerate(row):
            if action.kind not in OF_A_STAGE and first.setdefault(action, index) != index:
                yield Violation(rank, index, str(action), f"runs twice, first as action {first[action]}")


_PARTS = {Kind.F: 1, Kind.B: 2, Kind.I: 4, Kind.W: 8}
"""What makes a unit complete at a stage, as bits; forwards alone where a program does not train."""
_WHOLE = (_PARTS[Kind.F] | _PARTS[Kind.B], _PARTS[Kind.F] | _PARTS[Kind.I] | _PARTS[Kind.W])


def _incomplete(program: Program) -> Iterator[Violation]:
    """Every unit goes forward at every stage; in a training program it also comes back: B, or I and W."""
    has = dict.fromkeys(product(range(program.num_stages), range(program.num_microbatches)), 0)
    trains = False
    for row in program.rows:
        for stage, kind, microbatch in row:
            if kind in _PARTS and (stage, microbatch) in has:
                has[stage, microbatch] |= _PARTS[kind]
                trains = trains or kind is not Kind.F
    whole = _WHOLE if trains else (_PARTS[Kind.F],)
    for (stage, microbatch), parts in has.items():
        if parts in whole:
            continue
        rank = program.placement.rank(stage, microbatch)
        unit = f"of microbatch {microbatch} at stage {stage}"
        if not parts & _PARTS[Kind.F]:
            yield Violation(rank, -1, "", f"the forward {unit} ({stage}F{microbatch}) is missing")
        back = parts & ~_PARTS[Kind.F]
        if trains and back | _PARTS[Kind.F] not in whole:
            names = [f"{stage}{kind}{microbatch}" for kind in sorted(_PARTS) if kind is not Kind.F]
            written = ", ".join(
                name for name, kind in zip(names, (Kind.B, Kind.I, Kind.W), strict=True) if back & _PARTS[kind]
            )
            yield Violation(
                rank, -1, "", f"the backward {unit} must be one B, or I and W; the program has {written or 'nothing'}"
            )


def _lost_swaps(program: Program) -> Iterator[Violation]:
    """What goes out comes in again."""
    fetched = {action[::2] for _, action in program.actions() if action[1] is Kind.IN}
    for rank, row in enumerate(program.rows):
        for index, action in enumerate(row):
            if action[1] is Kind.OUT and action[::2] not in fetched:
                fetch = Action(action.stage, Kind.IN, action.microbatch)
                yield Violation(rank, index, str(action), f"is swapped out and never fetched: {fetch} is missing")


def _unmet_needs(program: Program, index_of: Places, place: Places) -> Iterator[Violation]:
    """Every need of ``semantics`` is somewhere in the program; on the same rank it comes earlier."""
    period = program.placement.period
    known_needs: dict[tuple[Kind, int, int], list[tuple[bool, list[tuple[int, Kind]]]]] = {}
    for action, (rank, index) in index_of.items():
        stage, kind, microbatch = action
        key = (kind, stage, microbatch % period)
        if key not in known_needs:
            known_needs[key] = list(_needs(program, *key))
        for optional, wanted in known_needs[key]:
            known = [index_of[found] for each in wanted if (found := (*each, microbatch)) in index_of]
            if not known and not optional:
                names = " or ".join(f"{other}{needed}{microbatch}" for other, needed in wanted)
                yield _at(place, action, rank, f"needs {names}, which no rank runs")
            elif known and known[0][1] > index:
                later = program.rows[rank][known[0][1]]
                yield _at(place, action, rank, f"needs {later}, which comes later in the row")


def _needs(program: Program, kind: Kind, stage: int, turn: int) -> Iterator[tuple[bool, list[tuple[int, Kind]]]]:
    """(optional?, any of these (stage, kind)) for every need, as it is met on the rank that runs the action."""
    rank_of = program.placement.rank
    stages = {Where.HERE: (stage,), Where.WRITERS: program.writers[stage], Where.READERS: program.readers[stage]}
    stages[Where.MEMBERS] = ()  # the meetings' own law
    for need in NEEDS[kind]:
        for other in stages[need.where]:
            if rank_of(other, turn) == rank_of(stage, turn):
                yield need.optional, [(other, needed) for needed in need.kinds]
            else:
                assert need.received_by is not None, f"{kind} needs {need.kinds} of another rank"
                yield need.optional, [(stage, need.received_by)]


class _Peers(dict[tuple[Kind, int, int], tuple[int, ...]]):
    """``semantics.peers`` of a SEND or RECV, asked once for each turn of the placement."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program = program

    def __missing__(self, place: tuple[Kind, int, int]) -> tuple[int, ...]:
        kind, stage, turn = place
        found = self[place] = peers(self._program, Action(stage, kind, turn))
        return found


def _unmatched(program: Program, present: Places, place: Places) -> Iterator[Violation]:
    """Every SEND has its RECV and every RECV its SEND; none goes nowhere."""
    partners = {**SEND_OF, **_RECEIVE_OF}
    exchanging, period = _Peers(program), program.placement.period
    for rank, row in enumerate(program.rows):
        for action in row:
            stage, kind, microbatch = action
            if kind not in partners:
                continue
            others = exchanging[kind, stage, microbatch % period]
            if not others:
                yield _at(place, action, rank, "exchanges with no other rank")
            for other in others:
                if (other, partners[kind], microbatch) not in present:
                    wanted = Action(other, partners[kind], microbatch)
                    yield _at(place, action, rank, f"has no counterpart: {wanted} is missing")


def _crossed(program: Program, place: Places) -> Iterator[Violation]:
    """For each ordered pair of ranks, and for each skip, the order of the sends is the order of the receives."""
    sends: dict[tuple[int, int], list[Action]] = defaultdict(list)
    receives: dict[tuple[int, int], list[tuple[Action, Action]]] = defaultdict(list)
    exchanging, period, rank_of = _Peers(program), program.placement.period, program.placement.rank
    known: dict[tuple[Kind, int, int], list[tuple[int, tuple[int, int]]]] = {}  # who exchanges, and the queue it is in
    for rank, row in enumerate(program.rows):
        for action in row:
            stage, kind, microbatch = action
            if kind not in COMMUNICATION:
                continue
            turn = (kind, stage, microbatch % period)
            if turn not in known:
                others = exchanging[turn]
                homes = [rank_of(other, turn[2]) for other in others]
                known[turn] = (
                    [
                        (other, (channel(program, other, stage, home), rank))
                        for other, home in zip(others, homes, strict=True)
                    ]
                    if kind in SEND_OF
                    else [
                        (other, (channel(program, stage, other, rank), home))
                        for other, home in zip(others, homes, strict=True)
                    ]
                )
            for other, line in known[turn]:
                if kind in SEND_OF:
                    receives[line].append((Action(other, SEND_OF[kind], microbatch), action))
                else:
                    sends[line].append(action)
    for (queue, target), expected in receives.items():
        sent = list(dict.fromkeys(sends[queue, target]))
        taken = list(dict.fromkeys(send for send, _ in expected))
        if sent == taken or set(sent) != set(taken):
            continue  # equal, or reported as unmatched
        number = next(i for i, (a, b) in enumerate(zip(sent, taken, strict=True)) if a != b)
        receive = next(receive for send, receive in expected if send == taken[number])
        source = program.placement.rank(taken[number].stage, receive.microbatch)
        reason = f"takes message {number} from rank {source}, which is {sent[number]}: the orders differ"
        yield _at(place, receive, target, reason)


def _deadlock(program: Program, given: Program, transport: Transport, place: Places) -> Iterator[Violation]:
    """What every rank waits for when none can go on. Sends block, as the strictest transport's do."""
    timeline = run(program, transport=transport, blocking_sends=True)
    for event in timeline.stuck:
        action, rank = timeline.flat.action(event), int(timeline.flat.rank[event])
        if action.kind in MEETINGS:
            yield meetings.deadlock(timeline, given, event, f"deadlock under {transport}")
            continue
        if action.kind in COMMUNICATION:
            waits = f"{Action(peers(program, action)[0], _RECEIVE_OF[action.kind], action.microbatch)} to be posted"
        else:
            waits = f"what {_waits_for(action)} to arrive"
        yield _at(place, action, rank, f"deadlock under {transport}: waits for ever for {waits}")


def _waits_for(action: Action) -> str:
    kinds = [need.received_by for need in NEEDS[action.kind] if need.received_by]
    return (
        " and ".join(f"{action.stage}{kind}{action.microbatch} brings" for kind in kinds) or "its rank is waiting for"
    )


def _too_much(program: Program, bound: float) -> Iterator[Violation]:
    for rank, peak in enumerate(simulate(program).peak_activations):
        if peak > bound + 1e-9:
            yield Violation(
                rank, -1, "", f"holds the activations of {peak:g} microbatches, more than the bound of {bound:g}"
            )


def _words(numbers: object) -> str:
    return " and ".join(map(str, numbers))  # type: ignore[call-overload]
