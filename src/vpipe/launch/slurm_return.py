"""How a SLURM job comes back whose first node is lost, and with it the launcher of an elastic run.

The nodes that are left have ended their ranks, because their lease was over, and cannot know why they are not led: the
launcher may train on behind a cut network. SLURM knows. A node waits for its word and asks for nothing else:

    lease over ─▶ ranks end ─▶ SLURM: the first node is down? ─▶ copies of all nodes become a checkpoint ─▶ requeue
                                └─ the job has ended, or was queued again by another node: nothing is left to do

Several nodes may ask for the requeue: slurmctld takes one of them and ends every step of the job with it, so there are
never two that train.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from vpipe.errors import UserError
from vpipe.launch import environment
from vpipe.launch.environment import Ask

POLL = 2.0
"""Seconds between two questions to slurmctld."""
SAVED_WITHIN = 60.0
"""Seconds that a node waits for the copies of the others, before the job is queued again without them."""


@dataclass(frozen=True)
class LostJob:
    """This life of the job that this process is in, and the node where its launcher was."""

    job: str
    life: str
    """How often it was queued again before."""
    first: str

    @classmethod
    def here(cls, first: str, environ: Mapping[str, str]) -> LostJob:
        return cls(environ["SLURM_JOB_ID"], environ.get("SLURM_RESTART_COUNT", "0"), first)

    def come_back(self, save: Callable[[], bool], ask: Ask = environment.run) -> None:
        """Wait until SLURM says what has become of the first node; where it is lost, ``save`` until that is done, and
        queue the job again."""
        while (is_lost := self._is_lost(ask)) is None:
            sleep(POLL)
        if not is_lost:
            return
        until = monotonic() + SAVED_WITHIN
        while not save() and monotonic() < until:
            sleep(POLL)
        self._queue_again(ask)

    def _facts(self, ask: Ask) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", ask(["scontrol", "--oneliner", "show", "job", self.job])))

    def _is_lost(self, ask: Ask) -> bool | None:
        """Whether SLURM has given the first node up; ``None`` while it has not, and ``False`` where this life of the
        job is over."""
        try:
            facts = self._facts(ask)
            if not self._lives(facts):
                return False
            if self.first not in ask(["scontrol", "show", "hostnames", facts["NodeList"]]).split():
                return True
            state = re.search(r" State=(\w+)", ask(["scontrol", "--oneliner", "show", "node", self.first]))
            return True if state and state[1] == "DOWN" else None
        except (UserError, KeyError):
            return None  # slurmctld may be away for a while

    def _lives(self, facts: Mapping[str, str]) -> bool:
        return facts.get("JobState") == "RUNNING" and facts.get("Restarts") == self.life and facts.get("Requeue") == "1"

    def _queue_again(self, ask: Ask) -> None:
        with suppress(UserError):  # another node was first
            facts = self._facts(ask)
            if not self._lives(facts):
                return
            with suppress(OSError, KeyError), Path(facts["StdOut"]).open("a") as output:
                output.write(
                    f"vpipe: {self.first}, where the launcher was, is lost: the job goes back into the queue\n"
                )
            ask(["scontrol", "requeue", self.job])
