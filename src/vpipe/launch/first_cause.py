"""Which rank failed first, and what to say about it.

When one rank fails, the others fail too: they lose a connection, wait for nothing, are ended by us. All that arrives
within a moment and in any order. A rank that only saw another one go is never the cause.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vpipe.launch.process import signal_name
from vpipe.rundir.journal import CODES, DIVERGED, MISTAKE, MOST_DETAILS, RESUME_ME, UNSAVED, Ending, EndingKind

IN_ORDER = (DIVERGED, UNSAVED, RESUME_ME, 128 + signal.SIGINT, 128 + signal.SIGHUP)
"""Exit codes of a rank that came to its end in order: it has said what there is to say."""


@dataclass(frozen=True)
class Report:
    """A rank's own words about its end; see ``rank.describe``."""

    rank: int
    kind: str
    sentence: str
    traceback: str = ""
    cause: dict[str, Any] | None = None


@dataclass
class Verdict:
    """Everything that is known about the ends of the ranks, in the order of its arrival."""

    num_ranks: int
    reports: dict[int, Report] = field(default_factory=dict)
    statuses: dict[int, int] = field(default_factory=dict)
    ended_by_us: bool = False
    _order: list[int] = field(default_factory=list)
    """The ranks of which something went wrong that we did not do."""
    _ours: set[int] = field(default_factory=set)
    """The ranks that our signal has ended."""
    _lost: dict[int, str] = field(default_factory=dict)
    """How ranks went that are lost with their machine."""

    def report(self, report: Report) -> None:
        self.reports.setdefault(report.rank, report)
        self._note(report.rank)

    def ended(self, rank: int, status: int, how: str = "") -> None:
        self.statuses[rank] = status
        if how:
            self._lost[rank] = how
        if self.ended_by_us and status in (-signal.SIGTERM, -signal.SIGKILL, -signal.SIGINT):
            self._ours.add(rank)
        elif status not in (0, *IN_ORDER):
            self._note(rank)

    def _note(self, rank: int) -> None:
        if rank not in self._order:
            self._order.append(rank)

    @property
    def all_ended(self) -> bool:
        return len(self.statuses) == self.num_ranks

    @property
    def failed(self) -> bool:
        """Whether anything has gone wrong."""
        return bool(self._order)

    def cause(self) -> int | None:
        """The rank that failed first by itself, if it is known yet."""
        for rank in self._order:
            report = self.reports.get(rank)
            if report is None or report.kind in ("user", "error"):
                return rank
        for rank in self._order:
            named = (self.reports[rank].cause or {}) if rank in self.reports else {}
            if named.get("kind") in ("silent", "gone", "missing"):
                return int(named["rank"])
        return None

    @property
    def settled(self) -> bool:
        """Whether nothing better can be learnt: a rank that others miss may still be about to say why it ends."""
        rank = self.cause()
        if rank is None or rank in self._order or rank in self.statuses:
            return rank is not None
        return any(report.cause["kind"] in ("silent", "missing") for report in self.reports.values() if report.cause)

    def exit_code(self) -> int:
        """0: all well; else the code of the ending: see ``rundir.journal``."""
        if self.failed:
            return self.ending().code
        return next((code for code in IN_ORDER if code in self.statuses.values()), 0)

    def ending(self) -> Ending:
        """What the first cause makes of the run."""
        rank = self.cause()
        report = self.reports.get(rank) if rank is not None else None
        if rank is None or (report is not None and report.kind == "lost"):
            return Ending.of(EndingKind.LOST, next(self.lines()), rank=rank)
        why = self._why(rank)
        if report is not None:
            code = MISTAKE if report.kind == "user" else None
            return Ending.of(EndingKind.FAILED, why, code, rank=rank, details=report.traceback[-MOST_DETAILS:])
        sentence = why if why.startswith("rank ") else f"rank {rank} failed: {why}"
        if rank in self._lost or any(cause.get("kind") in ("silent", "missing") for cause in self._causes_of(rank)):
            return Ending.of(EndingKind.LOST, sentence, rank=rank)
        status = self.statuses.get(rank, 0)
        if status > 0:
            return Ending.of(EndingKind.FAILED, sentence, status, rank=rank)
        return Ending.of(EndingKind.KILLED, sentence, 128 - status if status else CODES[EndingKind.KILLED], rank=rank)

    def _causes_of(self, rank: int) -> list[dict[str, Any]]:
        """What the other ranks say that has become of this one."""
        causes = [report.cause for report in self.reports.values() if report.cause]
        return [cause for cause in causes if cause.get("rank") == rank]

    def lines(self) -> Iterator[str]:
        """The first cause with its traceback, then a line for each of the others."""
        cause = self.cause()
        first = cause if cause is not None else self._order[0]
        report = self.reports.get(first)
        if report is not None and report.kind == "user":
            yield f"vpipe: {' '.join(report.sentence.split())}"
            return
        if report is not None and report.traceback and report.kind != "lost":
            yield f"rank {first} failed:"
            yield report.traceback.rstrip("\n")
        else:
            why = self._why(first)
            yield why if why.startswith((f"rank {first} ", f"rank {first},")) else f"rank {first} failed: {why}"
        yield from self._others(first)

    def _why(self, rank: int) -> str:
        for cause in self._causes_of(rank):
            if cause.get("kind") == "silent":
                return str(cause["sentence"])
        if rank in self.reports:
            return self.reports[rank].sentence
        if rank in self._lost:
            return f"rank {rank} {self._lost[rank]}"
        status = self.statuses.get(rank)
        if status is None or status == 0 or rank in self._ours:
            return next((str(cause["sentence"]) for cause in self._causes_of(rank)), "it ended before the others")
        if status < 0:
            memory = "; the system kills processes so when memory runs out" if status == -signal.SIGKILL else ""
            return f"it was killed by {signal_name(-status)}{memory}"
        return f"it ended with exit code {status}"

    def _others(self, first: int) -> Iterator[str]:
        cause = self.reports.get(first)
        for rank in range(self.num_ranks):
            report = self.reports.get(rank)
            if rank == first or self.statuses.get(rank) == 0:
                continue
            if report is not None and report.kind in ("user", "error"):
                same = cause is not None and cause.sentence == report.sentence
                yield f"rank {rank}: {'failed in the same way' if same else f'failed too: {report.sentence}'}"
            else:
                yield f"rank {rank}: ended because rank {first} failed"
