"""What a rank writes down of its steps, cheaply enough to stay on.

The training thread only hands over the list of records, which the engine makes anew for every step. A background
thread turns it into text. While the run goes on, a page wants to see a step of all ranks that is fresh, and turning
every step into text would cost too much: every ``stride``-th step is written in full, where the stride is a power of
two, so that ranks that judge differently still share every step of the coarser one. It is chosen such that a step comes
about every half second, later (at most every second) where a step's text is dear. When a run pauses, the two
newest steps are written; when it ends, the last ``keep``, every one.

    events/rank<r>.jsonl          steps, action by action: appended, now and then cut to the last ``keep``
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
from math import log2
from pathlib import Path
from time import thread_time, time
from typing import Protocol

from vpipe.rundir import writing
from vpipe.rundir.layout import OLD_STEP_LINES, STEP_LINES, STEPS
from vpipe.schedule.action import Action
from vpipe.schedule.semantics import LANE, Lane

FRESH, LATEST = 0.5, 1.0
"""Seconds between two steps that are written in full: wanted, and at most."""
SPARE = 1000
"""Writing may take one part in so many of the time, as far as ``LATEST`` allows."""
MAX_WAITING = 2000
"""Steps that wait to be written; older ones are forgotten."""
MAX_LINES = 20_000
"""Lines of the file of summaries before its older half moves away."""

ReadVersions = Mapping[tuple[int, int], int]


class Timed(Protocol):
    """An executed action: ``vpipe.runtime.job.Record``."""

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
    time: float
    """When it was handed over, in seconds of the epoch."""
    before: int | None
    """When the step before it had ended here; ``None`` where that is not known."""
    chosen: bool
    """Whether it is written in full while the run goes on."""


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
        versions: ReadVersions | None = None,
    ) -> None:
        self.offset_ns = offset_ns
        self.versions = versions or {}
        self.problem: str | None = None
        self._full, self._steps, self._old_steps = (
            Path(directory) / name.format(rank) for name in (STEPS, STEP_LINES, OLD_STEP_LINES)
        )
        self._waiting: deque[_Step] = deque(maxlen=MAX_WAITING)
        self._recent: deque[_Step] = deque(maxlen=max(1, keep))
        self._texts: dict[int, str] = {}
        """Step → its text, of those that were chosen."""
        self._price = 1e-3
        """Seconds of computing that one step took to write, lately."""
        self._took = 0.0
        """Seconds from step to step, lately."""
        self._last: _Step | None = None
        self._lines = 0
        self._appended: int | None = None
        """Steps in the file; ``None`` before the first writing, which replaces what another run left."""
        self._stop = False
        self._wake = threading.Event()
        try:
            self._full.parent.mkdir(parents=True, exist_ok=True)
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
        if self.problem is not None or not records:
            return
        chosen = step % self._stride(step, records[0].begin) == 0
        last = self._last
        before = last.records[-1].end if last is not None and last.step == step - 1 else None
        self._last = _Step(step, iteration, records, memory, self.offset_ns, time(), before, chosen)
        self._waiting.append(self._last)
        if chosen:
            self._wake.set()

    def _stride(self, step: int, begin: int) -> int:
        """Every how manyth step is written in full: the power of two whose steps come soon enough."""
        if self._last is not None and step == self._last.step + 1:
            took = (begin - self._last.records[0].begin) * 1e-9
            took = min(took, 4 * self._took) if self._took else took  # an evaluation between two steps is none of them
            self._took += (took - self._took) * (0.2 if self._took else 1.0)
        pace = min(max(FRESH, SPARE * self._price), LATEST)
        return 1 << int(log2(pace / self._took)) if 0 < self._took < pace else 1

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._stop = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop and self.problem is None:
            woken = self._wake.wait(LATEST)
            self._wake.clear()
            self._write(paused=not woken)
        self._write_last()

    def _write(self, paused: bool) -> None:
        """A summary of each step that waits, and in full those that were chosen; in a pause, the two newest."""
        taken: list[_Step] = []
        while self._waiting:
            taken.append(self._waiting.popleft())
        if self.problem is not None or not (taken or (paused and self._recent)):
            return
        try:
            self._append([_summary(each) for each in taken])
            self._recent.extend(taken)
            wanted = [each for each in taken if each.chosen] + (list(self._recent)[-2:] if paused else [])
            began = thread_time()
            fresh = {each.step: _full(each, self.versions) for each in wanted if each.step not in self._texts}
            if fresh:
                self._add(fresh)
                self._price += ((thread_time() - began) / len(fresh) - self._price) * 0.3
        except (OSError, TypeError, ValueError) as error:
            self._give_up(error)

    def _add(self, fresh: dict[int, str]) -> None:
        """Append these steps; now and then the file is cut to the last ones."""
        keep = self._recent.maxlen or 1
        self._texts = dict(sorted((self._texts | fresh).items())[-keep:])
        if self._appended is None or self._appended + len(fresh) > 4 * keep:
            self._replace()
            return
        with self._full.open("a", encoding="utf-8") as file:
            file.write("".join(fresh.values()))
        self._appended += len(fresh)

    def _write_last(self) -> None:
        """At the end: the last steps, every one."""
        self._write(paused=False)
        if self.problem is not None or not self._recent:
            return
        try:
            known = self._texts
            self._texts = {each.step: known.get(each.step) or _full(each, self.versions) for each in self._recent}
            self._replace()
        except (OSError, TypeError, ValueError) as error:
            self._give_up(error)

    def _replace(self) -> None:
        writing.put(self._full, "".join(self._texts.values()).encode())
        self._appended = len(self._texts)

    def _append(self, lines: list[str]) -> None:
        if self._lines + len(lines) > MAX_LINES:
            os.replace(self._steps, self._old_steps)
            self._lines = 0
        with self._steps.open("a", encoding="utf-8") as file:
            file.write("".join(lines))
        self._lines += len(lines)

    def _give_up(self, error: Exception) -> None:
        self.problem = f"the trace is no longer recorded: {self._full}: {error}"


_text = lru_cache(maxsize=100_000)(str)
"""Steps repeat the same actions."""
_COMPUTES = frozenset(kind for kind, lane in LANE.items() if lane is Lane.COMPUTE)


def _full(each: _Step, versions: ReadVersions) -> str:
    """A step, action by action; times count from its first action. By hand, as ``json.dumps`` takes thrice as long."""
    origin = each.records[0].begin
    cells = []
    for record in each.records:
        action = record.action
        begin, ready, end = record.begin - origin, record.ready - origin, record.end - origin
        size, version = getattr(record, "bytes", 0), versions.get((action.stage, action.microbatch), 0)
        late, stalled = getattr(record, "late", 0), getattr(record, "stalled", 0)
        queued = f",{late},{stalled}" if late or stalled else ""
        cells.append(f'["{_text(action)}",{begin},{ready},{end},{size},{version}{queued}]')
    before = "null" if each.before is None else each.before + each.offset_ns
    return (
        f'{{"step":{each.step},"iteration":{each.iteration},"origin_ns":{origin + each.offset_ns},"before_ns":{before},'
        f'"time":{each.time:.3f},'
        f'"actions":[{",".join(cells)}],"memory":{json.dumps(dict(each.memory or {}))}}}\n'
    )


def run_ahead(records: Sequence[Timed]) -> int | None:
    """Nanoseconds that the host was ahead of the device at most; ``None`` where there is no device to be ahead of."""
    enqueued = [(record.begin, getattr(record, "enqueued", 0)) for record in records]
    ahead = [begin - handed_over for begin, handed_over in enqueued if handed_over]
    return max(0, *ahead) if ahead else None


def _summary(each: _Step) -> str:
    """A step in one short line: how long it took, worked and waited, and the host's lead (nanoseconds)."""
    records = each.records
    busy = waited = 0
    for record in records:
        if record.action.kind in _COMPUTES:
            stalled = getattr(record, "stalled", 0)
            waited += record.ready - record.begin + stalled
            busy += record.end - record.ready - stalled
    line = {
        "step": each.step,
        "iteration": each.iteration,
        "origin_ns": records[0].begin + each.offset_ns,
        "span": records[-1].end - records[0].begin,
        "busy": busy,
        "waited": waited,
        "ahead": run_ahead(records),
        "memory": dict(each.memory or {}),
    }
    return json.dumps(line, separators=(",", ":")) + "\n"
