"""Updates that are agreed on afterwards, and taken back where they must be: no rank waits at the end of a batch.

Zero-bubble schedules end as staggered as they begin: rank 0 is done first. If all ranks agree *before* they update,
rank 0 waits for the last, and a step takes the makespan. If they agree *after* it, rank 0 updates at once and begins
the next batch. The agreement is made there, when the last rank has come to its own update:

    zb-h2, p = 3          rank 0   … W W STEP F0 F1 AGREE F2 …
                          rank 1   … W W W  STEP F0 AGREE F1 …          rank r has made p-1-r forwards by then
                          rank 2   … W W W  W  STEP AGREE F0 …

Where the agreement says no (a gradient is not finite, or the norm must be clipped), every rank takes its update back,
makes the right one (or none), and makes the forwards that stand between the two again. So these forwards are all that
may stand there, and their messages are sent and taken within: nothing of them is on its way when all begin again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, islice

from vpipe.errors import UserError
from vpipe.schedule.action import Action, Kind
from vpipe.schedule.authors.authoring import check_counts, check_flags
from vpipe.schedule.flat import find_transfers
from vpipe.schedule.program import Program, Row
from vpipe.schedule.violation import Violation

REPEATABLE = (Kind.F, Kind.SEND_F, Kind.RECV_F)
"""What may stand between an update and the agreement on it: what can be done again."""


def chained(program: Program, post_validation: bool, num_batches: int) -> Program:
    """``num_batches`` times a synchronous program whose ranks hold a stage each on the way down, agreed on afterwards;
    the program itself without ``post_validation``."""
    check_flags(post_validation=post_validation)
    check_counts(num_batches=num_batches)
    if not post_validation:
        if num_batches > 1:
            raise UserError(
                f"num_batches is {num_batches}, but without post_validation all ranks meet before each update: "
                "give post_validation: true, or one batch"
            )
        return program
    m = program.num_microbatches

    def row(rank: int, actions: Row) -> Iterator[Action]:
        work = [action for action in actions if action.kind is not Kind.STEP]
        updates = [action for action in actions if action.kind is Kind.STEP]
        agreement = Action(min(stage for stage, _, _ in updates), Kind.AGREE)
        first = [action.kind is Kind.F and action.stage == work[0].stage for action in work]
        ahead = min(program.num_ranks - 1 - rank, [*first, False].index(False))
        for batch in range(num_batches):
            moved = [Action(stage, kind, microbatch + batch * m) for stage, kind, microbatch in work]
            yield from moved[:ahead]
            if batch:
                yield agreement
            yield from moved[ahead:]
            yield from updates
        yield agreement

    return Program(
        tuple(tuple(row(rank, actions)) for rank, actions in enumerate(program.rows)),
        program.placement,
        m * num_batches,
        program.versions,
        program.skips,
    )


def violations(program: Program, lowered: bool) -> Iterator[Violation]:
    """Every broken rule of a program whose updates are agreed on afterwards; messages are there once it is lowered."""
    for rank, row in enumerate(program.rows):
        yield from _in_row(rank, row)
    if lowered:
        yield from _across(program)


def _in_row(rank: int, row: Row) -> Iterator[Violation]:
    """Each update is agreed on once, before another gradient; in between come forwards alone."""
    updated: set[int] = set()
    forwards = False
    for index, action in enumerate(row):
        reason = None
        if action.kind is Kind.STEP:
            if action.stage in updated or forwards:
                reason = "updates before the ranks have agreed on the update before"
            updated.add(action.stage)
        elif action.kind is Kind.AGREE:
            reason = None if updated else "agrees on no update"
            updated.clear()
            forwards = False
        elif updated:
            forwards = True
            if action.kind not in REPEATABLE:
                reason = (
                    "stands between an update and the agreement on it, where only forwards may: they are made again if "
                    "the update is taken back"
                )
        if reason is not None:
            yield Violation(rank, index, str(action), reason)
    if updated:
        yield Violation(rank, -1, f"{min(updated)}STEP", "is never agreed on")


def _across(program: Program) -> Iterator[Violation]:
    """What is sent, received or used between an update and its agreement is all of it there, on both ranks."""
    flat = program.flat
    spans = [span for row in program.rows for span in _spans(row)]
    transfers = find_transfers(flat)
    for send, receive in zip(transfers.send.tolist(), transfers.receive.tolist(), strict=True):
        kinds = (Kind.F,) if flat.action(receive).kind is Kind.RECV_F else (Kind.B, Kind.I)
        stage, microbatch = int(flat.stage[receive]), int(flat.microbatch[receive])
        users = [int(flat.find(kind, flat.stage[[receive]], flat.microbatch[[receive]])[0]) for kind in kinds]
        places = {spans[number] for number in (send, receive, *(user for user in users if user >= 0))}
        if len(places) > 1 and any(place % 2 for place in places):
            source, action = int(flat.rank[send]), flat.action(send)
            reason = (
                f"is on its way to {stage}{kinds[0]}{microbatch} while the ranks agree on an update: if that is taken "
                "back, it would be sent twice"
            )
            yield Violation(source, flat.index(send), str(action), reason)


def _spans(row: Row) -> Iterator[int]:
    """Of each action: odd between an update and its agreement, even elsewhere; the same number means the same span."""

    def after(span: int, action: Action) -> int:
        if action.kind is Kind.STEP:
            return span | 1
        return span + 1 if action.kind is Kind.AGREE else span

    return islice(accumulate(row, after, initial=0), len(row))
