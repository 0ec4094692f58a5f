"""When everything of a program happens: the only clock, which simulator, planner, page and verifier read.

The order of a lowered program is fixed, on its lanes and on its links. So the end of an action is the longest path to
it through a graph that depends on the program alone, and costs are only the weights of its nodes. The graph is laid
out once, level by level; then any number of costs pass through it together, one column each:

    level 0     level 1      level 2                    value(node) = max(values before it) + weight(node)
    F0 of 0 ──▶ message ──▶ F0 of 1 ──▶ …

Nodes are the actions that occupy a lane, the messages, and the meetings:

    an action    waits for the one before it on its lane, and for the messages, swaps and meetings that it needs
    a message    waits for its SEND, for its RECV, and for the message before it on its link;
                 it arrives a latency after it has left the link
    a meeting    waits for what its members do before it

A node that waits for itself, over others, has no level: the program deadlocks there.

The path that is longest for one of the costs is a path for all of them: its weight is a lower bound of their makespans,
and a sum with one count per (action, stage).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from vpipe.errors import UserError
from vpipe.schedule.action import Kind
from vpipe.schedule.flat import (
    CODE,
    KINDS,
    NONE,
    EventNumber,
    Flat,
    Ints,
    Transfers,
    collector_paused,
    find_transfers,
    previous,
)
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import MEETINGS, NEEDS, SEND_OF, Lane, rounds

Array = npt.NDArray[np.float64]

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
    """The graph of a lowered program.

    Nodes are numbered: actions as in ``Flat``, the start of time, messages, meetings. Rows of values are: the start,
    the nodes level by level, the arrivals of messages.
    """

    @collector_paused()
    def __init__(self, program: Program, *, blocking: bool = False, blocking_receives: bool = False) -> None:
        self.flat: Flat = program.flat
        self.transfers: Transfers = find_transfers(self.flat)
        self.num_stages = program.num_stages
        self.blocking = blocking
        self._on_compute = self.flat.on(Lane.COMPUTE) | (self.flat.of(SEND_OF.values()) & blocking)
        self._on_compute |= self.flat.of(SEND_OF) & blocking_receives
        self._on_swap = self.flat.on(Lane.SWAP)
        meetings = rounds(program) if self.flat.kinds & MEETINGS else {}
        self._first_message = len(self.flat) + 1
        self._num_nodes = self._first_message + len(self.transfers) + len(meetings)
        self._needs = np.full((3, self._num_nodes), len(self.flat))
        """What each node waits for: nodes, or arrivals of messages, which are numbered behind all nodes."""
        self._further: list[tuple[Ints, Ints]] = []
        """What beside that, of the nodes that wait for more."""
        self._work(blocking_receives)
        if self._on_swap.any():
            self._swaps()
        self._meet([*meetings.values()])
        self._lay_out()

    @property
    def lanes(self) -> list[list[EventNumber]]:
        """The actions of every lane: the ranks' compute lanes, then, where the program swaps, their swap lanes."""
        chosen = [self._on_compute, *([self._on_swap] if self._on_swap.any() else [])]
        rows = [*pairwise(self.flat.row_start.tolist())]
        return [(np.flatnonzero(lane[low:high]) + low).tolist() for lane in chosen for low, high in rows]

    @cached_property
    def _previous(self) -> Ints:
        """The action before each on the compute lane of its rank."""
        return previous(self.flat, self._on_compute)

    def _need(self, column: int, nodes: Ints, needs: Ints) -> None:
        """Let each node wait for one more; where a node comes several times, the column keeps one of its needs."""
        self._needs[column, nodes] = needs
        lost = self._needs[column, nodes] != needs
        if lost.any():
            self._further.append((nodes[lost], needs[lost]))

    def _work(self, blocking_receives: bool) -> None:
        """What the compute lanes and the links wait for."""
        flat, transfers, before = self.flat, self.transfers, self._previous
        events = np.flatnonzero(self._on_compute)
        messages = self._first_message + np.arange(len(transfers))
        sent = transfers.send if self.blocking else before[transfers.send]
        posted = before[transfers.receive]
        same_link = np.flatnonzero(transfers.link[1:] == transfers.link[:-1])
        users = transfers.receive if blocking_receives else self._users()
        used = np.flatnonzero(users != NONE)
        self._need(0, events, before[events])
        self._need(1, users[used], self._num_nodes + used)
        self._need(0, messages, sent)
        self._need(1, messages[same_link + 1], messages[same_link])
        self._need(2, messages, posted)
        if self.blocking:
            apart = np.abs(flat.stage[transfers.send] - flat.stage[transfers.receive])
            awaited = (apart == 1) | (not blocking_receives)  # what skips is sent long before it is received
            self._need(1, sent[awaited], posted[awaited])

    def _users(self) -> Ints:
        """Of every message, the action that reads it."""
        flat, receives = self.flat, self.transfers.receive
        stage, microbatch = flat.stage[receives], flat.microbatch[receives]
        users = np.full(len(receives), NONE, np.int64)
        for receive_kind in SEND_OF:
            kinds = [kind for kind in KINDS if any(need.received_by is receive_kind for need in NEEDS[kind])]
            mine = flat.of([receive_kind])[receives]
            users[mine] = flat.find_any(kinds, stage[mine], microbatch[mine])
        return users

    def _swaps(self) -> None:
        """A swap starts after the compute action it stands behind; who needs the unit back waits for its IN."""
        flat = self.flat
        swaps, fetches = np.flatnonzero(self._on_swap), np.flatnonzero(flat.of([Kind.IN]))
        self._need(0, swaps, previous(flat, self._on_swap)[swaps])
        self._need(1, swaps, self._previous[swaps])
        for kind in KINDS:
            if any(Kind.IN in need.kinds for need in NEEDS[kind]):
                users = flat.find(kind, flat.stage[fetches], flat.microbatch[fetches])
                self._need(2, users[users != NONE], fetches[users != NONE])

    def _meet(self, meetings: list[dict[int, int]]) -> None:
        """Members of a meeting go on together, when the last has come."""
        for meeting, places in enumerate(meetings, self._first_message + len(self.transfers)):
            events = self.flat.row_start[[*places]] + np.array([*places.values()], np.int64)
            self._need(0, np.full(len(events), meeting), self._previous[events])
            self._need(1, events, np.full(len(events), meeting))

    def _lay_out(self) -> None:
        """Sort the nodes by level, and say what each waits for in rows."""
        start, num_messages = len(self.flat), len(self.transfers)
        levels = self._sorted()
        order = np.concatenate([np.empty(0, np.int64), *levels])
        self.size = len(order)
        is_message = (order >= self._first_message) & (order < self._first_message + num_messages)
        self._departing = np.flatnonzero(is_message)
        self._messages = order[is_message] - self._first_message
        self._row: Ints = np.full(self._num_nodes + num_messages, NONE)
        """Of every node, then of the arrival of every message; ``NONE`` is never."""
        self._row[start] = 0
        self._row[order] = np.arange(1, self.size + 1)
        self._row[self._num_nodes + self._messages] = 1 + self.size + np.arange(len(self._messages))
        bounds = np.cumsum([0, *map(len, levels)])
        departures = np.searchsorted(self._departing, bounds)
        self._levels = list(zip(pairwise(bounds.tolist()), pairwise(departures.tolist()), strict=True))
        self._columns = [self._row[column[order]] for column in self._needs]
        self._prices = self._price_rows()[order]
        self._wide: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """Number of a level → its nodes that wait for more, by their places in it, and the rows of that."""
        for nodes, needs in self._further:
            places = self._row[nodes] - 1
            numbers = np.searchsorted(bounds, places, side="right") - 1
            listed = zip(numbers.tolist(), (places - bounds[numbers]).tolist(), self._row[needs].tolist(), strict=True)
            for number, place, row in listed:
                if place >= 0:
                    self._wide[number].append((place, row))

    def _sorted(self) -> list[Ints]:
        """The nodes whose needs are all met in the levels before, level by level."""
        start = len(self.flat)
        first = np.flatnonzero(self._on_compute | self._on_swap)
        parts = [(np.concatenate([first, np.arange(start + 1, self._num_nodes)]), self._needs[0])]
        parts += [(np.flatnonzero(column != start), column) for column in self._needs[1:]]
        pairs = [(nodes, column[nodes]) for nodes, column in parts] + self._further
        nodes, needs = (np.concatenate(side) for side in zip(*pairs, strict=True))
        arrivals = needs >= self._num_nodes
        needs[arrivals] -= self._num_nodes - self._first_message
        missing = np.bincount(nodes, minlength=self._num_nodes)
        counts = np.bincount(needs, minlength=self._num_nodes)
        waiting = nodes[np.argsort(needs, kind="stable")]
        del nodes, needs, arrivals, parts, pairs
        ends = np.cumsum(counts)
        numbers = np.arange(len(waiting))
        entry = np.zeros(self._num_nodes, np.int64)
        levels = [np.array([start])]
        while len(level := levels[-1]):
            count = counts[level]
            upto = count.cumsum()
            reached = waiting[np.repeat(ends[level] - upto, count) + numbers[: upto[-1]]]
            np.subtract.at(missing, reached, 1)
            reached = reached[missing[reached] == 0]
            entry[reached] = numbers[: len(reached)]  # the last of a node that is there twice
            levels.append(reached[entry[reached] == numbers[: len(reached)]])
        return levels[1:-1]

    @property
    def deadlocks(self) -> bool:
        """True where an action, a message or a meeting is never reached."""
        nodes = int(self._on_compute.sum() + self._on_swap.sum()) + self._num_nodes - self._first_message
        return self.size < nodes

    def _price_rows(self) -> Ints:
        """Per node its row in the price table: kinds by stages, the two directions of messages by stages, nothing."""
        flat, stage = self.flat, self.flat.stage[self.transfers.send]
        nothing = (len(KINDS) + 2) * self.num_stages
        rows = np.full(self._num_nodes, nothing)
        rows[: len(flat)] = flat.kind * self.num_stages + flat.stage
        if not self.blocking:  # else the SEND takes the time
            messages = slice(self._first_message, self._first_message + len(stage))
            rows[messages] = (len(KINDS) + self._way) * self.num_stages + stage
        return rows

    @cached_property
    def _way(self) -> Ints:
        """0 for a message that goes forward, 1 for a gradient."""
        way: Ints = (self.flat.kind[self.transfers.send] == CODE[Kind.SEND_B]).astype(np.int64)
        return way

    def table(self, price: Array, hop: Array, lag: Array) -> Array:
        """The price table of ``price[kind, stage]``, ``hop[direction, stage]`` and latencies, of which the first two
        may have columns."""
        if self.blocking:
            price = price.copy()
            price[[CODE[kind] for kind in SEND_OF.values()]] = hop + lag.reshape(*lag.shape, *[1] * (hop.ndim - 2))
        columns = price.shape[2:]
        return np.concatenate([price.reshape(-1, *columns), hop.reshape(-1, *columns), np.zeros((1, *columns))])

    def makespans(self, table: Array, lag: Array) -> Array:
        """Of every column; ``lag[direction, stage]`` is what a message waits after it has left its link."""
        columns = table.shape[1]
        width = max(1, _CELLS // (self.size + len(self.transfers) + 1))
        parts = [self._values(table[:, low : low + width], lag) for low in range(0, columns, width)]
        return np.concatenate([values[self._last].max(axis=0) for values in parts]) if parts else np.zeros(0)

    @cached_property
    def _last(self) -> Ints:
        """The rows of the ranks' last actions."""
        if self.deadlocks:
            raise UserError("the program deadlocks; 'vpipe verify' says why")
        lanes = self.lanes[: self.flat.program.num_ranks]
        return self._row[[lane[-1] for lane in lanes if lane]]

    def times(self, table: Array, lag: Array) -> tuple[Array, Array]:
        """Under costs of one column: when each action begins and ends, the start of time at last; -1 is never."""
        ends = self._values(table, lag)
        begins = np.concatenate([[0.0], self._begin(ends)])
        row = self._row[: self._first_message]
        return np.where(row == NONE, -1.0, begins[row]), np.where(row == NONE, -1.0, ends[row])

    def _begin(self, values: Array) -> Array:
        """When every node begins: when all that it waits for is there."""
        begin: Array = np.maximum.reduce([values[column] for column in self._columns])
        for number, needs in self._wide.items():
            for place, row in needs:
                node = self._levels[number][0][0] + place
                begin[node] = max(begin[node], values[row])
        return begin

    def path(self, table: Array, lag: Array) -> PricedPath:
        """The longest path under costs of one column."""
        values = self._values(table[:, 0], lag)
        further: dict[int, list[int]] = defaultdict(list)
        for number, needs in self._wide.items():
            for place, needed in needs:
                further[1 + self._levels[number][0][0] + place].append(needed)
        counts = np.zeros(len(table))
        waits, row = 0.0, int(self._last[values[self._last].argmax()])
        lags = self._lags(lag)
        while row:
            if row > self.size:
                waits += float(lags[row - self.size - 1])
                row = 1 + int(self._departing[row - self.size - 1])
            counts[self._prices[row - 1]] += 1
            row = max([int(column[row - 1]) for column in self._columns] + further[row], key=values.__getitem__)
        return PricedPath(counts, waits)

    def _lags(self, lag: Array) -> Array:
        """Of the messages, in the order of their rows."""
        sender = self.transfers.send[self._messages]
        return np.zeros(len(sender)) if self.blocking else lag[self._way[self._messages], self.flat.stage[sender]]

    def _values(self, table: Array, lag: Array) -> Array:
        """When every node ends, row by row, and when every message arrives."""
        values = np.zeros((1 + self.size + len(self._messages), *table.shape[1:]))
        lags = self._lags(lag).reshape(-1, *[1] * (table.ndim - 1))
        first, *others = self._columns
        for number, ((low, high), (left, gone)) in enumerate(self._levels):
            now = values[first[low:high]]
            for column in others:
                np.maximum(now, values[column[low:high]], out=now)
            for place, row in self._wide.get(number, ()):
                now[place] = np.maximum(now[place], values[row])
            now += table[self._prices[low:high]]
            values[1 + low : 1 + high] = now
            if gone > left:
                arrivals = slice(1 + self.size + left, 1 + self.size + gone)
                values[arrivals] = now[self._departing[left:gone] - low] + lags[left:gone]
        return values
