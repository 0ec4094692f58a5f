"""The rules of meetings: who comes, and in which order.

At ``REDUCE`` the replicas of a stage meet, at ``AGREE`` all ranks (``semantics.members``). A communicator, the set of
ranks that meet, has one queue: its members must come to their meetings in the same order, or each waits for the other
at another one. ``verify`` asks here; what hangs through meetings of several communicators, its event loop finds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import zip_longest

from vpipe.schedule.action import Action, Kind
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import MEETINGS, Round, members, rounds
from vpipe.schedule.timeline import Timeline
from vpipe.schedule.violation import Violation

Attended = dict[Round, dict[int, int]]
"""Meeting → member → the place of its action."""


def violations(program: Program, given: Program) -> Iterator[Violation]:
    """Every broken rule of the executable ``program``; places count the actions of the program as it was ``given``."""
    found = rounds(program) if program.flat.kinds & MEETINGS else {}
    yield from _absent(program, given, found)
    yield from _crossed(program, given, found)


def _absent(program: Program, given: Program, found: Attended) -> Iterator[Violation]:
    """Everybody comes to an AGREE; that replicas reduce equally often, ``updates`` says."""
    for meeting, places in found.items():
        missing = [rank for rank in range(program.num_ranks) if rank not in places]
        if meeting.kind is Kind.AGREE and missing:
            rank = min(places)
            action = program.rows[rank][places[rank]]
            reason = f"waits for all ranks, but rank {missing[0]} never comes to {meeting}"
            yield _at(given, rank, action, meeting.number, reason)


def _crossed(program: Program, given: Program, found: Attended) -> Iterator[Violation]:
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
                    yield _at(given, rank, action, mine.number, reason)
                    break


def _at(given: Program, rank: int, action: Action, number: int, reason: str) -> Violation:
    """At the action of that round in the row as given; at the row where lowering added it."""
    places = [index for index, each in enumerate(given.rows[rank]) if each == action]
    return Violation(rank, places[number] if number < len(places) else -1, str(action), reason)


def deadlock(timeline: Timeline, given: Program, event: int, found: str) -> Violation:
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
    return _at(
        given, rank, flat.action(event), meeting.number, f"{found}: waits for ever for {who} to come to {meeting}"
    )
