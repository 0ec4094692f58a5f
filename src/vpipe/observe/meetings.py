"""Where ranks met.

Most waits are for messages (``Measured.producers``). Two kinds of action need none and wait all the same: the replicas
of a stage meet at ``REDUCE``, and all ranks at ``AGREE`` (``semantics.rounds`` says who meets where). The runtime does
not record when a meeting is complete, but the record tells: if nobody left before the last one came, they met.
"""

from __future__ import annotations

from functools import lru_cache

from vpipe.observe.measured import Measured
from vpipe.schedule.semantics import rounds

Meetings = dict[tuple[int, int], tuple[int, int]]
"""(rank, index in its row) → when everyone had come, and who came last."""


@lru_cache(maxsize=64)
def meetings(step: Measured) -> Meetings:
    """Where ranks met, and when the last of them came."""
    found: Meetings = {}
    executed = step.program.with_rows([event.action for event in row] for row in step.ranks)
    for places in rounds(executed).values():
        if len(places) < 2:
            continue
        events = {rank: step.ranks[rank][index] for rank, index in places.items()}
        last = max(event.begin for event in events.values())
        if all(event.end >= last for event in events.values()):
            who = min(rank for rank, event in events.items() if event.begin == last)
            for rank, index in places.items():
                found[rank, index] = (last, who)
    return found
