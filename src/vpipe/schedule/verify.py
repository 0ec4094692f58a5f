"""Whether a program is right, before anything runs.

``verify`` returns every violation, not the first: what is missing, what comes twice, what stands on the wrong rank or
in the wrong order, sends and receives that do not match, a deadlock, memory beyond a bound,
and updates that lose or mix gradients. What hangs, ``timeline`` tells; what becomes of weights,
``updates``. ``executable`` gives the runtime what it runs: no program gets there unverified.

The law of an action is asked of all at once, as arrays (``flat``): a program of 256 ranks and 1,024 microbatches has a
million and a half of them. Words are made only for those that break one.

At ``REDUCE`` the replicas of a stage meet, at ``AGREE`` all ranks (``semantics.members``). A communicator, the set of
ranks that meet, has one queue: its members must come to their meetings in the same order, or each waits for the other
at another one. What hangs through meetings of several communicators, the clock finds.

Words: docs/glossary.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from itertools import zip_longest

import numpy as np

from vpipe.errors import UserError
from vpipe.schedule import updates
from vpipe.schedule.action import OF_A_STAGE, Action, Kind
from vpipe.schedule.flat import NONE, Bools, Flat, Ints, collector_paused, find_transfers, padded
from vpipe.schedule.lower import agree, communicate, is_lowered, lower, reduce
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import COMMUNICATION, MEETINGS, NEEDS, SEND_OF, Need, Round, Where, members, peers, rounds
from vpipe.schedule.simulate import simulate
from vpipe.schedule.timeline import Timeline, run
from vpipe.schedule.violation import Violation, folded

RECEIVE_OF = {send: receive for receive, send in SEND_OF.items()}


def verify(program: Program, *, max_activations: float | None = None, receives_block: bool = False) -> list[Violation]:
    """Every violation, in the order of ranks and actions; none: the program runs and computes the right thing.

    A program that says nothing of communication is completed by lowering first. The index of a violation counts the
    actions of the program as it was given. What makes other checks meaningless ends the search. ``receives_block``: it
    is asked whether the program runs where a receive that is posted may block its rank.
    """
    with collector_paused():
        return _verify(program, max_activations, receives_block)


def executable(
    program: Program,
    name: str,
    *,
    recompute_stages: Collection[int] = (),
    swap_stages: Collection[int] = (),
    agrees: bool = False,
    receives_block: bool = False,
) -> Program:
    """What ranks run of a program called ``name``: lowered unless it is, with the agreement of a synchronous one, and
    verified; a ``UserError`` where it cannot be run. Where ``receives_block``, its messages are lowered anew."""
    if is_lowered(program):
        _check_lowered(program, {Kind.R: recompute_stages, Kind.OUT: swap_stages})
        if receives_block:
            silent = program.with_rows([a for a in row if a.kind not in COMMUNICATION] for row in program.rows)
            program = communicate(silent, receives_block=True)
        program = agree(program) if agrees else program
    else:
        program = lower(
            program,
            recompute_stages=recompute_stages,
            swap_stages=swap_stages,
            agrees=agrees,
            receives_block=receives_block,
        )
    if violations := _known(program, receives_block):
        kinds = "; ".join(map(str, folded(violations)[:3]))
        raise UserError(f"{name} is not a valid program: {kinds} ({len(violations)} in all; 'vpipe verify' lists them)")
    return program


@lru_cache(maxsize=64)
def _known(program: Program, receives_block: bool) -> tuple[Violation, ...]:
    return tuple(verify(program, receives_block=receives_block))


def _check_lowered(program: Program, wanted: Mapping[Kind, Collection[int]]) -> None:
    """A program that says all itself must also say what is recomputed and swapped."""
    has = {(action.kind, action.stage) for _, action in program.actions()}
    for kind, stages in wanted.items():
        for stage in sorted(stages):
            if (kind, stage) not in has:
                option = "recompute" if kind is Kind.R else "swap"
                raise UserError(
                    f"{option} names layers of stage {stage}, but the lowered program has no {kind} there; "
                    "give the program without communication, which is then lowered here, or add those actions"
                )


def _verify(program: Program, max_activations: float | None, receives_block: bool) -> list[Violation]:
    flat, places = program.flat, Places(program)
    foreign = [*strangers(flat)]
    twice = [*duplicates(flat)]
    found = [*foreign, *twice, *incomplete(flat)]
    if foreign:
        return sorted(set(found))
    lowered = is_lowered(program)
    found += updates.violations(program, lowered)
    whole = program if lowered else communicate(reduce(program), receives_block=receives_block)
    alone = [*unmatched(whole.flat, places)]
    unmet = [*unmet_needs(whole.flat, places)]
    if twice and not lowered:  # between which of the two a message is added, lowering decides
        unmet = [each for each in unmet if each.index >= 0]
    found += [*unmet, *alone]
    found += [] if alone else crossed(whole.flat, places)
    found += missed_meetings(whole, program)
    found += lost_swaps(flat)
    if not found:
        found += _deadlock(whole, program, places, receives_block)
    if not found and max_activations is not None:
        found += _too_much(whole, max_activations)
    return sorted(set(found))


def _deadlock(program: Program, given: Program, places: Places, receives_block: bool) -> Iterator[Violation]:
    """What every rank waits for when none can go on. Sends block, as the strictest transport's do."""
    timeline = run(program, blocking_sends=True, blocking_receives=receives_block)
    for event in timeline.stuck:
        action, rank = timeline.flat.action(event), int(timeline.flat.rank[event])
        if action.kind in MEETINGS:
            yield deadlock_at_meeting(timeline, given, event)
            continue
        if action.kind in COMMUNICATION:
            partner, done = (
                (SEND_OF[action.kind], "sent") if action.kind in SEND_OF else (RECEIVE_OF[action.kind], "posted")
            )
            waits = f"{Action(peers(program, action)[0], partner, action.microbatch)} to be {done}"
        else:
            waits = f"what {_waits_for(action)} to arrive"
        yield places.at(action, rank, f"deadlock: waits for ever for {waits}")


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


class Places:
    """Where the program as given has each action: (rank, index). Looked for when the first words are made."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._known: dict[Action, tuple[int, int]] | None = None

    def at(self, action: Action, rank: int, reason: str) -> Violation:
        """A violation at an action, or at its rank where lowering added the action."""
        if self._known is None:
            rows = enumerate(self._program.rows)
            self._known = {action: (rank, index) for rank, row in rows for index, action in enumerate(row)}
        known_rank, index = self._known.get(action, (rank, -1))
        return Violation(known_rank, index, str(action), reason)


def strangers(flat: Flat) -> Iterator[Violation]:
    """Actions of stages or units that do not exist, or on a rank that does not run them."""
    program, placement = flat.program, flat.program.placement
    beyond = (flat.stage >= placement.num_stages) | (flat.microbatch >= program.num_microbatches)
    stage = np.where(beyond, 0, flat.stage)
    at_home = (padded(placement.ranks_of)[stage] == flat.rank[:, None]).any(axis=1)
    on_turn = flat.rank_of(stage, flat.microbatch) == flat.rank
    for number in np.flatnonzero(beyond | ~np.where(flat.of(OF_A_STAGE), at_home, on_turn)).tolist():
        action, rank = flat.action(number), int(flat.rank[number])
        if action.stage >= placement.num_stages:
            reason = f"there is no stage {action.stage}: the program has stages 0..{placement.num_stages - 1}"
        elif action.microbatch >= program.num_microbatches:
            reason = f"there is no microbatch {action.microbatch}: the program has 0..{program.num_microbatches - 1}"
        elif action.kind in OF_A_STAGE:
            homes = " and ".join(map(str, placement.ranks_of[action.stage]))
            reason = f"stage {action.stage} lives on rank {homes}, not on rank {rank}"
        else:
            reason = f"{action} belongs on rank {placement.rank(action.stage, action.microbatch)}"
        yield Violation(rank, flat.index(number), str(action), reason)


def duplicates(flat: Flat) -> Iterator[Violation]:
    """An action of a unit runs once."""
    first: dict[tuple[int, Action], int] = {}
    for number in np.flatnonzero(~flat.of(OF_A_STAGE) & flat.repeated).tolist():
        action, rank, index = flat.action(number), int(flat.rank[number]), flat.index(number)
        if first.setdefault((rank, action), index) != index:
            yield Violation(rank, index, str(action), f"runs twice, first as action {first[rank, action]}")


_BACKWARD = (Kind.B, Kind.I, Kind.W)


def incomplete(flat: Flat) -> Iterator[Violation]:
    """Every unit goes forward at every stage; in a training program it also comes back: B, or I and W."""
    trains = bool(flat.kinds & {*_BACKWARD})
    here = {kind: flat.present(kind) for kind in (Kind.F, *_BACKWARD)}
    forward = here[Kind.F]
    split = here[Kind.I] & here[Kind.W] & ~here[Kind.B]
    back = split | (here[Kind.B] & ~here[Kind.I] & ~here[Kind.W]) if trains else np.ones_like(forward)
    for stage, microbatch in np.argwhere(~(forward & back)).tolist():
        rank = flat.program.placement.rank(stage, microbatch)
        unit = f"of microbatch {microbatch} at stage {stage}"
        if not forward[stage, microbatch]:
            yield Violation(rank, -1, "", f"the forward {unit} ({stage}F{microbatch}) is missing")
        if not back[stage, microbatch]:
            written = [f"{stage}{kind}{microbatch}" for kind in _BACKWARD if here[kind][stage, microbatch]]
            has = ", ".join(written) or "nothing"
            yield Violation(rank, -1, "", f"the backward {unit} must be one B, or I and W; the program has {has}")


def lost_swaps(flat: Flat) -> Iterator[Violation]:
    """What goes out comes in again."""
    gone = np.flatnonzero(flat.of([Kind.OUT]))
    lost = gone[flat.find(Kind.IN, flat.stage[gone], flat.microbatch[gone]) == NONE]
    for number in lost.tolist():
        action = flat.action(number)
        fetch = Action(action.stage, Kind.IN, action.microbatch)
        reason = f"is swapped out and never fetched: {fetch} is missing"
        yield Violation(int(flat.rank[number]), flat.index(number), str(action), reason)


def unmet_needs(flat: Flat, places: Places) -> Iterator[Violation]:
    """Every need of ``semantics`` is somewhere in the program; on the same rank it comes earlier."""
    for kind in sorted(flat.kinds):
        users = np.flatnonzero(flat.of([kind]))
        for need in NEEDS[kind]:
            for other, chosen in _others(flat, need, users):
                yield from _unmet(flat, places, need, other[chosen], users[chosen])


def _others(flat: Flat, need: Need, users: Ints) -> Iterator[tuple[Ints, Bools]]:
    """The stages that a need is about, one for each user, and which users have such a stage."""
    program, stage = flat.program, flat.stage[users]
    if need.where is Where.HERE:
        yield stage, np.ones(len(users), np.bool_)
    elif need.where is not Where.MEMBERS:  # of rounds, not of microbatches: ``missed_meetings``
        for other in padded(program.writers if need.where is Where.WRITERS else program.readers)[stage].T:
            yield other, other != NONE


def _unmet(flat: Flat, places: Places, need: Need, other: Ints, users: Ints) -> Iterator[Violation]:
    stage, microbatch = flat.stage[users], flat.microbatch[users]
    here = flat.rank_of(other, microbatch) == flat.rank_of(stage, microbatch)
    found = flat.find_any(need.kinds, other, microbatch)
    if need.received_by is not None:
        found = np.where(here, found, flat.find(need.received_by, stage, microbatch))
    missing = (found == NONE) & (not need.optional)
    for at in np.flatnonzero(missing | (found > users)).tolist():
        user = int(users[at])
        action, rank = flat.action(user), int(flat.rank[user])
        if missing[at]:
            wanted = [(int(other[at]), kind) for kind in need.kinds]
            if not here[at]:
                assert need.received_by is not None, f"{action} needs {need.kinds} of another rank"
                wanted = [(action.stage, need.received_by)]
            names = " or ".join(f"{needed}{kind}{action.microbatch}" for needed, kind in wanted)
            yield places.at(action, rank, f"needs {names}, which no rank runs")
        else:
            yield places.at(action, rank, f"needs {flat.action(int(found[at]))}, which comes later in the row")


def unmatched(flat: Flat, places: Places) -> Iterator[Violation]:
    """Every SEND has its RECV and every RECV its SEND; none goes nowhere."""
    program = flat.program
    for kind, partner in {**SEND_OF, **RECEIVE_OF}.items():
        here = np.flatnonzero(flat.of([kind]))
        stage, microbatch = flat.stage[here], flat.microbatch[here]
        forward = kind in (Kind.SEND_F, Kind.RECV_B)
        exchanges = np.zeros(len(here), np.bool_)
        for other in padded(program.readers if forward else program.writers)[stage].T:
            travels = (other != NONE) & (flat.rank_of(other, microbatch) != flat.rank_of(stage, microbatch))
            exchanges |= travels
            for at in np.flatnonzero(travels & (flat.find(partner, other, microbatch) == NONE)).tolist():
                wanted = Action(int(other[at]), partner, int(microbatch[at]))
                reason = f"has no counterpart: {wanted} is missing"
                yield places.at(flat.action(int(here[at])), int(flat.rank[here[at]]), reason)
        for number in here[~exchanges].tolist():
            yield places.at(flat.action(number), int(flat.rank[number]), "exchanges with no other rank")


def crossed(flat: Flat, places: Places) -> Iterator[Violation]:
    """For each ordered pair of ranks, and for each skip, the order of the sends is the order of the receives."""
    transfers = find_transfers(flat)
    same = transfers.link[1:] == transfers.link[:-1]
    wrong = set(transfers.link[1:][same & (np.diff(transfers.send) < 0)].tolist())
    queues: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number in np.flatnonzero(np.isin(transfers.link, list(wrong))).tolist() if wrong else ():
        queues[int(transfers.link[number])].append((int(transfers.send[number]), int(transfers.receive[number])))
    for queue in queues.values():
        taken = list(dict.fromkeys(send for send, _ in queue))
        sent = sorted(taken)
        number = next((i for i, (a, b) in enumerate(zip(sent, taken, strict=True)) if a != b), NONE)
        if number == NONE:
            continue  # a RECV that is there twice
        receive = next(receive for send, receive in queue if send == taken[number])
        source, target = int(flat.rank[taken[number]]), int(flat.rank[receive])
        reason = f"takes message {number} from rank {source}, which is {flat.action(sent[number])}: the orders differ"
        yield places.at(flat.action(receive), target, reason)


Attended = dict[Round, dict[int, int]]
"""Meeting → member → the place of its action."""


def missed_meetings(program: Program, given: Program) -> Iterator[Violation]:
    """Every broken rule of the executable ``program``; places count the actions of the program as it was ``given``."""
    found = rounds(program) if program.flat.kinds & MEETINGS else {}
    yield from _absent(program, given, found)
    yield from _crossed_meetings(program, given, found)


def _absent(program: Program, given: Program, found: Attended) -> Iterator[Violation]:
    """All members come to their meeting."""
    for meeting, places in found.items():
        rank = min(places)
        action = program.rows[rank][places[rank]]
        missing = [each for each in members(program, action) if each not in places]
        if missing:
            who = "all ranks" if meeting.stage < 0 else f"all replicas of stage {meeting.stage}"
            reason = f"waits for {who}, but rank {missing[0]} never comes to {meeting}"
            yield _at_meeting(given, rank, action, meeting.number, reason)


def _crossed_meetings(program: Program, given: Program, found: Attended) -> Iterator[Violation]:
    """Members of a communicator meet in the same order: that of its first member."""
    queues: dict[tuple[int, ...], dict[int, list[tuple[int, Round]]]] = defaultdict(lambda: defaultdict(list))
    for meeting, places in found.items():
        for rank, index in places.items():
            ranks = tuple(sorted(members(program, program.rows[rank][index])))
            queues[ranks][rank].append((index, meeting))
    for queue in queues.values():
        first, *others = sorted(queue)
        expected = [meeting for _, meeting in sorted(queue[first])]
        for rank in others:
            here = [meeting for _, meeting in sorted(queue[rank])]
            for mine, theirs in zip_longest(here, expected):
                if mine is not None and theirs is not None and mine != theirs:
                    action = program.rows[rank][found[mine][rank]]
                    reason = f"comes to {mine} while rank {first} comes to {theirs}: members meet in the same order"
                    yield _at_meeting(given, rank, action, mine.number, reason)
                    break


def _at_meeting(given: Program, rank: int, action: Action, number: int, reason: str) -> Violation:
    """At the action of that round in the row as given; at the row where lowering added it."""
    places = [index for index, each in enumerate(given.rows[rank]) if each == action]
    return Violation(rank, places[number] if number < len(places) else -1, str(action), reason)


def deadlock_at_meeting(timeline: Timeline, given: Program, event: int) -> Violation:
    """A member waits at a meeting for ever: whom it waits for, and where those stand."""
    flat = timeline.flat
    rank = int(flat.rank[event])
    place = event - int(flat.row_start[rank])
    meeting, places = next((each, at) for each, at in rounds(flat.program).items() if at.get(rank) == place)
    heads = {int(flat.rank[head]): head for head in reversed(timeline.stuck)}
    words = []
    for other, index in places.items():
        head = heads.get(other)
        if other != rank and head is not None and head != int(flat.row_start[other]) + index:
            action = flat.action(head)
            row = given.rows[other]
            at = f" (action {row.index(action)})" if action in row else ""
            words.append(f"rank {other}, which stands at {action}{at}")
    who = " and ".join(words) or "the other members"
    return _at_meeting(
        given, rank, flat.action(event), meeting.number, f"deadlock: waits for ever for {who} to come to {meeting}"
    )
