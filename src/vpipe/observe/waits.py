"""Where ranks meet.

Most waits are for messages (``Measured.producers``). Two kinds of action need none and wait all the same: the replicas
of a stage meet at ``REDUCE``, and in a synchronous program all ranks meet at ``STEP`` where the update depends on all
of them (global gradient norm, or skipping a gradient that is not finite). The runtime does not record when a meeting is
complete, but the record tells: if nobody left before the last one came, they met.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache

from vpipe.observe.measured import Measured
from vpipe.schedule.action import Action, Kind

Meetings = dict[tuple[int, int], tuple[int, int]]
"""(rank, index in its row) → when everyone had come, and who came last."""


@lru_cache(maxsize=64)
def meetings(step: Measured) -> Meetings:
    """Where ranks met, and when the last of them came."""
    rounds: dict[tuple[Kind, int, int], list[tuple[int, int]]] = defaultdict(list)
    single = all(
        sum(event.action == Action(stage, Kind.STEP) for event in row) <= 1
        for rank, row in enumerate(step.ranks)
        for stage in step.program.placement.stages_of[rank]
    )
    for rank, row in enumerate(step.ranks):
        seen: dict[tuple[Kind, int], int] = defaultdict(int)
        for index, event in enumerate(row):
            stage, kind, _ = event.action
            if kind is not Kind.REDUCE and not (kind is Kind.STEP and single):
                continue
            where = stage if kind is Kind.REDUCE else -1
            rounds[kind, where, seen[kind, where]].append((rank, index))
            seen[kind, where] += 1
    found: Meetings = {}
    for members in rounds.values():
        if len({rank for rank, _ in members}) < 2:
            continue
        events = [step.ranks[rank][index] for rank, index in members]
        begins = [event.begin for event in events]
        last = max(begins)
        if all(event.end >= last for event in events):
            who = members[begins.index(last)][0]
            for rank, index in members:
                found[rank, index] = (last, who)
    return found
