"""The launcher of an elastic run: it notices a lost rank, interrupts the others, finds a replacement and leads them on.

    rank is killed ──▶ zygote reaps it ──▶ abort to the others ──▶ all ready ──▶ order: epoch, ranks
    rank is stopped ─▶ /proc says so ─▶ it is killed         └─ meanwhile a replacement is forked, or fewer go on

A rank that fails by an exception of its own ends the run as always: its error would come again. What is decided is in
``crew``; this class has the sockets, the streams and the memory of the copies.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from vpipe.launch.crew import MOST_IN_VAIN, Crew
from vpipe.launch.first_cause import IN_ORDER
from vpipe.launch.loop import Grace
from vpipe.launch.members import SHELVES, STOPPED_FOR, Member, MemberLaunch, make_shelves
from vpipe.launch.output import Output
from vpipe.launch.process import is_stopped, signal_name
from vpipe.rundir.crew import Roster, take_wanted

SILENT_FOR = 30.0
"""The same as ``STOPPED_FOR`` for a process that the kernel runs: on a busy machine a well one may be late."""
LEAVES_WITHIN = 10.0
"""Seconds in which a rank leaves an epoch that is over. One that waits where neither sockets nor signals reach (gloo,
for a connection that nobody will make) is well and never answers; a new process takes its place and its copies."""
RESCUE_WITHIN = 60.0
"""Seconds that the zygote gets to write what the copies of a broken run hold."""


@dataclass(frozen=True)
class Elastic:
    """How many ranks there may be. ``replaces``: a lost one is replaced by a new process of this machine."""

    least: int
    most: int
    by: int = 1
    replaces: bool = True
    directory: Path | None = None
    """Where those who look from outside are told who is in the run, and say how many they want."""
    rescue: str = ""
    """The function that saves what the copies hold when the run or its launcher is killed; empty saves nothing."""


class ElasticLaunch(MemberLaunch):
    """A run whose ranks come and go."""

    keeps_copies = True
    """Whether the memory of the copies is this process's."""

    def __init__(self, num_ranks: int, output: Output, grace: Grace, elastic: Elastic) -> None:
        super().__init__(num_ranks, output, grace)
        self._elastic = elastic
        self._crew = Crew(num_ranks, elastic.least, elastic.by)
        self._members: dict[int, Member] = {}
        self._released: set[int] = set()
        """Slots whose process was told to leave for good."""
        self._noticed = 0.0
        self._told: dict[int, float] = {}
        """Slot → when it was told to leave its epoch."""
        self._rescues = False
        self._shelves = make_shelves(elastic.most) if self.keeps_copies else []
        self._shared = [fd for pair in self._shelves for fd in pair]

    def start(self, spec: dict[str, Any], environment: dict[str, str], port: int = 0) -> None:
        self._rescues = bool(spec.get("rescue"))
        super().start(spec, environment, port)

    def _ended_in_order(self) -> bool:
        """Whether all ranks have ended by themselves, and saved what they wanted to save."""
        return self._verdict.all_ended and set(self._verdict.statuses.values()) <= {0, *IN_ORDER}

    def _variables(self) -> dict[str, str]:
        return {SHELVES: json.dumps(self._shelves)}

    def _streams(self, rank: int) -> list[int]:
        given = super()._streams(rank)
        self._crew.started(rank)
        self._count()
        return given

    def _shown_as(self, rank: int) -> int:
        return self._crew.ranks.get(rank, rank)

    def _heard(self, event: dict[str, Any]) -> None:
        if "started" in event:
            for slot, pid in enumerate(event["started"]):
                self._members[slot].pid = pid
            self._show()
        elif "forked" in event and int(event["forked"]) in self._members:
            self._members[int(event["forked"])].pid = int(event["pid"])
            self._show()
        super()._heard(event)

    def _show(self) -> None:
        """Tell those who look from outside."""
        crew, elastic = self._crew, self._elastic
        if elastic.directory is not None:
            pids = {slot: member.pid for slot, member in self._members.items() if member.pid}
            has_stepped = crew.epoch > 0 and crew.in_vain == 0 and not crew.lost
            limits = (elastic.least, elastic.most, crew.by, crew.wanted)
            with suppress(OSError):
                Roster(crew.epoch, *limits, has_stepped, pids, dict(crew.ranks)).write(elastic.directory)

    def _said(self, slot: int, message: dict[str, Any]) -> None:
        crew = self._crew
        if "stepped" in message:
            in_vain = crew.in_vain
            crew.stepped(int(message["stepped"]))
            if in_vain != crew.in_vain:
                self._show()
        if "finished" in message:
            crew.finished(slot, int(message["finished"]))
            if crew.all_finished:
                crew.is_over = True
                for each in self._members:
                    self._tell(each, {"leave": True})
        if message.get("lost") == crew.epoch and not crew.lost:
            self._output.say(f"vpipe: {message['sentence']}")
            self._interrupt(f"rank {crew.ranks.get(slot, slot)} lost a connection")
        if "ready" in message:
            crew.ready(slot)
            if crew.has_newcomers:
                self._interrupt(f"{crew.num_ranks} instead of {len(crew.ranks)} ranks")
            self._begin_if_all_are_ready()

    def _ended(self, rank: int, status: int) -> None:
        self._take_leave(rank, status)
        self._count()

    def _take_leave(self, rank: int, status: int) -> None:
        """A process has ended: as it should, by a failure of its own, or lost."""
        shown, was_rank = self._shown_as(rank), rank in self._crew.ranks
        done = self._crew.gone(rank) or status in (0, *IN_ORDER)
        self._drop(rank)
        if rank in self._released:
            self._released.discard(rank)
            self._fill()
            return
        # a replacement that the request to stop met before it could listen: the recovery needs another one
        deaf = bool(self._crew.lost) and self._stop_signal > 0 and status == -self._stop_signal
        ends = (self._stop_signal or self._verdict.ended_by_us) and not deaf
        if done or rank in self._verdict.reports or ends or status > 0:
            self._verdict.ended(rank, 0 if done and status < 0 else status)
            return
        why = f"rank {shown} {self._how(rank, status)}"
        if self._crew.in_vain >= MOST_IN_VAIN:
            self._output.say(f"vpipe: {MOST_IN_VAIN} times in a row no step was done before a rank was lost")
            self._verdict.ended(rank, status)
            return
        if was_rank or not self._crew.ranks:
            self._interrupt(why)
        if self._elastic.replaces:
            self._fill()
        if not self._elastic.replaces or not self._free_slots():
            self._crew.wanted = min(self._crew.wanted, self._num_living)
        if self._crew.num_ranks < self._crew.least:
            self._output.say(
                f"vpipe: {self._num_living} ranks are left, fewer than {self._crew.least} (launch.elastic)"
            )
            self._verdict.ended(rank, status)
            return
        self._begin_if_all_are_ready()

    def _how(self, slot: int, status: int) -> str:
        """How a process was lost, in words."""
        del slot
        return f"was killed by {signal_name(-status)}"

    def _count(self) -> None:
        """The run has ended when nobody is left."""
        self._verdict.num_ranks = len(self._members) + len(self._verdict.statuses)

    @property
    def _num_living(self) -> int:
        """Processes that are there to stay."""
        return len(self._members.keys() - self._released - self._crew.unwelcome)

    def _fill(self) -> None:
        """As many processes as are wanted, in the first slots that are free."""
        for slot in self._free_slots():
            if self._num_living < self._crew.wanted:
                self._fork(slot)

    def _free_slots(self) -> list[int]:
        return [slot for slot in range(self._elastic.most) if slot not in self._members]

    def _resize(self, wanted: int) -> None:
        """The user wants another number of ranks."""
        crew = self._crew
        if not self._elastic.least <= wanted <= self._elastic.most or wanted % crew.by:
            return
        before, crew.wanted = len(crew.ranks), wanted
        self._fill()
        if wanted < before:
            self._interrupt(f"{wanted} instead of {before} ranks")
        self._begin_if_all_are_ready()

    def _interrupt(self, why: str) -> None:
        if not self._crew.lost:
            self._noticed = monotonic()
        epoch = self._crew.epoch
        for slot in self._crew.interrupt(why):
            self._tell(slot, {"abort": epoch})
            self._told[slot] = monotonic()

    def _begin_if_all_are_ready(self) -> None:
        crew = self._crew
        if not crew.can_begin or (self._verdict.ended_by_us and not self._stop_signal):
            return  # who is asked to stop during a recovery ends it first: there is an update to save
        facts = {"since": monotonic() - self._noticed} if crew.lost else {}
        orders = crew.begin()
        seats = self._seats(list(orders))
        for slot, order in orders.items():
            self._tell(slot, order | facts | seats.get(slot, {}))
        for slot in crew.superfluous:
            self._released.add(slot)
            crew.gone(slot)
            self._tell(slot, {"leave": True})
        self._show()

    def _seats(self, slots: list[int]) -> dict[int, dict[str, Any]]:
        """What the order of a slot says besides: where the others are. ``slots`` are in the order of their ranks."""
        del slots
        return {}

    def _judge(self, now: float) -> None:
        directory = self._elastic.directory if self._can_fork() else None
        if directory is not None and (wanted := take_wanted(directory)) is not None:
            if wanted.num_ranks and not self._crew.is_over:
                self._resize(wanted.num_ranks)
            if wanted.without and not self._crew.is_over:
                self._give_back(wanted.without)
            for slot in [slot for slot, rank in self._crew.ranks.items() if rank == 0 and wanted.wish]:
                self._tell(slot, {"wish": wanted.wish})
        for slot, member in list(self._members.items()):
            silent = now - member.seen
            stopped = silent > STOPPED_FOR and self._seems_stopped(member)
            if stopped or silent > max(SILENT_FOR, 3 * member.longest):
                self._end_silent(slot, f"{'is stopped' if stopped else 'gives no sign'} for {silent:.1f} s")
            elif self._crew.is_leaving(slot) and now - self._told[slot] > LEAVES_WITHIN:
                self._end_silent(slot, f"has not left what it waits for within {LEAVES_WITHIN:g} s")
                self._told[slot] = now
        super()._judge(now)

    def _can_fork(self) -> bool:
        """Whether the zygote takes orders: it reads its spec first, and what is wanted before waits."""
        return self._begun

    def _give_back(self, machines: Sequence[str]) -> None:
        """Somebody outside wants to have machines back."""
        self._output.say(f"vpipe: {', '.join(machines)} cannot be given back: all ranks are on this machine")

    def _seems_stopped(self, member: Member) -> bool:
        return bool(member.pid) and is_stopped(member.pid)

    def _end_silent(self, slot: int, how: str) -> None:
        """A process that cannot answer is as good as lost."""
        if slot in self._members and not self._verdict.ended_by_us:
            self._output.say(f"vpipe: rank {self._shown_as(slot)} {how}; it is ended")
            self._members[slot].seen = monotonic()
            self._tell_zygote({"kill": slot})

    def close(self) -> None:
        """A run that did not end in order leaves what its copies hold on the disk, where that is asked for."""
        if not self._rescues or self._zygote is None or self._ended_in_order():
            self._tell_zygote({"rescue": ""})
        else:
            self._control.close()
            with suppress(subprocess.TimeoutExpired):
                self._zygote.wait(RESCUE_WITHIN)
        super().close()
        for member in self._members.values():
            if member.connection is not None:
                member.connection.close()
        for fd in self._shared:
            os.close(fd)
