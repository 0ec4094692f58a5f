"""A run directory, as pages and reports read it. ``rundir.layout`` says what it holds.

A run that is still being written is a normal case: a last line without an end is waited for, and a file that does not
exist yet is empty. A line that is broken in the middle is left out and counted in ``notes``. Only a directory without
a readable run.json is refused, in one sentence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from vpipe.errors import UserError, nearest
from vpipe.rundir import writing
from vpipe.rundir.facts import RunFacts, RunStage
from vpipe.rundir.layout import CONFIG, METRICS, OLD_STEP_LINES, PLAN, RUN, STEP_LINES, STEPS, SUMMARY
from vpipe.rundir.story import begun, ended, story
from vpipe.schedule.action import Action, parse
from vpipe.schedule.placement import Placement
from vpipe.schedule.program import Program, Versions, from_csv
from vpipe.schedule.semantics import LANE, Lane

MAX_BYTES = 256 * 2**20
"""Of any file that is read: a larger one was not written by a trainer."""


class Event(NamedTuple):
    """An executed action; times are nanoseconds after the step's ``origin_ns``."""

    action: Action
    begin: int
    ready: int
    end: int
    bytes: int = 0
    version: int = 0
    late: int = 0
    """How much of the time from begin to ready it waited for a core; ``stalled`` of the time from ready to end."""
    stalled: int = 0

    @property
    def work(self) -> int:
        """How long it ran once it had what it needs."""
        return self.end - self.ready - self.stalled


@dataclass(frozen=True)
class Step:
    """What one rank did in one step."""

    step: int
    iteration: int
    origin_ns: int
    events: tuple[Event, ...]
    """In the order of the row. A swap takes no time here: the rank only hands it over."""
    memory: Mapping[str, int]
    swaps: tuple[Event, ...] = ()
    """What the swap lane did beside them, and when."""
    before_ns: int | None = None
    """When the step before it had ended on this rank, where that is known."""
    time: float = 0.0
    """Seconds of the epoch at its end; 0 where that is not known."""


@dataclass
class RunDirectory:
    """A run on disk. Readers read the files anew at each call, because the run may still be going."""

    path: Path
    facts: RunFacts
    notes: list[str] = field(default_factory=list)
    """What could not be read, in sentences."""

    @cached_property
    def program(self) -> Program:
        """The program of one step, with its communication."""
        facts, source = self.facts, self.path / RUN
        if facts.program is None:
            raise UserError(f"{source} has no text under 'program'; it was written by another version of vpipe?")
        try:
            versions = Versions(facts.versions or Versions.NEWEST)
            found = from_csv(facts.program, f"{source}, program", versions)
            skips = frozenset((writer, reader) for writer, reader in facts.skips)
            place = Placement(facts.placement) if facts.placement else found.placement
        except UserError:
            raise
        except (TypeError, ValueError) as error:
            raise UserError(f"{source} is not what vpipe writes: {error}") from None
        if place.num_ranks != found.num_ranks or place.num_stages != found.num_stages:
            raise UserError(
                f"{source}: the program has {found.num_ranks} ranks and {found.num_stages} stages, but the "
                f"placement has {place.num_ranks} and {place.num_stages}"
            )
        return Program(found.rows, place, found.num_microbatches, versions, skips)

    @property
    def schedule(self) -> str:
        return self.facts.schedule or "?"

    @property
    def num_ranks(self) -> int:
        return self.program.num_ranks

    @property
    def num_microbatches(self) -> int:
        return self.facts.num_microbatches or self.program.num_microbatches

    @property
    def stages(self) -> list[RunStage]:
        """Of each stage of the program; what the run has not told of one is empty."""
        told = self.facts.stages
        return [*told, *(RunStage() for _ in range(self.program.num_stages - len(told)))]

    def config_text(self) -> str:
        return _text(self.path / CONFIG) or ""

    def metrics(self, most_bytes: int = MAX_BYTES) -> list[dict[str, Any]]:
        """The lines of this run and those it continues, as many of the latest as ``most_bytes`` hold; what others wrote
        beyond where it was resumed is dropped."""
        found: list[dict[str, Any]] = []
        for line in self._lines(self.path / METRICS, most_bytes):
            if line.get("kind") == "resume":
                at = line.get("iteration")
                reached = at if isinstance(at, int) else 0
                found = [each for each in found if _number(each.get("iteration")) <= reached]
            else:
                found.append(line)
        return found

    def summary(self) -> dict[str, Any] | None:
        """summary.json; ``None`` while the run goes on."""
        return self._object(SUMMARY)

    def plan(self) -> dict[str, Any] | None:
        return self._object(PLAN)

    def common_steps(self, last: int | None = None, known: Container[int] = ()) -> list[list[Step]]:
        """The steps that every rank has recorded in full, oldest first: ``[step][rank]``; of these the last ones, where
        so many are wanted, without those that are ``known``."""
        ranks = [self._step_lines(rank) for rank in range(self.num_ranks)]
        shared = sorted(set.intersection(*(set(lines) for lines in ranks))) if ranks else []
        found = []
        for number in shared[-last:] if last else shared:
            if number in known:
                continue
            steps = [self._parsed(rank, lines[number]) for rank, lines in enumerate(ranks)]
            whole = [step for step in steps if step is not None]
            if len(whole) == len(steps):
                found.append(whole)
        return found

    def _step_lines(self, rank: int) -> dict[int, str]:
        """Step → its line, unread. Ranks write at different moments, so what they share is found before it is cut."""
        *whole, rest = (_text(self._events(rank)) or "").split("\n")
        if rest.strip() and self.ended:
            self.note(f"{self._events(rank)} ends in the middle of a line; the run was cut off there")
        matches = ((_STEP.match(line), line) for line in whole)
        return {int(match[1]): line for match, line in matches if match}

    def _parsed(self, rank: int, line: str) -> Step | None:
        path = self._events(rank)
        try:
            return _step(json.loads(line, parse_constant=_no_number))
        except json.JSONDecodeError:
            self.note(f"{path} has broken lines; they are left out")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            self.note(f"{path} has a step that is not one ({error})")
        return None

    def _events(self, rank: int) -> Path:
        return self.path / STEPS.format(rank)

    def step_summaries(self, rank: int, most_bytes: int = MAX_BYTES) -> list[dict[str, Any]]:
        """A short line per step, as many of the latest as ``most_bytes`` of a file hold."""
        files = [self.path / name.format(rank) for name in (OLD_STEP_LINES, STEP_LINES)]
        return [line for file in files for line in self._lines(file, most_bytes)]

    @property
    def ended(self) -> bool:
        """Whether nothing more will be written."""
        return ended(self.path)

    def note(self, sentence: str) -> None:
        """What a reader of the page should know, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def _object(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        text = _text(path)
        try:
            return _parsed_object(path, text) if text is not None else None
        except UserError as error:
            self.note(str(error))
            return None

    def _lines(self, path: Path, most_bytes: int = MAX_BYTES) -> Iterator[dict[str, Any]]:
        """The objects of a file of JSON lines; the unfinished last line of a running job is not yet one."""
        text = writing.tail(path, most_bytes)
        *whole, rest = text.split("\n")
        broken = 0
        for line in whole:
            if not line.strip():
                continue
            try:
                found = json.loads(line, parse_constant=_no_number)
            except (ValueError, RecursionError):
                broken += 1
                continue
            if isinstance(found, dict):
                yield found
        if broken:
            self.note(f"{path} has {broken} broken lines; they are left out")
        if rest.strip() and self.ended:
            self.note(f"{path} ends in the middle of a line; the run was cut off there")


class NotStarted(UserError):
    """A directory whose run has not said what it runs: it is starting, or failed before it could."""


def open_run(path: str | Path) -> RunDirectory:
    """The run in a directory; ``UserError`` for what is none."""
    path = Path(path)
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        beside = [str(each) for each in path.parent.glob("*") if (each / RUN).is_file()]
        hint = nearest(str(path), beside) or "; give the directory that 'vpipe train' wrote"
        raise UserError(f"{path} {what}{hint}")
    facts = path / RUN
    text = _text(facts)
    if text is None:
        kind = NotStarted if begun(path) else UserError
        raise kind(f"{path} is not a run directory: it has no run.json; {_hint(path)}")
    found = _parsed_object(facts, text)
    try:
        return RunDirectory(path, RunFacts.parse(found))
    except ValueError as error:
        raise UserError(f"{facts} is not what vpipe writes: {error}") from None


def _parsed_object(path: Path, text: str) -> dict[str, Any]:
    """The object in the text of a file; ``UserError`` where there is none."""
    try:
        found = json.loads(text, parse_constant=_no_number)
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is broken or still being written: {error}") from None
    return found


def _hint(path: Path) -> str:
    """How the run fares that has not said what it runs; or which runs lie below, for those who give the parent."""
    if begun(path):
        found = story(path)
        return f"its run is {found['kind']}: {found['sentence']}"
    if (path / CONFIG).is_file():
        return "the run has not started yet, try again in a moment"
    inside = sorted(each.parent.name for each in path.glob(f"*/{RUN}") if not each.parent.is_symlink())
    if not inside:
        return "give the directory that 'vpipe train' wrote"
    return f"did you mean {path / inside[-1]}?"


def _text(path: Path) -> str | None:
    """The text of a file; ``None`` where there is none."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path} has {path.stat().st_size} bytes; at most {MAX_BYTES} are read")
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else 0


def _no_number(name: str) -> float | None:
    """NaN and infinities are no JSON; a loss that is not finite is shown as none."""
    number = float(name)
    return number if isfinite(number) else None


_STEP = re.compile(r'\{\s*"step"\s*:\s*(\d{1,15})\b')
"""How the line of a step begins."""
_action = lru_cache(maxsize=100_000)(parse)
"""Steps repeat the same actions."""


def _step(line: Mapping[str, Any]) -> Step:
    events, swaps, before = [], [], 0
    for text, *numbers in line["actions"]:
        action = _action(str(text))
        begin, ready, end, size, version, late, stalled = (int(number) for number in (*numbers, 0, 0)[:7])
        begin = max(begin, before)
        if LANE[action.kind] is Lane.SWAP:
            ready = max(begin, ready)
            swaps.append(Event(action, begin, ready, max(ready, end), size, version))
            ready = end = begin
        ready = max(begin, ready)
        before = max(ready, end)
        late, stalled = min(max(late, 0), ready - begin), min(max(stalled, 0), before - ready)
        events.append(Event(action, begin, ready, before, size, version, late, stalled))
    if not events:
        raise ValueError("no actions")
    memory = {str(key): int(value) for key, value in (line.get("memory") or {}).items() if value is not None}
    step, iteration, origin = int(line["step"]), int(line["iteration"]), int(line["origin_ns"])
    earlier, ended = line.get("before_ns"), float(line.get("time") or 0.0)
    known = None if earlier is None else int(earlier)
    return Step(step, iteration, origin, tuple(events), memory, tuple(swaps), known, ended)
