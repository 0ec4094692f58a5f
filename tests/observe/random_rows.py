"""Arbitrary measured rows for property tests."""

from __future__ import annotations

from typing import Any

from vpipe.rundir.reader import Event
from vpipe.schedule.catalog import build
from vpipe.schedule.lower import lower
from vpipe.schedule.program import Program


def rows_of(schedule: str, ranks: int, microbatches: int, dice: Any) -> tuple[Program, tuple[tuple[Event, ...], ...]]:
    """A lowered program with random times; the earliest begin is 0."""
    program = lower(build(schedule, ranks, microbatches))
    rows = []
    for rank, row in enumerate(program.rows):
        now, events = 0 if rank == 0 else dice.randint(0, 20), []
        for action in row:
            begin = now + dice.randint(0, 5)
            ready = begin + dice.randint(0, 9)
            now = ready + dice.randint(0, 9)
            events.append(Event(action, begin, ready, now))
        rows.append(tuple(events))
    return program, tuple(rows)
