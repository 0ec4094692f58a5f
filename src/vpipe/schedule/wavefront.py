"""The event loop of ``timeline`` for wide programs: one action of every lane that can move, then the next of each.

A program of 256 ranks has 200 lanes that can move at almost any time. Running one of them after the other is half a
million turns of an interpreted loop; running one action of all of them is two thousand turns of a dozen array
operations. When an action begins does not depend on the order in which lanes are asked, and the sums are the same
ones: so are the bits (``tests/schedule/test_wavefront.py``).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vpipe.schedule.flat import NONE, Ints, Lanes

Array = npt.NDArray[np.float64]
EventTimes = tuple[Array, Array, Array, Array]
"""Of actions begin and end, of messages departure and arrival; -1 is never."""

NARROW = 48
"""Lanes that move at once, on average over ``ROUNDS``, below which one after the other is faster."""
ROUNDS = 256


def loop(graph: Lanes, duration: Array, transfer: Array, latency: Array) -> EventTimes | None:
    """All times, of a program none of whose actions waits for several things; None where too few lanes move at once."""
    front = _Front(graph, duration, transfer, latency)
    lanes = np.flatnonzero(front.head < front.last)
    rounds = 0
    while len(lanes):
        lanes = front.advance(lanes)
        rounds += 1
        if rounds % ROUNDS == 0 and front.narrow():
            return None
    return front.begin, front.end, front.departed, front.arrived


class _Front:
    """How far every lane and every link has come."""

    def __init__(self, graph: Lanes, duration: Array, transfer: Array, latency: Array) -> None:
        self._graph, self._duration, self._transfer, self._latency = graph, duration, transfer, latency
        self._events = np.concatenate([np.array(lane, np.int64) for lane in graph.lanes])
        bounds = np.cumsum([0, *map(len, graph.lanes)])
        self.head, self.last = bounds[:-1].copy(), bounds[1:]
        self.begin, self.end = (np.full(graph.start + 1, -1.0) for _ in range(2))
        self.begin[graph.start] = self.end[graph.start] = 0.0
        self.departed, self.arrived = (np.full(len(graph.sent), -1.0) for _ in range(2))
        self._clock = np.zeros(len(graph.lanes))
        self._upcoming, self._free = graph.first_of_link.copy(), np.zeros(len(graph.first_of_link))
        self._waiter = np.full(graph.start + 1, NONE)
        """The last lane that waits for an event; ``_after`` has for each lane the one that waited before it."""
        self._after = np.full(len(graph.lanes), NONE)
        self._moved = 0

    def narrow(self) -> bool:
        """Whether few lanes have moved in the last rounds."""
        moved, self._moved = self._moved, 0
        return moved < ROUNDS * NARROW

    def advance(self, lanes: Ints) -> Ints:
        """Run the next action of each of these lanes, if it can be run; the lanes that may move after that."""
        events = self._events[self.head[lanes]]
        missing, now = self._ask(events, self._clock[lanes])
        ready = missing < 0
        stopped, missing = lanes[~ready], missing[~ready]
        if len(stopped):
            lanes, events, now = lanes[ready], events[ready], now[ready]
        self.begin[events] = now
        now = now + self._duration[events]
        self.end[events] = now
        self._clock[lanes] = now
        self.head[lanes] += 1
        self._moved += len(lanes)
        following = [lanes[self.head[lanes] < self.last[lanes]]]
        asleep = self._waiter[events]
        while len(asleep := asleep[asleep >= 0]):
            following.append(asleep)
            asleep = self._after[asleep]
        if len(stopped):
            following.append(self._sleep(stopped, missing))
        return np.concatenate(following)

    def _ask(self, events: Ints, now: Array) -> tuple[Ints, Array]:
        """For each event what it still waits for, else ``NONE``, and when it can begin."""
        graph = self._graph
        missing = np.full(len(events), NONE)
        asking = np.flatnonzero(graph.message[events] >= 0)
        number = graph.message[events[asking]]
        late = np.flatnonzero(self.arrived[number] < 0)
        while len(late):  # run each link up to the message: it carries those of one lane alone
            line = graph.link[number[late]]
            current = self._upcoming[line]
            sender, receiver = graph.sent[current], graph.posted[current]
            sent, posted = self.end[sender], self.end[receiver]
            possible = (sent >= 0) & (posted >= 0)
            if not possible.all():
                missing[asking[late[~possible]]] = np.where(sent < 0, sender, receiver)[~possible]
                late, line, current = late[possible], line[possible], current[possible]
                sent, posted = sent[possible], posted[possible]
            at = np.maximum(np.maximum(sent, posted), self._free[line])
            self.departed[current] = at
            self._free[line] = at = at + self._transfer[current]
            self.arrived[current] = at + self._latency[current]
            self._upcoming[line] = current + 1
            late = late[current < number[late]]
        now[asking] = np.maximum(now[asking], self.arrived[number])
        return missing, now

    def _sleep(self, lanes: Ints, missing: Ints) -> Ints:
        """Let lanes wait for events; those whose event has ended in this very round may move at once."""
        ended = self.end[missing] >= 0
        awake = lanes[ended]
        lanes, missing = lanes[~ended], missing[~ended]
        while len(lanes):  # several may wait for the same event: one of them is written at a time
            self._after[lanes] = self._waiter[missing]
            self._waiter[missing] = lanes
            others = self._waiter[missing] != lanes
            lanes, missing = lanes[others], missing[others]
        return awake
