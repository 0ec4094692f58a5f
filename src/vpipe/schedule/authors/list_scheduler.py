"""Greedy scheduling: each rank takes the best action that is ready, and the order in which it did is its row.

Two problems share this file. ``squeeze`` tightens an order that is already valid (v-half, v-min). ``greedy`` invents
one from the times of the stages (hanayo, zb-auto). A greedy scheduler with a hard memory cap can deadlock, when
forwards fill the memory that others need to finish. So ``squeeze`` lets a forward pass others only where the planned
order still fits afterwards, and users of ``greedy`` hold back new microbatches, never those under way on a longer path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Literal

from vpipe.schedule.action import Action, Kind
from vpipe.schedule.authors.authoring import B, F, I, W
from vpipe.schedule.placement import Placement

GROWTH = {F: 1, I: 0, B: -1, W: -1}
"""By how many forwards the held activations grow."""

Rule = Literal["in order", "weights last", "deepest first"]
"""Which of the ready actions a rank takes: the first in its planned order; the same, but W only if nothing else is
ready; or I before F before W, and among forwards the deepest stage."""


def squeeze(
    placement: Placement, planned: Sequence[Sequence[Action]], memory: int, rule: Rule
) -> tuple[int, list[list[Action]]] | None:
    """Run the planned rows (F, I, W of one time slot each) as early as possible; None where they get stuck.

    A rank holds at most ``memory`` forwards whose W is not done. The result is the number of slots and the rows.
    """
    left = [list(row) for row in planned]
    rows: list[list[Action]] = [[] for _ in left]
    held = [0] * len(left)
    done: set[Action] = set()
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
            done.add(action)
            held[rank] += GROWTH[action.kind]
        now += 1
    return now, rows


def _ready(actions: list[Action], held: int, memory: int, done: set[Action], last: int) -> list[int]:
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
        held += GROWTH[action.kind]
        if held > highest:
            highest = held
    return ready


def _needs(action: Action, last: int) -> list[Action]:
    stage, kind, k = action
    if kind is F:
        return [Action(stage - 1, F, k)] if stage else []
    if kind is I:
        return [Action(stage, F, k)] if stage == last else [Action(stage, F, k), Action(stage + 1, I, k)]
    return [Action(stage, I, k)]


def _preference(rule: Rule, action: Action, index: int) -> tuple[int, int, int]:
    if rule == "in order":
        return (0, 0, index)
    if rule == "weights last":
        return (action.kind is W, 0, index)
    return ((I, F, W).index(action.kind), -action.stage if action.kind is F else action.stage, index)


@dataclass
class Chooser:
    """What a rank knows when it chooses."""

    rank: int
    now: float = 0.0
    next_arrival: float = inf
    """When the next input under way will be there, as far as is known."""
    held: int = 0
    """Forwards whose activations are not freed."""
    ahead: int = 0
    """Forwards whose backward has not begun."""
    open: Counter[int] = field(default_factory=Counter)
    """The same of each stage."""
    row: list[Action] = field(default_factory=list)


Preference = Callable[[Chooser, Action], tuple[float, ...] | None]
"""The smallest is taken; None: not now."""


@dataclass(slots=True)
class _Line:
    """The actions of one kind that a rank does for a stage, in the order of their units."""

    stage: int
    kind: Kind
    upcoming: int
    """The unit that is next; with replicas the first is the replica's turn, and each takes every so-manieth."""
    replicas: int
    arrival: list[float]
    """Of every unit, when its input is there: shared by the replicas of a stage."""

    def head(self) -> Action:
        return Action(self.stage, self.kind, self.upcoming)


def greedy(
    placement: Placement, num_microbatches: int, times: Sequence[Mapping[Kind, float]], prefer: Preference
) -> list[list[Action]]:
    """Rows of F and B, or of F, I and W, as a clock finds them; ``times[stage]`` has the kinds and their durations."""
    kinds = tuple(times[0])
    backward = B if B in kinds else I
    last = placement.num_stages - 1
    arrival = {(stage, kind): [inf] * num_microbatches for stage in range(last + 1) for kind in kinds}
    arrival[0, F] = [0.0] * num_microbatches
    lines: list[list[_Line]] = [[] for _ in range(placement.num_ranks)]
    for stage, rank in placement.homes:
        turn, copies = placement.turn(stage, rank), placement.num_replicas(stage)
        lines[rank] += (_Line(stage, kind, turn, copies, arrival[stage, kind]) for kind in kinds)
    choosers = [Chooser(rank) for rank in range(placement.num_ranks)]
    busy_until = [0.0] * len(choosers)
    calls: list[tuple[float, int]] = [(0.0, rank) for rank in range(len(choosers))]

    def arrive(stage: int, kind: Kind, k: int, when: float) -> None:
        arrival[stage, kind][k] = when
        heappush(calls, (when, placement.rank(stage, k)))

    while calls:
        now, rank = heappop(calls)
        if now < busy_until[rank]:
            continue
        chooser = choosers[rank]
        line = _chosen(chooser, lines[rank], now, num_microbatches, prefer)
        if line is None:
            continue
        action = line.head()
        stage, kind, k = action
        busy_until[rank] = end = now + times[stage][kind]
        heappush(calls, (end, rank))
        chooser.row.append(action)
        line.upcoming += line.replicas
        chooser.held += GROWTH[kind]
        if kind is F:
            chooser.ahead += 1
            chooser.open[stage] += 1
            arrive(*((stage + 1, F) if stage < last else (stage, backward)), k, end)
        elif kind is backward:
            chooser.ahead -= 1
            chooser.open[stage] -= 1
            if stage:
                arrive(stage - 1, backward, k, end)
            if backward is I:
                arrive(stage, W, k, end)
    done = all(line.upcoming >= num_microbatches for mine in lines for line in mine)
    assert done, "the preference starved a rank"
    return [chooser.row for chooser in choosers]


def _chosen(
    chooser: Chooser, lines: list[_Line], now: float, num_microbatches: int, prefer: Preference
) -> _Line | None:
    """The line whose next action the rank prefers of those that are ready; None: it waits."""
    chooser.now, chooser.next_arrival = now, inf
    ready = []
    for line in lines:
        if line.upcoming < num_microbatches:
            when = line.arrival[line.upcoming]
            if when <= now:
                ready.append(line)
            elif when < chooser.next_arrival:
                chooser.next_arrival = when
    best, chosen = None, None
    for line in ready:
        action = line.head()
        key = prefer(chooser, action)
        if key is not None and (best is None or (key, action) < best):
            best, chosen = (key, action), line
    return chosen
