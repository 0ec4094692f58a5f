"""Joining the other ranks, and staying in touch.

Ranks meet at a store, say who they are, and only then connect to each other: a rank with another torch, another vpipe
or another program is refused in words instead of hanging in the middle of a step. From then on a watchdog ends this
rank when another one fails. There is one membership a process, as there is one default process group.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from time import monotonic, sleep
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

import vpipe
from vpipe.errors import UserError, printable
from vpipe.network import GLOO, choose_interface
from vpipe.process import Process, cores, num_cores
from vpipe.runtime.ranks import device_groups
from vpipe.runtime.ranks.failure import Board, Cause, PeerLost, reason
from vpipe.runtime.ranks.gloo import FEW_QUESTIONS, grouped
from vpipe.runtime.ranks.meeting import COME_WITHIN, STORE_WITHIN, LaunchedRank, Meeting
from vpipe.runtime.ranks.watchdog import Watchdog

_stores: Any = dist
"""torch's type stubs leave its stores out."""

SILENCE = 60.0
"""Seconds after which a rank that gives no sign is taken for stopped; less if the timeout is less."""
SLACK = 5.0
"""Seconds that gloo waits longer than the watchdog, which can say more about a silent rank."""


class Membership:
    """This process as one of the ranks."""

    def __init__(self, place: LaunchedRank, timeout: float, meeting: Meeting) -> None:
        self._place = place
        self._patience = min(timeout, COME_WITHIN)
        self._board = Board(meeting.store, place.rank)
        self._board.beat("0 joining")
        self._agreements = self._groups = 0
        self._engines: list[weakref.ref[Any]] = []
        self._people: list[dict[str, Any]] = []
        keeper = None if place.store is not None else 0
        board = Board(meeting.watched, place.rank)
        silence = min(SILENCE, timeout)
        self.watchdog = Watchdog(board, place.rank, place.num_ranks, silence, keeper, place.report_fd)
        self.watchdog.doing = self._doing
        self.watchdog.end_silent = self._end_silent

    def meet(self) -> None:
        """Wait for all ranks; their versions must be the same."""
        me = {"torch": torch.__version__, "vpipe": vpipe.__version__}
        self._people = self.exchange("join", {**me, "process": Process.here().fields(), "cores": cores()})
        self._compare(self._people, me, "runs {key} {value}", "install the same versions everywhere")

    def agree(self, facts: Mapping[str, str]) -> None:
        """All ranks must say the same about the program that they are going to run."""
        self._agreements += 1
        everyone = self.exchange(f"agree/{self._agreements}", facts)
        self._compare(everyone, facts, "has {key} {value}", "every rank must build the same pipeline")

    def exchange(self, key: str, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What every rank says under a key, by rank; each key is used once."""
        try:
            return self._exchanged(key, facts)
        except RuntimeError as error:
            raise PeerLost(f"the store at which the ranks meet is gone ({reason(error)})") from None

    def _exchanged(self, key: str, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._board.put(key, facts)
        until, pause = monotonic() + self._patience, 0.01
        num_ranks = self._place.num_ranks
        while missing := self._board.missing(key, num_ranks):
            cause = self._board.read()
            if cause is None and monotonic() > until:
                names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
                verb = "have" if len(missing) > 1 else "has"
                what = f"{names} of {num_ranks} {verb} not come within {self._patience:g} s"
                cause = self._board.post(Cause(missing[0], "missing", what, self._place.rank))
            if cause is not None:
                error = PeerLost(str(cause), cause.rank)
                error.cause = cause.fields()
                raise error
            sleep(pause)
            pause = min(0.2, pause * 1.5)
        return self._board.gathered(key, num_ranks)

    @staticmethod
    def _compare(everyone: list[dict[str, Any]], keys: Mapping[str, Any], form: str, remedy: str) -> None:
        for rank, facts in enumerate(everyone):
            for key in keys:
                if facts.get(key) != everyone[0].get(key):
                    here = form.format(key=key, value=printable(str(facts.get(key))))
                    there = form.format(key=key, value=printable(str(everyone[0].get(key))))
                    raise UserError(f"rank {rank} {here}, but rank 0 {there}; {remedy}")

    def grouped(self, make: Callable[[str], Any], ranks: Sequence[int]) -> Any:
        """The process group of ``ranks`` that ``make`` makes, told a name that is new; all ranks call this."""
        self._groups += 1
        place = self._place
        facts = (f"group/{self._groups}", ranks, place.rank, f"{place.secret} {place.generation}", self._patience)
        return grouped(make, *facts, self.exchange, lambda key: self._board.together(key, place.num_ranks))

    def watch(self, engine: Any) -> None:
        """Tell the others what this engine is doing, should it fall silent."""
        self._engines = [known for known in self._engines if known() is not None] + [weakref.ref(engine)]

    def _doing(self) -> str:
        for known in reversed(self._engines):
            engine = known()
            if engine is not None and engine.current is not None:
                return str(engine.current)
        return ""

    def _end_silent(self, rank: int) -> None:
        """A stopped rank of this machine cannot end by itself: it goes too, if it is still the process that joined."""
        process = Process.parse(self._people[rank].get("process"))
        if process is not None:
            process.kill()

    @property
    def num_own_cores(self) -> int:
        """How many of the cores that this rank may use are its own, where ranks of one machine share them."""
        return own_cores(self._people, self._place.rank, num_cores())

    @property
    def is_watched(self) -> bool:
        return self._place.watched

    def start(self) -> None:
        """From now on this rank ends with the others, and soon: an interpreter that has loaded torch spends a second on
        looking for garbage while it ends."""
        atexit.register(gc.freeze)
        atexit.register(self.watchdog.finish)
        self.watchdog.start()


def own_cores(people: Sequence[Mapping[str, Any]], rank: int, usable: int) -> int:
    """A rank's share of the cores that it may run on, and of the time of ``usable`` that its container has."""
    machines = [str(one["process"]["machine"]) for one in people]
    mine, machine = people[rank]["cores"], machines[rank]
    sharing = [
        other
        for one, other in zip(people, machines, strict=True)
        if other.split()[0] == machine.split()[0] and not set(mine).isdisjoint(one["cores"])
    ]
    return max(1, min(len(mine) // len(sharing), usable // sharing.count(machine)))


_current: Membership | None = None
_meeting: Meeting | None = None
"""torch's groups do not keep it alive, and need it."""


def current() -> Membership | None:
    """The membership of this process, if it has joined."""
    return _current


def join(place: LaunchedRank | None, timeout: float) -> int:
    """Join the others; how many there are. ``place`` is None where only a process group of the user's own says so."""
    global _current, _meeting
    if _current is not None or place is None:
        return dist.get_world_size()
    hook = Hook(place)
    if place.watched:
        sys.excepthook = hook
    has_group = dist.is_initialized()
    choose_interface(os.environ, place.host)
    _meeting = Meeting.at(place, min(timeout, COME_WITHIN if place.watched else STORE_WITHIN))
    hook.member = member = Membership(place, timeout, _meeting)
    member.meet()
    if place.watched or has_group:
        member.start()  # before gloo connects: a rank that cannot, ends those that wait for it
    if not has_group:
        _connect(place, member, _meeting.store, timedelta(seconds=timeout + SLACK))
    _current = member
    return place.num_ranks


def _connect(place: LaunchedRank, member: Membership, store: Any, patience: timedelta) -> None:
    """Connect all ranks to each other by gloo."""
    os.environ.update(FEW_QUESTIONS)

    def make(key: str) -> None:
        own = _stores.PrefixStore(key, store)
        try:
            dist.init_process_group("gloo", store=own, rank=place.rank, world_size=place.num_ranks, timeout=patience)
        except RuntimeError as error:
            interface = os.environ.get(GLOO, "that this machine's name leads to")
            sentence = (
                f"rank {place.rank} cannot connect to the other ranks by the network interface {interface} "
                f"({reason(error)}); set launch.interface or {GLOO} to one that leads to {place.host}"
            )
            raise (UserError(sentence) if place.watched else PeerLost(sentence)) from None

    member.grouped(make, range(place.num_ranks))


class Hook:
    """The ``sys.excepthook`` of a rank: the others are told before anything is shown, and consequences are one line."""

    def __init__(self, place: LaunchedRank) -> None:
        self._place = place
        self._before = sys.excepthook
        self.member: Membership | None = None

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        rank = self._place.rank
        cause = self.member.watchdog.failed(error) if self.member else Cause.of(rank, error)
        if self._place.report_fd is not None:
            self._before(kind, error, trace)
        elif isinstance(error, PeerLost):
            if self.member:
                self.member.watchdog.say(cause)
            else:
                _to_stderr(f"rank {rank} ends because {error}")
        elif isinstance(error, UserError):
            if cause.rank == rank or cause.sentence != str(error):
                _to_stderr(error.sentence)
            sys.stdout.flush()
            if self.member:
                self.member.watchdog.finish()
            os._exit(2)
        else:
            self._before(kind, error, trace)


def _to_stderr(sentence: str) -> None:
    os.write(2, f"vpipe: {sentence}\n".encode())


def leave() -> None:
    """Forget the others: an elastic rank joins again, perhaps as another one. Its connections are shut already."""
    global _current, _meeting
    _current = None
    device_groups.forget()
    if dist.is_initialized():
        dist.destroy_process_group()
    if _meeting is not None and _meeting.kept is not None:
        _meeting.kept.stop()
    _meeting = None
    # A meeting that was broken off has counted a group. The next would have another name here than on other ranks, who
    # would wait for each other until the timeout.
    _stores.distributed_c10d._world.group_count = 0


def failed(error: BaseException) -> None:
    """Tell the other ranks that this one cannot go on; without other ranks, or where a launcher tells them, nothing."""
    if _current is not None and _current.is_watched:
        _current.watchdog.failed(error)
