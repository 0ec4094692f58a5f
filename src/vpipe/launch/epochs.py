"""Who trains with whom: the decisions of the launcher of an elastic run, without its sockets.

A *slot* is a place for a process; a rank is what it is called in one epoch. The processes of all slots are in one of
these states, and a new epoch begins when no process is on the way:

    STARTING ──ready──▶ READY ──order──▶ RUNNING ──finished──▶ FINISHED
                          ▲                 │ another one is lost: abort
                          └──ready──── LEAVING

Only here is an epoch numbered, so there is never more than one group that goes on.

Words: docs/glossary.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from time import monotonic
from typing import Any

MOST_LOSSES, REST = 3, 600.0
"""Losses of one slot within so many seconds, after which it rests for as long."""
MOST_IN_VAIN = 5
"""Epochs in a row without a step, after which the run ends: what kills a rank again and again is not chance."""


@dataclass(frozen=True)
class Elastic:
    """How many ranks there may be. ``replaces``: a lost one is replaced by a new process of its machine."""

    least: int
    most: int
    by: int = 1
    replaces: bool = True
    directory: Path | None = None
    """Where those who look from outside are told who is in the run, and say how many they want."""
    saves: bool = False
    """Whether what the copies hold becomes a checkpoint when the run does not end in order."""
    rests: bool = True
    """Whether fewer may go on where a slot is lost again and again."""
    leads: bool = True
    """Whether ranks may be lost. If not, they know who they are from the beginning, and the first loss is the end."""


@dataclass
class Member:
    """The process of a slot, as far as the launcher knows it."""

    pid: int = 0
    seen: float = field(default_factory=monotonic)
    longest: float = 0.0
    """Seconds between two of its signs, at most so far: patience adapts to it."""
    aborted_at: float = 0.0
    """When it was told to leave its epoch."""


class MemberState(Enum):
    STARTING = auto()
    READY = auto()
    RUNNING = auto()
    LEAVING = auto()
    FINISHED = auto()


@dataclass
class Crew:
    """The processes of an elastic run. ``by`` is what their number must be a multiple of."""

    wanted: int
    least: int
    by: int = 1
    epoch: int = 0
    states: dict[int, MemberState] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    """Slot → rank in the current epoch."""
    lost: list[str] = field(default_factory=list)
    """Why there must be another epoch, in words."""
    lost_at: dict[int, list[float]] = field(default_factory=dict)
    """Slot → when its processes were lost."""
    num_losses: int = 0
    in_vain: int = 0
    is_over: bool = False
    """All have finished and were told to leave: no process joins any more, whatever is asked for."""
    unwelcome: set[int] = field(default_factory=set)
    """Slots of machines that are given back: their processes leave with the next epoch."""

    def lose(self, slot: int, now: float) -> None:
        """The process of a slot was lost, and its part is not done."""
        self.num_losses += 1
        self.lost_at.setdefault(slot, []).append(now)

    def is_tired(self, slot: int, now: float) -> bool:
        """Whether the processes of this slot were lost so often of late that it should rest: others take its place, or
        fewer go on."""
        return sum(now - then < REST for then in self.lost_at.get(slot, ())) >= MOST_LOSSES

    def started(self, slot: int) -> None:
        self.states[slot] = MemberState.STARTING

    def ready(self, slot: int) -> None:
        self.states[slot] = MemberState.READY

    def finished(self, slot: int, epoch: int) -> None:
        if epoch == self.epoch and self.states.get(slot) is MemberState.RUNNING:
            self.states[slot] = MemberState.FINISHED

    def stepped(self, epoch: int) -> None:
        if epoch == self.epoch:
            self.in_vain = 0

    def gone(self, slot: int) -> bool:
        """A process has ended; whether it had done its part, or none was left to do."""
        finished = self.states.pop(slot, None) is MemberState.FINISHED and self.all_finished
        return finished or self.is_over

    @property
    def all_finished(self) -> bool:
        training = [state for slot, state in self.states.items() if slot in self.ranks]
        return all(state is MemberState.FINISHED for state in training)

    def interrupt(self, why: str) -> list[int]:
        """The epoch is over: the slots that must be told."""
        self.lost.append(why)
        told = [slot for slot, state in self.states.items() if state is MemberState.RUNNING]
        for slot, state in self.states.items():
            if state is MemberState.FINISHED:
                self.states[slot] = MemberState.READY
        for slot in told:
            self.states[slot] = MemberState.LEAVING
        return told

    def is_leaving(self, slot: int) -> bool:
        """Whether it was told that its epoch is over, and has not answered."""
        return self.states.get(slot) is MemberState.LEAVING

    @property
    def has_newcomers(self) -> bool:
        """Whether more could train than do, and no process is on the way."""
        settled = all(state in (MemberState.READY, MemberState.RUNNING) for state in self.states.values())
        return settled and MemberState.RUNNING in self.states.values() and self.num_ranks > len(self.ranks)

    @property
    def superfluous(self) -> list[int]:
        """The slots that are not needed any more."""
        return [*self._candidates[self.wanted :], *sorted(self.unwelcome & self.states.keys())]

    @property
    def _candidates(self) -> list[int]:
        return sorted(self.states.keys() - self.unwelcome)

    @property
    def num_ranks(self) -> int:
        """How many can train now."""
        return min(self.wanted, len(self._candidates)) // self.by * self.by

    @property
    def can_begin(self) -> bool:
        return (
            not self.is_over
            and self.num_ranks >= self.least
            and all(state is MemberState.READY for state in self.states.values())
        )

    def begin(self) -> dict[int, dict[str, Any]]:
        """Begin the next epoch: slot → order. Who is not needed waits as a spare."""
        self.epoch += 1
        self.in_vain += 1
        slots = self._candidates[: self.num_ranks]
        self.ranks = {slot: rank for rank, slot in enumerate(slots)}
        for slot in slots:
            self.states[slot] = MemberState.RUNNING
        facts: dict[str, Any] = {"lost": self.lost} if self.lost else {}
        facts["losses"] = self.num_losses
        self.lost = []
        return {
            slot: {"epoch": self.epoch, "rank": rank, "num_ranks": len(slots), **facts}
            for slot, rank in self.ranks.items()
        }
