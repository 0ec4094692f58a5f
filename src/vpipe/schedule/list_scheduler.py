"""Greedy scheduling: each rank takes the best action that is ready, and the order in which it did is its row.

Two problems share it. ``squeeze`` tightens an order that is already valid (the V schedules). ``greedy`` invents one from
measured times (zb-auto, hanayo). A greedy scheduler with a hard memory cap can deadlock, when forwards fill the memory
that others need to finish; so ``squeeze`` lets a forward pass others only where the planned order still fits afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from vpipe.schedule.action import Action
from vpipe.schedule.authoring import F, I, W
from vpipe.schedule.placement import Placement

Rule = Literal["in order", "weights last", "deepest first"]
"""Which of the ready actions a rank takes: the first in its planned order; the same, but W only if nothing else is ready;
or I before F before W, and among forwards the deepest stage."""


def squeeze(
    placement: Placement, planned: Sequence[Sequence[Action]], memory: int, rule: Rule
) -> tuple[int, list[list[Action]]] | None:
    """Run the planned rows (F, I, W of one time slot each) as early as possible; None where they get stuck.

    A rank holds at most ``memory`` forwards whose W is not done. The result is the number of slots and the rows.
    """
    left = [list(row) for row in planned]
    rows: list[list[Action]] = [[] for _ in left]
    held = [0] * len(left)
    done: dict[Action, int] = {}
    last, now = placement.num_stages - 1, 0
    while any(left):
        taken = []
        for rank, actions in enumerate(left):
            ready = _ready(actions, held[rank], memory, done, last)
            if ready:
                index = min(ready, key=lambda each: _preference(rule, actions[each], each))
                taken.append((rank, actions.pop(index)))
        if not taken:
            return None
        for rank, action in taken:
            rows[rank].append(action)
            done[action] = now
            held[rank] += _growth(action)
        now += 1
    return now, rows


def _ready(actions: list[Action], held: int, memory: int, done: dict[Action, int], last: int) -> list[int]:
    """Places in ``actions`` that could run now. A forward could if all that it would pass still fits beside it."""
    ready = []
    seen: set[tuple[int, str]] = set()
    highest = held
    for index, action in enumerate(actions):
        first_of_its_kind = (action.stage, action.kind) not in seen
        if first_of_its_kind:
            seen.add((action.stage, action.kind))
            fits = action.kind is not F or highest < memory
            if fits and all(need in done for need in _needs(action, last)):
                ready.append(index)
            if len(seen) == 6:
                break
        held += _growth(action)
        highest = max(highest, held)
    return ready


def _needs(action: Action, last: int) -> list[Action]:
    stage, kind, k = action
    if kind is F:
        return [Action(stage - 1, F, k)] if stage else []
    if kind is I:
        return [Action(stage, F, k)] if stage == last else [Action(stage, F, k), Action(stage + 1, I, k)]
    return [Action(stage, I, k)]


def _growth(action: Action) -> int:
    return {F: 1, W: -1}.get(action.kind, 0)


def _preference(rule: Rule, action: Action, index: int) -> tuple[int, int, int]:
    if rule == "in order":
        return (0, 0, index)
    if rule == "weights last":
        return (action.kind is W, 0, index)
    return ((I, F, W).index(action.kind), -action.stage if action.kind is F else action.stage, index)
