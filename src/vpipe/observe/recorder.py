"""What a rank writes down of its steps, cheaply enough to stay on.

The training thread only hands over the list of records, which the engine makes anew for every step. A background
thread turns it into text from time to time, and spends at most one part in ``SPARE`` of the time on that: while the run
goes on it writes as many steps in full as fit, those with the roundest numbers first, so that all ranks choose the same
ones. When the run ends, the last ``keep`` steps are written, every one.

    events/rank<r>.jsonl          at most ``keep`` steps, action by action; replaced as a whole, so never half written
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
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Protocol

from vpipe.schedule.action import Action
from vpipe.schedule.semantics import LANE, Lane

INTERVAL = 2.0
"""Seconds between two writings, at least."""
SPARE = 1000
"""The background thread rests this many times as long as it worked, but never more than ``LONGEST`` seconds."""
LONGEST = 30.0
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
        self._recent: deque[_Step] = deque(maxlen=max(1, keep))
        self._texts: dict[int, str] = {}
        """Step → its text, of those that were chosen."""
        self._price = 1e-3
        """Seconds that one step took to write, lately."""
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
            self._write(max(1, int(pause / SPARE / self._price)))
            pause = min(max(self._interval, SPARE * (perf_counter() - began)), LONGEST)
        self._write(None)

    def _write(self, most: int | None) -> None:
        """A summary of each step that waits; of the last ones ``most`` in full, or all."""
        taken: list[_Step] = []
        while self._waiting:
            taken.append(self._waiting.popleft())
        if self.problem is not None or not (taken or self._recent):
            return
        try:
            self._append([_summary(each) for each in taken])
            self._recent.extend(taken)
            began = perf_counter()
            fresh = [each for each in self._recent if each.step not in self._texts]
            if most is not None:
                fresh = sorted(fresh, key=_roundness, reverse=True)[:most]
            self._texts |= {each.step: _full(each, self.versions) for each in fresh}
            if fresh:
                self._price = (perf_counter() - began) / len(fresh)
            self._replace()
        except (OSError, TypeError, ValueError) as error:
            self._give_up(error)

    def _replace(self) -> None:
        keep = self._recent.maxlen or 1
        self._texts = dict(sorted(self._texts.items())[-keep:])
        fresh = self._full.with_suffix(".new")
        fresh.write_text("".join(self._texts.values()), encoding="utf-8")
        os.replace(fresh, self._full)

    def _append(self, lines: list[str]) -> None:
        if self._lines + len(lines) > MAX_LINES:
            os.replace(self._steps, self._steps.with_suffix(".old.jsonl"))
            self._lines = 0
        with self._steps.open("a", encoding="utf-8") as file:
            file.write("".join(lines))
        self._lines += len(lines)

    def _give_up(self, error: Exception) -> None:
        self.problem = f"the trace is no longer recorded: {self._full}: {error}"


_text = lru_cache(maxsize=100_000)(str)
"""Steps repeat the same actions."""
_COMPUTES = frozenset(kind for kind, lane in LANE.items() if lane is Lane.COMPUTE)


def _roundness(each: _Step) -> int:
    """The largest power of two that divides the step's number."""
    return each.step & -each.step or 1 << 62


def _full(each: _Step, versions: Versions) -> str:
    """A step, action by action; times count from its first action. By hand, as ``json.dumps`` takes thrice as long."""
    origin = each.records[0].begin
    cells = []
    for record in each.records:
        action = record.action
        begin, ready, end = record.begin - origin, record.ready - origin, record.end - origin
        size, version = getattr(record, "bytes", 0), versions.get((action.stage, action.microbatch), 0)
        cells.append(f'["{_text(action)}",{begin},{ready},{end},{size},{version}]')
    return (
        f'{{"step":{each.step},"iteration":{each.iteration},"origin_ns":{origin + each.offset_ns},'
        f'"actions":[{",".join(cells)}],"memory":{json.dumps(dict(each.memory or {}))}}}\n'
    )


def _summary(each: _Step) -> str:
    """A step in one short line: how long it took, worked and waited (nanoseconds)."""
    records = each.records
    busy = waited = 0
    for record in records:
        if record.action.kind in _COMPUTES:
            waited += record.ready - record.begin
            busy += record.end - record.ready
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
