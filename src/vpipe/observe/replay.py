"""What if: the executed program once more, with other durations and free links.

``bubbles`` asks twice: how long would the ranks idle if every action took what its kind takes on average, and how long
if every action took what it really took? The first is the schedule's own bubble, the difference is imbalance. The
clock of ``schedule.graph`` prices actions by stage and kind; here every single action has its own duration.
"""

from __future__ import annotations

from collections.abc import Callable

from vpipe.observe.measured import Measured, computes
from vpipe.observe.meetings import InRow, Meetings
from vpipe.schedule.action import Action

Duration = Callable[[int, int], int]
"""(rank, index in its row) → nanoseconds of work."""


def idle_times(step: Measured, met: Meetings, duration: Duration) -> list[int]:
    """Per rank, the idle time until the last rank ends, if links were free and nothing else took time."""
    clock, busy = [0] * len(step.ranks), [0] * len(step.ranks)
    ends: dict[Action, int] = {}
    came: dict[InRow, int] = {}
    awaited = {place for meeting in met.values() for place in meeting.members}
    position = [0] * len(step.ranks)
    forced = False
    while any(position[rank] < len(row) for rank, row in enumerate(step.ranks)):
        moved = False
        for rank, row in enumerate(step.ranks):
            while position[rank] < len(row):
                index = position[rank]
                event = row[index]
                if (rank, index) in awaited:
                    came[rank, index] = clock[rank]
                if computes(event):
                    needs = step.producers.get(event.action, [])
                    if not forced and any(each not in ends for each in needs):
                        break
                    ready = max([clock[rank], *(ends.get(each, 0) for each in needs)])
                    if (rank, index) in met:
                        members = met[rank, index].members
                        if not forced and any(each not in came for each in members):
                            break
                        ready = max([ready, *(came.get(each, 0) for each in members)])
                    taken = duration(rank, index)
                    clock[rank] = ready + taken
                    busy[rank] += taken
                    ends[event.action] = clock[rank]
                position[rank] = index + 1
                moved, forced = True, False
        forced = not moved  # a trace that is no valid program: let the next action run as it is
    return [max(clock, default=0) - each for each in busy]
