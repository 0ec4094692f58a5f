"""Where the idle time of a step went.

The window of a step runs from the end of the step before it (on all ranks; from its own first action where that is not
known) to its own last end. A rank is busy while one of its compute actions works, and idle for the rest of the window.
Every idle moment gets one cause:

    data            no rank had begun yet, or a first stage's forward waited for its inputs
    communication   the action that makes the awaited message had ended, and the message was not there;
                    or the rank was posting, sending or swapping
    overhead        between two actions, neither working nor waiting: the runtime itself
    a core          the rank could have run and the machine ran something else: more ranks, or threads, than cores
    a peer          the rank waits for an action of another rank that has not ended (or, after its own last action,
                    for the rank that ends last): then the cause is what that rank is doing at this moment

A peer that waits too hands the question on, so a slow link is blamed on every rank that feels it. Where the chain ends
at a rank that works, ``replay`` runs the step again with free links and tells the rest apart:

    warm-up/drain   up to what this rank would idle if every action took the mean of its kind: the schedule's own bubble
    imbalance       up to what it would idle beyond that with the durations measured: stages, or units, that differ
    the remainder   delays that were handed on and put the ranks out of step: it goes to communication, data, overhead
                    and cores in proportion to what they cost the whole step

The six parts are whole nanoseconds and sum to the idle time exactly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from statistics import median

import numpy as np
import numpy.typing as npt

from vpipe.observe.measured import Measured, computes
from vpipe.observe.meetings import Meetings, meetings
from vpipe.observe.replay import idle_times
from vpipe.rundir.reader import Event
from vpipe.schedule.action import Action, Kind

CAUSES = ("warmup_drain", "imbalance", "communication", "data", "overhead", "cores")
"""In the order in which tables show them."""
NAMES = {
    "warmup_drain": "warm-up and drain",
    "imbalance": "imbalance",
    "communication": "communication",
    "data": "waiting for data",
    "overhead": "runtime overhead",
    "cores": "waiting for a core",
}


class _Doing(IntEnum):
    WORK = 0
    COMMUNICATION = 1
    DATA = 2
    OVERHEAD = 3
    CORES = 4
    PEER = 5


@dataclass(frozen=True)
class Bubbles:
    """Per rank, nanoseconds of the window by what became of them."""

    window: int
    busy: tuple[int, ...]
    parts: tuple[dict[str, int], ...]
    """Per rank, cause → nanoseconds."""

    @property
    def idle(self) -> tuple[int, ...]:
        return tuple(self.window - busy for busy in self.busy)

    @property
    def fraction(self) -> float:
        """The part of all ranks' time that is idle."""
        whole = self.window * len(self.busy)
        return sum(self.idle) / whole if whole else 0.0

    def total(self, cause: str) -> int:
        return sum(part[cause] for part in self.parts)


def medians(bubbles: Sequence[Bubbles]) -> list[list[float]]:
    """What stands for several steps: per rank, and last for all of them, the share of the window that it was busy, then
    of each cause; the medians."""
    shares = []
    for each in bubbles:
        rows = [[busy, *part.values()] for busy, part in zip(each.busy, each.parts, strict=True)]
        rows.append([sum(column) / len(rows) for column in zip(*rows, strict=True)])
        shares.append([[part / each.window if each.window else 0.0 for part in row] for row in rows])
    return [[median(parts) for parts in zip(*steps, strict=True)] for steps in zip(*shares, strict=True)]


Tile = tuple[int, int, _Doing, int]
"""From, until, doing what, waiting for which rank."""


@lru_cache(maxsize=64)
def attribute(step: Measured) -> Bubbles:
    """The idle time of every rank by cause."""
    met = meetings(step)
    ends = _ends(step)
    tiles = [_tiles(step, rank, met, ends) for rank in range(len(step.ranks))]
    starts, doing = _resolved(tiles)
    length = np.append(starts[1:], step.span) - starts
    spent = [{what: int(length[row == what].sum()) for what in _Doing} for row in doing]
    busy = [sum(until - start for start, until, what, _ in row if what is _Doing.WORK) for row in tiles]
    even, real = _without_delays(step, met)
    causes = (_Doing.COMMUNICATION, _Doing.DATA, _Doing.OVERHEAD, _Doing.CORES)
    delays = [sum(each[what] for each in spent) for what in causes]
    parts = []
    for rank, each in enumerate(spent):
        behind_work = each[_Doing.WORK] - busy[rank]
        structural = min(behind_work, even[rank])
        uneven = min(behind_work - structural, max(0, real[rank] - even[rank]))
        communication, data, overhead, cores = _shared(behind_work - structural - uneven, delays)
        parts.append(
            {
                "warmup_drain": structural,
                "imbalance": uneven,
                "communication": each[_Doing.COMMUNICATION] + each[_Doing.PEER] + communication,
                "data": each[_Doing.DATA] + data,
                "overhead": each[_Doing.OVERHEAD] + overhead,
                "cores": each[_Doing.CORES] + cores,
            }
        )
    return Bubbles(step.span + step.lead, tuple(busy), tuple(parts))


def _without_delays(step: Measured, met: Meetings) -> tuple[list[int], list[int]]:
    """Per rank, its idle time with even actions, and with the measured ones; links free."""
    work: dict[tuple[int, int], int] = {}
    by_kind: dict[Kind, list[int]] = defaultdict(list)
    for rank, row in enumerate(step.ranks):
        for index, event in enumerate(row):
            if computes(event):
                work[rank, index] = event.work
                by_kind[event.action.kind].append(work[rank, index])
    mean = {kind: round(sum(times) / len(times)) for kind, times in by_kind.items()}
    even = idle_times(step, met, lambda rank, index: mean[step.ranks[rank][index].action.kind])
    return even, idle_times(step, met, lambda rank, index: work[rank, index])


def _shared(amount: int, weights: Sequence[int]) -> list[int]:
    """``amount`` in whole parts proportional to ``weights``; the largest weight takes what rounding leaves."""
    whole = sum(weights)
    shares = [amount * weight // whole if whole else 0 for weight in weights]
    shares[max(range(len(weights)), key=weights.__getitem__)] += amount - sum(shares)
    return shares


def _tiles(step: Measured, rank: int, met: Meetings, ends: dict[Action, tuple[int, int]]) -> list[Tile]:
    """The window of one rank without gaps: what it does, and for whom it waits."""
    last = max(range(len(step.ranks)), key=lambda each: step.ranks[each][-1].end if step.ranks[each] else 0)
    tiles: list[Tile] = [(-step.lead, 0, _Doing.DATA, rank)]
    at = 0
    for index, event in enumerate(step.ranks[rank]):
        tiles.append((at, event.begin, _Doing.OVERHEAD, rank))
        if not computes(event):
            tiles.append((event.begin, event.end - event.stalled, _Doing.COMMUNICATION, rank))
        else:
            meeting = met.get((rank, index))
            made = [ends[each] for each in step.producers.get(event.action, ())]
            tiles += _waiting(rank, event, [(meeting.came, meeting.last)] if meeting is not None else made)
            tiles.append((event.ready, event.end - event.stalled, _Doing.WORK, rank))
        tiles.append((event.end - event.stalled, event.end, _Doing.CORES, rank))
        at = event.end
    tiles.append((at, step.span, _Doing.PEER if last != rank else _Doing.OVERHEAD, last))
    return [tile for tile in tiles if tile[1] > tile[0]]


def _waiting(rank: int, event: Event, made: Sequence[tuple[int, int]]) -> list[Tile]:
    """The wait of an action: for that rank until the last of what it needs is ``made`` (when, by whom), then for the
    message."""
    action, begin, ready, *_ = event
    first = action.stage == 0 and action.kind is Kind.F
    end, who = max(made, default=(begin, rank))
    turn = min(max(end, begin), ready)
    awake = max(turn, ready - event.late)
    missed = _Doing.DATA if first and not made else _Doing.COMMUNICATION
    return [(begin, turn, _Doing.PEER, who), (turn, awake, missed, rank), (awake, ready, _Doing.CORES, rank)]


def _ends(step: Measured) -> dict[Action, tuple[int, int]]:
    """Action → when it ended, on which rank."""
    return {event.action: (event.end, rank) for rank, row in enumerate(step.ranks) for event in row}


def _resolved(tiles: Sequence[Sequence[Tile]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Moments cut so fine that every rank does one thing in each; waits for peers replaced by what the peers do."""
    starts = np.unique([start for row in tiles for start, *_ in row] or [0]).astype(np.int64)
    doing = np.full((len(tiles), len(starts)), int(_Doing.OVERHEAD), np.int64)
    whom = np.zeros_like(doing)
    for rank, row in enumerate(tiles):
        for start, until, what, peer in row:
            cut = slice(int(np.searchsorted(starts, start)), int(np.searchsorted(starts, until)))
            doing[rank, cut], whom[rank, cut] = int(what), peer
    column = np.arange(len(starts))
    for _ in tiles:
        asking = doing == _Doing.PEER
        if not asking.any():
            break
        handed_on = asking & (doing[whom, column] == _Doing.PEER)
        answer, next_whom = doing[whom, column], whom[whom, column]
        doing = np.where(asking, answer, doing)
        whom = np.where(handed_on, next_whom, whom)
    return starts, doing
