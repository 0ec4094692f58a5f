"""The launcher of every run: it starts the ranks, shows one output, notices what is lost, and says how the run ended.

    rank is killed ──▶ ended ─┬─ a run of fixed ranks: all others are ended, the first cause is told
    rank is stopped ─▶ killed │
    machine is lost ─▶ ended ─┴─ an elastic run: abort to the others ──▶ all ready ──▶ order: epoch, ranks
                                                   └─ meanwhile a replacement is started, or fewer go on

A run of fixed ranks is an elastic one that may lose none. A rank that fails by an exception of its own ends the run in
any case: its error would come again. Where processes live is a ``RankPlace``'s affair; ``epochs`` decides who trains
with whom.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from vpipe.errors import on_one_line, printable
from vpipe.launch.epochs import MOST_IN_VAIN, MOST_LOSSES, REST, Crew, Elastic, Member
from vpipe.launch.events import EventLoop
from vpipe.launch.first_cause import IN_ORDER, Report, Verdict
from vpipe.launch.output import Output
from vpipe.launch.place import RankPlace
from vpipe.launch.process import signal_name
from vpipe.launch.stopping import Grace, Stopping
from vpipe.rundir.journal import Ending, EndingKind
from vpipe.rundir.roster import Roster, take_wanted

FAILURE_GRACE = 3.0
"""Seconds that the other ranks get after one has failed."""
CAUSE_PATIENCE = 5.0
"""Seconds to wait for the real cause when a rank has only lost another one."""
SILENT_FOR = 30.0
"""Seconds without a sign after which a rank that is led is taken for lost: on a busy machine a well one may be late."""
LEAVES_WITHIN = 10.0
"""Seconds in which a rank leaves an epoch that is over. One that waits where neither sockets nor signals reach (gloo,
for a connection that nobody will make) is well and never answers; a new process takes its place and its copies."""
RESCUE_WITHIN = 60.0
"""Seconds for writing what the copies of a broken run hold."""


class Launcher:
    """One run: its processes, what is known of their ends, and who goes on."""

    def __init__(self, num_ranks: int, output: Output, grace: Grace | float, elastic: Elastic | None = None) -> None:
        self.events = EventLoop()
        self.place: RankPlace
        self.ending: Ending | None = None
        """How it ended, where the ranks could not say so themselves."""
        self._num_ranks, self._output = num_ranks, output
        self._stopping = Stopping(grace if isinstance(grace, Grace) else Grace(lambda: grace))
        self._elastic = elastic or Elastic(num_ranks, num_ranks, leads=False)
        self._crew = Crew(num_ranks, self._elastic.least, self._elastic.by)
        self._members: dict[int, Member] = {}
        self._released: set[int] = set()
        """Slots whose process was told to leave for good."""
        self._verdict = Verdict(0)
        self._noticed = 0.0
        """When the loss was noticed that the ranks are recovering from."""
        self._begun = self._has_saved = False
        self._judge_at = float("inf")
        self._broken: str | None = None
        self._code: int | None = None

    def run(self, spec: dict[str, Any], concluded: Callable[[Ending], str] | None = None) -> int:
        """Start the ranks and lead them to their end; the exit code. ``concluded`` is told an ending that the ranks
        could not tell, and returns what else to say."""
        try:
            self.place.start(spec)
            with self.events.hearing(self.asked):
                for slot in range(self._num_ranks):
                    self._fork(slot)
                code = self._loop()
        finally:
            if self._owes_copies():
                self._save_copies()
            self.place.close()
            self.events.close()
        if self.ending is not None and concluded is not None and (remark := concluded(self.ending)):
            self.noted(remark)
        return code

    def _loop(self) -> int:
        try:
            while not self._verdict.all_ended and not self._broken:
                self._turn()
            self.place.drain()
        except BrokenPipeError:
            return 141
        self._output.finish()
        if self._owes_copies():
            self._save_copies()
        return self._conclude()

    def _turn(self) -> None:
        self.events.turn(min(self._stopping.kill_at, self._judge_at) - monotonic())
        now = monotonic()
        self.place.look(now)
        if now >= self._stopping.kill_at:
            if self._stopping.is_over(now):
                self.place.signal(signal.SIGKILL)
            elif self._stopping.num_extensions == 1:
                self.noted("the ranks are still saving, and are waited for; a second signal ends them at once")
        if self._elastic.leads:
            self._heed_wishes()
            self._look_for_silent(now)
            self._begin_if_all_are_ready()
        self._judge(now)

    # --- what the place tells -----------------------------------------------------------------------------------------

    def forked(self, slot: int, pid: int) -> None:
        self._begun = True
        if slot in self._members:
            self._members[slot].pid = pid
            self._show()

    def printed(self, slot: int, number: int, data: bytes) -> None:
        self._output.feed(slot, number, data, self._shown_as(slot))

    def noted(self, sentence: str) -> None:
        self._output.say(f"vpipe: {sentence}")

    def reported(self, slot: int, message: dict[str, Any]) -> None:
        report = Report(**message)
        self._verdict.report(report)
        self._output.log(slot, report.traceback.encode(errors="replace"))

    def broken(self, sentence: str, code: int | None = None) -> None:
        if not self._broken:
            self._broken, self._code = sentence, code

    def stopped(self, slot: int, seconds: float) -> None:
        self._end_silent(slot, f"is stopped for {seconds:.1f} s")

    def said(self, slot: int, message: dict[str, Any]) -> None:
        crew, member = self._crew, self._members.get(slot)
        if member is None:
            return
        now = monotonic()
        member.longest, member.seen = max(member.longest, now - member.seen), now
        if "stepped" in message:
            in_vain = crew.in_vain
            crew.stepped(int(message["stepped"]))
            if in_vain != crew.in_vain:
                self._show()
        if "finished" in message:
            crew.finished(slot, int(message["finished"]))
            if crew.all_finished:
                crew.is_over = True
                for other in self._members:
                    self.place.tell(other, {"leave": True})
        if message.get("lost") == crew.epoch and not crew.lost:
            if crew.in_vain >= MOST_IN_VAIN:
                self.broken(f"{MOST_IN_VAIN} times in a row no step was done: {message['sentence']}")
                return
            self.noted(str(message["sentence"]))
            self._interrupt(f"rank {self._shown_as(slot)} lost a connection")
        if "ready" in message:
            crew.ready(slot)
            if crew.has_newcomers:
                self._interrupt(f"{crew.num_ranks} instead of {len(crew.ranks)} ranks")
            self._begin_if_all_are_ready()

    def ended(self, slot: int, status: int, how: str = "") -> None:
        """A process has ended: as it should, by a failure of its own, or lost."""
        shown, was_rank = self._shown_as(slot), slot in self._crew.ranks
        done = self._crew.gone(slot) or status in (0, *IN_ORDER)
        self._members.pop(slot, None)
        # a replacement that the request to stop met before it could listen: the recovery needs another one
        deaf = bool(self._crew.lost) and self._stopping.signum > 0 and status == -self._stopping.signum
        is_last = (self._stopping.signum or self._verdict.ended_by_us) and not deaf
        if slot in self._released:
            self._released.discard(slot)
            self._fill()
        elif not self._elastic.leads or done or slot in self._verdict.reports or is_last or status > 0:
            self._verdict.ended(slot, 0 if self._elastic.leads and done and status < 0 else status, how)
        elif self._crew.in_vain >= MOST_IN_VAIN:
            self.noted(f"{MOST_IN_VAIN} times in a row no step was done before a rank was lost")
            self._verdict.ended(slot, status, how)
        else:
            self._crew.lose(slot, monotonic())
            if was_rank or not self._crew.ranks:
                self._interrupt(f"rank {shown} {how or f'was killed by {signal_name(-status)}'}")
            self._go_on_without(slot, status, how)
        self._count()

    # --- who trains with whom -----------------------------------------------------------------------------------------

    def _go_on_without(self, slot: int, status: int, how: str) -> None:
        """A process was lost: another one takes its place, or fewer go on, or it was one too many."""
        crew = self._crew
        if self._elastic.replaces:
            self._fill()
        if slot not in self._members and crew.is_tired(slot, monotonic()):
            self.noted(
                f"the place of rank {self._shown_as(slot)} was lost {MOST_LOSSES} times within {REST:g} s and rests: "
                "another takes its part, or fewer go on; 'vpipe scale' asks for more"
            )
        if not self._elastic.replaces or not self._free_slots():
            crew.wanted = min(crew.wanted, self._num_living)
        if crew.num_ranks < crew.least:
            self.noted(f"{self._num_living} ranks are left, fewer than {crew.least} (launch.elastic)")
            self._verdict.ended(slot, status, how)
        else:
            self._begin_if_all_are_ready()

    def _fork(self, slot: int) -> None:
        self._members[slot] = Member()
        self._crew.started(slot)
        self._count()
        self.place.fork(slot)

    def _fill(self) -> None:
        """Start as many processes as are wanted, in the first slots that are free."""
        while self._num_living < self._crew.wanted and (free := self._free_slots()):
            self._fork(free[0])

    def _free_slots(self) -> list[int]:
        """Where a process may be started, first those that were not lost again and again."""
        tired = [self._crew.is_tired(slot, monotonic()) for slot in range(self._elastic.most)]
        free = [slot for slot in range(len(tired)) if slot not in self._members and self.place.has_room(slot)]
        if self._elastic.rests and self._num_living >= self._crew.least:
            return [slot for slot in free if not tired[slot]]
        return sorted(free, key=tired.__getitem__)

    @property
    def _num_living(self) -> int:
        """Processes that are there to stay."""
        return len(self._members.keys() - self._released - self._crew.unwelcome)

    def _count(self) -> None:
        """The run has ended when no process is left."""
        self._verdict.num_ranks = len(self._members) + len(self._verdict.statuses)

    def _shown_as(self, slot: int) -> int:
        """The number under which lines of a slot appear."""
        return self._crew.ranks.get(slot, slot)

    def _interrupt(self, why: str) -> None:
        now = monotonic()
        if not self._crew.lost:
            self._noticed = now
        epoch = self._crew.epoch
        for slot in self._crew.interrupt(why):
            self.place.tell(slot, {"abort": epoch})
            if slot in self._members:
                self._members[slot].aborted_at = now

    def _begin_if_all_are_ready(self) -> None:
        crew = self._crew
        if not crew.can_begin or not self.place.is_clear(monotonic()):
            return
        if self._verdict.ended_by_us and not self._stopping.signum:
            return  # a run that is asked to stop during a recovery ends it first: there is an update to save
        facts = {"since": monotonic() - self._noticed} if crew.lost else {}
        orders = crew.begin()
        seats = self.place.seats(list(orders))
        for slot, order in orders.items():
            self.place.tell(slot, order | facts | seats.get(slot, {}))
        for slot in crew.superfluous:
            self._released.add(slot)
            crew.gone(slot)
            self.place.tell(slot, {"leave": True})
        self._show()

    def _show(self) -> None:
        """Tell those who look from outside."""
        crew, elastic = self._crew, self._elastic
        if elastic.directory is not None:
            pids = {slot: member.pid for slot, member in self._members.items() if member.pid}
            has_stepped = crew.epoch > 0 and crew.in_vain == 0 and not crew.lost
            limits = (elastic.least, elastic.most, crew.by, crew.wanted)
            with suppress(OSError):
                Roster(crew.epoch, *limits, has_stepped, pids, dict(crew.ranks)).write(elastic.directory)

    def _heed_wishes(self) -> None:
        """What those who look from outside want."""
        directory = self._elastic.directory
        wanted = take_wanted(directory) if directory is not None else None
        if wanted is None:
            return
        if wanted.problem:
            self.noted(f"{wanted.problem}; the run goes on as it is")
        if wanted.num_ranks and not self._crew.is_over:
            self._resize(wanted.num_ranks)
        if wanted.without and not self._crew.is_over:
            self._give_back(wanted.without)
        for slot in [slot for slot, rank in self._crew.ranks.items() if rank == 0 and wanted.wish]:
            self.place.tell(slot, {"wish": wanted.wish})

    def _resize(self, wanted: int) -> None:
        """The user wants another number of ranks."""
        crew, least, most = self._crew, self._elastic.least, self._elastic.most
        if not least <= wanted <= most or wanted % crew.by:
            by = f", by {crew.by}" if crew.by > 1 else ""
            self.noted(f"{wanted} ranks cannot be had: launch.elastic is {least}:{most}{by}")
            return
        before, crew.wanted = len(crew.ranks), wanted
        crew.lost_at.clear()
        self._fill()
        if wanted < before:
            self._interrupt(f"{wanted} instead of {before} ranks")
        self._begin_if_all_are_ready()

    def _give_back(self, machines: Sequence[str]) -> None:
        """The ranks of these machines go to spare slots, or the others go on without them."""
        crew = self._crew
        given = self.place.give_back(machines, crew.least, crew.by)
        if isinstance(given, str):
            self.noted(f"{', '.join(machines)} cannot be given back: {given}")
            return
        slots, room = given
        crew.unwelcome.update(slots)
        crew.wanted = min(crew.wanted, room)
        self._fill()
        if crew.unwelcome & self._members.keys():
            self._interrupt(f"{', '.join(machines)} is given back")
        self._begin_if_all_are_ready()

    # --- what is silent, or must end ----------------------------------------------------------------------------------

    def _look_for_silent(self, now: float) -> None:
        for slot, member in list(self._members.items()):
            silent = now - member.seen
            if silent > max(SILENT_FOR, 3 * member.longest):
                self._end_silent(slot, f"gives no sign for {silent:.1f} s")
            elif self._crew.is_leaving(slot) and now - member.aborted_at > LEAVES_WITHIN:
                self._end_silent(slot, f"has not left what it waits for within {LEAVES_WITHIN:g} s")
                member.aborted_at = now

    def _end_silent(self, slot: int, how: str) -> None:
        """A process that cannot answer is as good as lost."""
        if slot in self._members and not self._verdict.ended_by_us:
            self.noted(f"rank {self._shown_as(slot)} {how}; it is ended")
            self._members[slot].seen = monotonic()
            self.place.signal(signal.SIGKILL, slot)

    def _judge(self, now: float) -> None:
        """End everything where a rank has failed, once it is known which one was the first."""
        if self._verdict.failed and not self._stopping.signum and not self._verdict.ended_by_us:
            if self._verdict.settled or now >= self._judge_at:
                self._end(signal.SIGTERM, FAILURE_GRACE)
            elif self._judge_at == float("inf"):
                self._judge_at = now + CAUSE_PATIENCE

    def _end(self, signum: int, grace: float) -> None:
        self._verdict.ended_by_us = True
        self._judge_at = float("inf")
        self._stopping.kill_at = monotonic() + grace
        self.place.signal(signum)

    def asked(self, signum: int) -> None:
        """The user or a cluster wants the ranks to save and leave, or to stop: once in good order, twice at once."""
        if signum == signal.SIGUSR1:
            self.place.signal(signum)
        elif (patience := self._stopping.asked(signum)) is not None:
            again = "; Ctrl-C again ends them at once" if signum == signal.SIGINT else ""
            self.noted(f"stopping {self._num_ranks} ranks, at most {patience:.3g} s{again}")
            self._end(signum, patience)

    def _owes_copies(self) -> bool:
        """Whether what the copies hold must be written: the run did not end in order, which may be asked once."""
        in_order = self._verdict.all_ended and set(self._verdict.statuses.values()) <= {0, *IN_ORDER}
        owes = self._elastic.saves and self._crew.epoch > 0 and not in_order and not self._has_saved
        self._has_saved = True
        return owes

    def _save_copies(self) -> None:
        """A second request to stop ends it."""
        self.events.wait(self.place.save(), RESCUE_WITHIN, lambda: self._stopping.kill_at > 0)

    def _conclude(self) -> int:
        """Say how the run ended; the exit code."""
        if self._stopping.signum:
            code, self.ending = self._stopping.ending(self._verdict, self._begun)
            if self.ending is not None and self._stopping.out_of_patience:
                self.noted(self.ending.sentence)
            return code
        if self._verdict.failed:
            for line in self._verdict.lines():
                self._output.say(line)
            self.ending = self._verdict.ending()
        elif self._broken:
            lines = [printable(line) for line in self._broken.splitlines()]
            self.noted("\n  ".join(lines))
            self.ending = Ending.of(EndingKind.FAILED, on_one_line("\n".join(lines)), self._code)
            return self.ending.code
        return self._verdict.exit_code()
