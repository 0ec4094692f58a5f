"""For whom ranks wait where they meet.

Most waits are for messages (``Measured.producers``). Two kinds of action need none and wait all the same: the replicas
of a stage meet at ``REDUCE``, and all ranks at ``AGREE`` (``semantics.rounds`` says who meets where). How long a rank
waits there its record tells, as of every action (``Event.ready``); here is said for whom.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from vpipe.observe.measured import Measured
from vpipe.schedule.semantics import rounds

InRow = tuple[int, int]
"""(rank, index in its row)"""


class Awaited(NamedTuple):
    """What an action waits for that no message brings."""

    members: tuple[InRow, ...]
    """It waits until ranks have come to these actions."""
    last: int
    """The rank that came last."""
    came: int
    """When it did."""


Meetings = dict[InRow, Awaited]


@lru_cache(maxsize=64)
def meetings(step: Measured) -> Meetings:
    """What every REDUCE and AGREE waits for. One that a rank has left before the last one came was none: nothing is
    exchanged where nothing is clipped and no update skipped."""
    found: Meetings = {}
    for places in rounds(step.program).values():
        if len(places) < 2:
            continue
        awaited = tuple(places.items())
        came, last = max((step.ranks[rank][index].begin, -rank) for rank, index in awaited)
        if all(step.ranks[rank][index].end >= came for rank, index in places.items()):
            for place in places.items():
                found[place] = Awaited(awaited, -last, came)
    return found
