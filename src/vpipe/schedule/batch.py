"""One program, many costs: the makespan of each without simulating one after the other.

The order of a lowered program is fixed, on its lanes and on its links. So the end of an action is the longest path to
it through a graph that depends on the program alone, and costs are only the weights of its nodes. The graph is laid
out once, level by level; then all costs pass through it together, one column each:

    level 0     level 1      level 2                    value(node) = max(values before it) + weight(node)
    F0 of 0 ──▶ message ──▶ F0 of 1 ──▶ …               the same additions as in ``timeline.loop``, so the same bits

The path that is longest for one of the costs is a path for all of them: its weight is a lower bound of their makespans,
and a sum with one count per (action, stage).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, zip_longest

import numpy as np

from vpipe.errors import UserError
from vpipe.schedule.flat import CODE, KINDS, NONE, Flat, Ints, Lanes, collector_paused, find_transfers
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import SEND_OF
from vpipe.schedule.timeline import directions, loop, priced_as
from vpipe.schedule.wavefront import Array

_CELLS = 6_000_000
"""Numbers that are held at once: more columns than fit take turns."""


@dataclass(frozen=True)
class PricedPath:
    """How often a path passes each row of the price table, and what it waits for messages beside."""

    counts: Array
    waits: float

    def weights(self, table: Array) -> Array:
        """Its weight under each column of costs."""
        found: Array = self.counts @ table + self.waits
        return found


class ProgramGraph:
    """The graph of a lowered program."""

    def __init__(self, program: Program, *, blocking: bool = False) -> None:
        with collector_paused():
            flat = program.flat
            transfers = find_transfers(flat)
            lanes = Lanes(flat, transfers, rendezvous=True, blocking_sends=blocking)
            one, nothing = np.ones(len(transfers)), np.zeros(len(transfers))
            _, ends, departed, _ = loop(lanes, np.ones(len(flat)), one, nothing)
        if any(ends[lane[-1]] < 0 for lane in lanes.lanes if lane):
            raise UserError("the program deadlocks; 'vpipe verify' says why")
        self.num_stages = program.num_stages
        self.blocking = blocking
        events = np.array([event for lane in lanes.lanes for event in lane], np.int64)
        level = np.concatenate([ends[events], departed + 1.0]).astype(np.int64)
        order = np.argsort(level, kind="stable")  # within a level actions stand before messages
        self.size = len(order)
        place = np.empty(self.size, np.int64)
        place[order] = np.arange(1, self.size + 1)  # row 0 is the start of time
        # ``at[event]`` is its row; beyond the rows of nodes every message has a second one, when it arrives.
        at = np.zeros(len(flat) + 1, np.int64)
        at[events] = place[: len(events)]
        sent = place[len(events) :]
        self._order, self._sent, self._at = order, sent, at
        before = self._predecessors(lanes, at, sent)
        self._before = [before[number] for number in order.tolist()]
        self._rows = self._price_rows(flat, events, directions(flat, transfers), flat.stage[transfers.send])[order]
        self._way = directions(flat, transfers), flat.stage[transfers.send]
        self._levels = [0, *(np.flatnonzero(np.diff(level[order])) + 1).tolist(), self.size]
        numbers = order - len(events)  # of messages; negative for actions
        self._message = numbers
        self._last = np.array([at[lane[-1]] for lane in lanes.lanes[: program.num_ranks] if lane], np.int64)
        self._steps = [self._step(low, high) for low, high in pairwise(self._levels)]

    def _step(self, low: int, high: int) -> tuple[int, int, list[Ints], Ints, Ints]:
        """A level: its nodes, what they wait for column by column, their price rows, and which messages they are."""
        columns = [np.array(column, np.int64) for column in zip_longest(*self._before[low:high], fillvalue=0)]
        columns = [column for column in columns if column.any()] or columns[:1]
        numbers = self._message[low:high]
        return low, high, columns, self._rows[low:high], numbers[numbers >= 0]

    def _predecessors(self, lanes: Lanes, at: Ints, sent: Ints) -> list[list[int]]:
        """Per node the rows that it waits for: of few nodes many, where ranks meet."""
        arrival = 1 + self.size + np.arange(len(sent))
        lists: list[list[int]] = []
        message = lanes.message.tolist()
        for lane in lanes.lanes:
            previous = 0
            for event in lane:
                needs = [previous]
                if message[event] != NONE:
                    needs.append(int(arrival[message[event]]))
                if event in lanes.extra:
                    needs += [int(at[other]) for other in lanes.extra[event].events]
                    needs += [int(arrival[number]) for number in lanes.extra[event].messages]
                lists.append(needs)
                previous = int(at[event])
        last: dict[int, int] = {}
        for number, link in enumerate(lanes.link.tolist()):
            lists.append([int(at[lanes.sent[number]]), int(at[lanes.posted[number]]), last.get(link, 0)])
            last[link] = int(sent[number])
        return lists

    def _price_rows(self, flat: Flat, events: Ints, way: Ints, stage: Ints) -> Ints:
        """Per node its row in the price table: kinds by stages, then the two directions of messages by stages."""
        actions = priced_as(flat)[events] * self.num_stages + flat.stage[events]
        messages = (len(KINDS) + way) * self.num_stages + stage
        if self.blocking:
            messages = np.full(len(way), (len(KINDS) + 2) * self.num_stages)  # a row of zeros: the SEND takes the time
        return np.concatenate([actions, messages])

    def table(self, price: Array, hop: Array, lag: Array) -> Array:
        """The price table of ``price[kind, stage, column]``, ``hop[direction, stage, column]`` and latencies."""
        if self.blocking:
            price = price.copy()
            price[[CODE[kind] for kind in SEND_OF.values()]] = hop + lag[:, :, None]
        columns = price.shape[2]
        return np.concatenate([price.reshape(-1, columns), hop.reshape(-1, columns), np.zeros((1, columns))])

    def makespans(self, table: Array, lag: Array) -> Array:
        """Of every column; ``lag[direction, stage]`` is what a message waits after it has left its link."""
        columns = table.shape[1]
        width = max(1, _CELLS // (self.size + len(self._sent) + 1))
        parts = [self._values(table[:, low : low + width], lag) for low in range(0, columns, width)]
        return np.concatenate([values[self._last].max(axis=0) for values in parts]) if parts else np.zeros(0)

    def path(self, table: Array, lag: Array) -> PricedPath:
        """The longest path under costs of one column."""
        values = self._values(table, lag)[:, 0]
        counts = np.zeros(len(table))
        waits, row = 0.0, int(self._last[values[self._last].argmax()])
        lags = self._lags(lag)
        while row:
            if row > self.size:
                waits += float(lags[row - self.size - 1])
                row = int(self._sent[row - self.size - 1])
            counts[self._rows[row - 1]] += 1
            needs = self._before[row - 1]
            row = needs[int(values[needs].argmax())]
        return PricedPath(counts, waits)

    def _lags(self, lag: Array) -> Array:
        return np.zeros(len(self._sent)) if self.blocking else lag[self._way]

    def _values(self, table: Array, lag: Array) -> Array:
        """When every node ends, row by row; the rows after ``size`` are arrivals."""
        values = np.zeros((1 + self.size + len(self._sent), table.shape[1]))
        lags = self._lags(lag)[:, None]
        for low, high, columns, rows, numbers in self._steps:
            now = values[columns[0]]
            for column in columns[1:]:
                np.maximum(now, values[column], out=now)
            now += table[rows]
            values[1 + low : 1 + high] = now
            if len(numbers):
                values[1 + self.size + numbers] = now[high - low - len(numbers) :] + lags[numbers]
        return values
