"""What every author of a schedule needs: four letters, one check, one way to close a batch.

An author writes, for each rank, the order of ``F B I W``; ``batch`` adds the update of every stage the rank holds and
makes the program. ``one_forward_one_backward`` is the order that half of the catalogue is a variation of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, repeat

from vpipe.errors import UserError
from vpipe.schedule.action import Action, Kind
from vpipe.schedule.placement import Placement
from vpipe.schedule.program import Program

F, B, I, W, STEP = Kind.F, Kind.B, Kind.I, Kind.W, Kind.STEP


def batch(placement: Placement, num_microbatches: int, rows: Iterable[Iterable[Action]]) -> Program:
    """The program of one batch: each rank's actions, then one update of every stage it holds."""
    closed = (
        (*row, *(Action(stage, STEP) for stage in stages))
        for row, stages in zip(rows, placement.stages_of, strict=True)
    )
    return Program(tuple(closed), placement, num_microbatches)


def each(stage: int, kind: Kind, num_microbatches: int) -> list[Action]:
    """One action for every microbatch in order. (``Action(…)`` is a Python function: large programs have millions.)"""
    return list(map(tuple.__new__, repeat(Action), zip(repeat(stage), repeat(kind), range(num_microbatches))))


def one_forward_one_backward(forwards: Sequence[Action], backwards: Sequence[Action], num_ahead: int) -> list[Action]:
    """``num_ahead`` forwards, then a forward and a backward in turn, then the backwards that are left.

    num_ahead = 2, four forwards:   F F F B F B B B
    """
    num_pairs = max(0, len(forwards) - num_ahead)
    pairs = zip(forwards[num_ahead:], backwards, strict=False)
    return [*forwards[:num_ahead], *chain.from_iterable(pairs), *backwards[num_pairs:]]


def unroll(down: int, up: int, num_microbatches: int, phases: Iterable[tuple[int, str]]) -> list[Action]:
    """A rank's row on a V, from phases such as ``(3, "f I W")``: three times these letters.

    Upper case is the stage on the way down the ranks, lower case the one on the way up. F takes the stage's next
    microbatch, B and I its next backward, W the oldest weight gradient that the stage owes, x the oldest that either
    owes. Microbatches from ``num_microbatches`` on are left out: phases of a full pipe also serve a shorter batch.
    """
    count: Counter[tuple[int, bool]] = Counter()
    owed: list[Action] = []
    actions = []
    for times, letters in phases:
        for letter in letters.split() * times:
            stage = down if letter.isupper() else up
            if letter in "xWw":
                action = next(each for each in owed if letter == "x" or each.stage == stage)
                owed.remove(action)
            else:
                kind = Kind(letter.upper())
                action = Action(stage, kind, count[stage, kind is F])
                count[stage, kind is F] += 1
                if kind is I:
                    owed.append(Action(stage, W, action.microbatch))
            if action.microbatch < num_microbatches:
                actions.append(action)
    return actions


def check_flags(**flags: object) -> None:
    """Refuse anything but True and False, by name."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise UserError(f"{name} must be true or false, not {flag!r}")


def check_counts(**counts: object) -> None:
    """Refuse anything but whole numbers of at least 1, by name."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UserError(f"{name} must be a whole number of at least 1, not {count!r}")
