"""OurGPipe's ``async_threaded``: one worker thread per microbatch, communication in the background.

    worker 0   F SEND . . . . B SEND         a worker runs the actions of its microbatch, in their order;
    worker 1   . F SEND . . . . B SEND       while it waits for a message, others compute
    worker 2   . . F SEND . . . . B SEND

The program still decides what must come before what, and no more than that: a stage takes its forwards and its weight
gradients each in the order of units, because buffers and sums have one order; one rank is sent to in the order of the
program; and all receives are posted before the first worker starts, so that no message waits for a thread (a gpipe
keeps as much of every unit anyway). Everything else is free, and a ``priority`` policy says who goes next among those
that are ready. So results are those of the plain engine to the bit, whatever order the threads find.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any

from vpipe.compat.priorities.order import Policy, Turnstile, none, policy
from vpipe.compat.priorities.turns import Turns
from vpipe.runtime.engine import Engine
from vpipe.runtime.job import Call, Record, Result, recorded
from vpipe.runtime.surroundings import Modes
from vpipe.schedule.action import OF_A_STAGE, Action, Kind
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import INPUT_GRADIENT, LANE, SEND_OF, WEIGHT_GRADIENT, Lane, peers

PATIENCE = 2.0
"""Seconds that a failed rank gives its other workers to come to an end before it reports."""


def lines(program: Program, action: Action) -> Iterator[Hashable]:
    """The queues in which an action stands: it waits for the one before it in each."""
    stage, kind, microbatch = action
    yield ("unit", microbatch)
    if kind is Kind.F:
        yield ("forward", stage)
    if kind in INPUT_GRADIENT or kind is Kind.IN:  # a unit is fetched when the program says so, not as it is let go
        yield ("backward", stage)
    if LANE[kind] is Lane.SWAP:
        yield ("swaps",)
    if kind in WEIGHT_GRADIENT:
        yield ("weights", stage)
    if kind in SEND_OF.values():
        for peer in peers(program, action):
            yield ("sends", program.placement.rank(peer, microbatch))


def predecessors(program: Program, actions: Sequence[Action]) -> list[set[int]]:
    """For each action, the places of those that it waits for."""
    last: dict[Hashable, int] = {}
    found: list[set[int]] = []
    for place, action in enumerate(actions):
        mine = list(lines(program, action))
        found.append({last[line] for line in mine if line in last})
        last.update(dict.fromkeys(mine, place))
    return found


def engine_maker(priority: str) -> Callable[..., Engine]:
    """What makes engines whose worker threads take turns by ``priority``."""
    return partial(ThreadedEngine, policy=policy(priority))


class Failed(Exception):
    """Another worker of this rank has failed."""


class ThreadedEngine(Engine):
    """One rank with a worker thread for each microbatch."""

    def __init__(self, *arguments: Any, policy: Policy = none, **more: Any) -> None:
        self._thread = threading.local()
        self._seen: Action | None = None
        super().__init__(*arguments, **more)
        self._guard = Turns(self, Turnstile(policy), self._guard)

    @property
    def current(self) -> Action | None:
        """What this thread is doing; seen from outside (a watchdog), what some worker has begun last."""
        found: Action | None = getattr(self._thread, "action", None)
        return found or self._seen

    @current.setter
    def current(self, action: Action | None) -> None:
        self._thread.action = self._seen = action

    @property
    def _ready(self) -> int:
        return getattr(self._thread, "ready", 0)

    @_ready.setter
    def _ready(self, time: int) -> None:
        self._thread.ready = time

    def _execute(self, calls: Sequence[Call], result: Result) -> None:
        """Units in threads; what belongs to a whole stage (REDUCE, STEP) when all before it is done."""
        records = result.records
        waiting: list[Call] = []
        for call in calls:
            if call[0].kind not in OF_A_STAGE:
                waiting.append(call)
                continue
            self._run_units(waiting, records)
            waiting = []
            records.extend(recorded([call], self._timed([call])))
        self._run_units(waiting, records)

    def _run_units(self, calls: Sequence[Call], records: list[Record]) -> None:
        if not calls:
            return
        posts = [call for call in calls if call[0].kind in SEND_OF]
        records.extend(recorded(posts, self._timed(posts)))
        crew = _Crew(self, [call for call in calls if call[0].kind not in SEND_OF], records)
        first = len(records)
        failed = crew.run()
        records[first:] = sorted(records[first:], key=_moment)
        if failed is not None:
            action, error = failed
            self.current = action
            raise error


def _moment(record: Record) -> int:
    """When an action took its place: a send or a swap as it began, a computation as its turn came. Causes come before
    effects."""
    return record.ready if LANE[record.action.kind] is Lane.COMPUTE else record.begin


class _Crew:
    """The workers of one stretch of a row."""

    def __init__(self, engine: ThreadedEngine, calls: Sequence[Call], records: list[Record]) -> None:
        self._engine = engine
        self._calls = calls
        self._records = records
        self._needs = predecessors(engine._program, [action for action, _ in calls])
        self._done = [False] * len(calls)
        self._changed = threading.Condition()
        self._failure: tuple[Action, BaseException] | None = None
        self._modes = Modes()
        self._places: dict[int, list[int]] = defaultdict(list)
        for place, (action, _) in enumerate(calls):
            self._places[action.microbatch].append(place)
        self._working = len(self._places)

    def run(self) -> tuple[Action, BaseException] | None:
        """Until all workers are done, or one has failed: then the others may wait for messages that never come."""
        for microbatch, places in self._places.items():
            name = f"vpipe-rank{self._engine.rank}-microbatch{microbatch}"
            threading.Thread(target=self._work, args=(places,), name=name, daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._working == 0)
        if self._failure is not None:
            self._engine.transport.fail(self._failure[1])
            with self._changed:
                self._changed.wait_for(lambda: self._working == 0, PATIENCE)
        return self._failure

    def _work(self, places: Sequence[int]) -> None:
        try:
            with self._modes.here():
                for place in places:
                    self._perform(place)
        except Failed:
            pass
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def _perform(self, place: int) -> None:
        engine, (action, call), needs = self._engine, self._calls[place], self._needs[place]
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or all(self._done[need] for need in needs))
            if self._failure is not None:
                raise Failed
        engine.current = action
        begin = engine._ready = perf_counter_ns()
        try:
            call()
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or (action, error)
            raise Failed from error
        record = Record(action, begin, engine._ready, perf_counter_ns())
        with self._changed:
            self._records.append(record)
            self._done[place] = True
            self._changed.notify_all()
