"""What a rank writes down of its steps, cheaply enough to stay on.

The training thread only hands over the list of records, which the engine makes anew for every step. A background
thread turns it into text from time to time. A step that has left the window of the last ``keep`` before its turn comes
is never written in full, so a fast run costs no more than a slow one; and the thread sleeps at least ``SPARE`` times as
long as its last writing took.

    events/rank<r>.jsonl          the last ``keep`` steps, action by action; replaced as a whole, so never half written
    events/rank<r>.steps.jsonl    one short line per step; the older half moves to rank<r>.steps.old.jsonl

A recorder never stops a training run: what goes wrong is kept in ``problem`` and recording ends.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Protocol

from vpipe.schedule.action import Action
from vpipe.schedule.semantics import LANE, Lane

INTERVAL = 2.0
"""Seconds between two writings, at least."""
SPARE = 400
"""The background thread rests this many times as long as it worked: at most 0.25 % of one core."""
MAX_WAITING = 2000
"""Steps that wait to be written; older ones are forgotten."""
MAX_LINES = 20_000
"""Lines of the file of summaries before its older half moves away."""

Versions = Mapping[tuple[int, int], int]


class Timed(Protocol):
    """An executed action: ``vpipe.runtime.engine.Record``."""

    @property
    def action(self) -> Action: ...
    @property
    def begin(self) -> int: ...
    @property
    def ready(self) -> int: ...
    @property
    def end(self) -> int: ...


@dataclass(frozen=True)
class _Step:
    step: int
    iteration: int
    records: Sequence[Timed]
    memory: Mapping[str, int] | None
    offset_ns: int


class Recorder:
    """The steps of one rank.

    ``offset_ns`` is added to its clock (see ``clock``). ``versions`` says which weights a unit reads at a stage
    (``semantics.version_table``); both may be set again while the run goes on.
    """

    def __init__(
        self,
        directory: str | Path,
        rank: int,
        *,
        keep: int = 20,
        offset_ns: int = 0,
        versions: Versions | None = None,
        interval: float = INTERVAL,
    ) -> None:
        self.offset_ns = offset_ns
        self.versions = versions or {}
        self.problem: str | None = None
        events = Path(directory) / "events"
        self._full = events / f"rank{rank}.jsonl"
        self._steps = events / f"rank{rank}.steps.jsonl"
        self._interval = interval
        self._waiting: deque[_Step] = deque(maxlen=MAX_WAITING)
        self._window: deque[str] = deque(maxlen=max(1, keep))
        self._lines = 0
        self._stop = threading.Event()
        try:
            events.mkdir(parents=True, exist_ok=True)
            with self._steps.open("a", encoding="utf-8") as file:
                file.write("\n" if file.tell() else "")  # after a kill, the last line may have no end
        except OSError as error:
            self._give_up(error)
        self._thread = threading.Thread(target=self._run, name=f"vpipe-recorder-{rank}", daemon=True)
        self._thread.start()

    def record(
        self, step: int, iteration: int, records: Sequence[Timed], memory: Mapping[str, int] | None = None
    ) -> None:
        """Take the records of a step; the list must not change afterwards."""
        if self.problem is None and records:
            self._waiting.append(_Step(step, iteration, records, memory, self.offset_ns))

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        pause = min(self._interval, 0.2)  # the first step is worth seeing soon
        while not self._stop.wait(pause) and self.problem is None:
            began = perf_counter()
            self._write()
            pause = max(self._interval, SPARE * (perf_counter() - began))
        self._write()

    def _write(self) -> None:
        """Everything that waits: a summary of each step, the last ones in full."""
        taken: list[_Step] = []
        while self._waiting:
            taken.append(self._waiting.popleft())
        if not taken or self.problem is not None:
            return
        try:
            self._append([_summary(each) for each in taken])
            keep = self._window.maxlen or 1
            self._window.extend(_full(each, self.versions) for each in taken[-keep:])
            fresh = self._full.with_suffix(".new")
            fresh.write_text("".join(self._window), encoding="utf-8")
            os.replace(fresh, self._full)
        except (OSError, TypeError, ValueError) as error:
            self._give_up(error)

    def _append(self, lines: list[str]) -> None:
        if self._lines + len(lines) > MAX_LINES:
            os.replace(self._steps, self._steps.with_suffix(".old.jsonl"))
            self._lines = 0
        with self._steps.open("a", encoding="utf-8") as file:
            file.write("".join(lines))
        self._lines += len(lines)

    def _give_up(self, error: Exception) -> None:
        self.problem = f"the trace is no longer recorded: {self._full}: {error}"


def _full(each: _Step, versions: Versions) -> str:
    """A step, action by action; times count from its first action."""
    origin = each.records[0].begin
    actions = [
        [
            str(record.action),
            record.begin - origin,
            record.ready - origin,
            record.end - origin,
            getattr(record, "bytes", 0),
            versions.get((record.action.stage, record.action.microbatch), 0),
        ]
        for record in each.records
    ]
    line = {
        "step": each.step,
        "iteration": each.iteration,
        "origin_ns": origin + each.offset_ns,
        "actions": actions,
        "memory": dict(each.memory or {}),
    }
    return json.dumps(line, separators=(",", ":")) + "\n"


def _summary(each: _Step) -> str:
    """A step in one short line: how long it took, worked and waited (nanoseconds)."""
    records = each.records
    busy = sum(record.end - record.ready for record in records if LANE[record.action.kind] is Lane.COMPUTE)
    waited = sum(record.ready - record.begin for record in records)
    line = {
        "step": each.step,
        "iteration": each.iteration,
        "origin_ns": records[0].begin + each.offset_ns,
        "span": records[-1].end - records[0].begin,
        "busy": busy,
        "waited": waited,
        "memory": dict(each.memory or {}),
    }
    return json.dumps(line, separators=(",", ":")) + "\n"
