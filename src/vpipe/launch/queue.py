"""Talking to SLURM: hand in a script, watch the job, cancel it.

``scontrol`` is asked, not ``sacct``: small clusters have no accounting. ``sbatch --wait`` polls slowly and is silent;
here the state is asked every second and the output file is read along.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vpipe.errors import UserError
from vpipe.launch.environment import Ask, run

GOING_ON = frozenset(
    {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
    | {"REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
)
"""States after which others follow."""
_IMPOSSIBLE = "Requested node configuration is not available"
_UNKNOWN = "Invalid job id"
"""SLURM's words for a job that it does not know; whatever else it says is about itself."""


@dataclass(frozen=True)
class QueuedJob:
    """A job, or one run of a job array, as SLURM describes it."""

    label: str
    """``12``, or ``12_3`` in an array."""
    state: str
    reason: str
    output: str
    exit_code: int

    @property
    def ended(self) -> bool:
        return self.state not in GOING_ON


def submit(script: str) -> int:
    """Hand in a job script; the number of the job. What no node can ever give is refused: SLURM would let it wait."""
    if _IMPOSSIBLE in _sbatch("--test-only", script).stderr:
        raise UserError(
            "SLURM has no such nodes as the job asks for (how many; cores, memory, gres of each): the job would wait "
            "for ever; 'sinfo -o \"%P %D nodes, %c cores, %m MB, %G\"' lists what there is"
        )
    done = _sbatch("--parsable", script)
    match = re.match(r"\d+", done.stdout)
    if done.returncode or match is None:
        raise UserError(f"sbatch refused the job: {done.stderr.strip() or done.stdout.strip()}")
    return int(match[0])


def _sbatch(option: str, script: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["sbatch", option], input=script, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        raise UserError(
            "sbatch is not on this machine: submit from a login node of the cluster, or see the script with --dry-run"
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError("sbatch did not answer within 60 s; is SLURM's controller up? 'vpipe doctor' asks it") from None


def cancel(job: int) -> None:
    """End a job and all its tasks."""
    run(["scancel", str(job)])


def tasks(job: int, ask: Ask = run) -> list[QueuedJob]:
    """What SLURM says about a job now."""
    return [
        _task(line) for line in ask(["scontrol", "--oneliner", "show", "job", str(job)]).splitlines() if line.strip()
    ]


def _task(line: str) -> QueuedJob:
    array, index = _field(line, "ArrayJobId"), _field(line, "ArrayTaskId")
    label = f"{array}_{index}" if array else _field(line, "JobId")
    code, _, signum = (_field(line, "ExitCode") or "0:0").partition(":")
    status = int(code) or (128 + int(signum) if int(signum or 0) else 0)
    return QueuedJob(label, _field(line, "JobState"), _field(line, "Reason"), _field(line, "StdOut"), status)


def _field(line: str, name: str) -> str:
    """A value of ``Name=value Name=value``; values may hold spaces, names begin with a capital."""
    match = re.search(rf"(?:^| ){name}=(.*?)(?= [A-Z][A-Za-z/:]*=|\s*$)", line)
    return match[1] if match else ""


class Follower:
    """Watches a job until it has ended; gives what it writes, line by line."""

    def __init__(
        self, job: int, ask: Ask = run, pause: float = 1.0, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._job, self._ask, self._pause, self._sleep = job, ask, pause, sleep
        self._seen: dict[str, QueuedJob] = {}
        self._read: dict[str, int] = {}
        self._last: list[QueuedJob] = []
        self._is_silent = False

    def lines(self) -> Iterator[str]:
        """State changes and output, as they come."""
        while True:
            was_silent = self._is_silent
            current = self._last = self._current()
            if self._is_silent and not was_silent:
                yield f"vpipe: SLURM does not answer; job {self._job} is followed again when it does"
            for task in current:
                yield from self._news(task, several=len(current) > 1)
            if all(task.ended for task in current):
                return
            self._sleep(self._pause)

    @property
    def exit_code(self) -> int:
        """0 where all completed, else the first other code."""
        failed = [task for task in self._last if task.state != "COMPLETED"]
        return next((task.exit_code for task in failed if task.exit_code), 1) if failed else 0

    def _current(self) -> list[QueuedJob]:
        self._is_silent = False
        try:
            return tasks(self._job, self._ask)
        except UserError as error:
            if not self._last:
                raise
            self._is_silent = _UNKNOWN not in str(error)
            if self._is_silent:
                return self._last
            return [  # SLURM forgets ended jobs after a while
                task if task.ended else QueuedJob(task.label, "FORGOTTEN", "", task.output, task.exit_code)
                for task in self._last
            ]

    def _news(self, task: QueuedJob, several: bool) -> Iterator[str]:
        before = self._seen.get(task.label)
        tag = f"[{task.label}] " if several else ""
        if task.ended:
            yield from (tag + line for line in self._written(task.output, to_the_end=True))
        if before is None or before.state != task.state:
            because = f" ({task.reason})" if task.reason not in ("", "None") else ""
            yield f"vpipe: job {task.label} is {task.state}{because}"
        self._seen[task.label] = task
        if not task.ended:
            yield from (tag + line for line in self._written(task.output, to_the_end=False))

    def _written(self, output: str, to_the_end: bool) -> list[str]:
        """What was written since the last look: whole lines, at the end also half a one."""
        try:
            with Path(output).open("rb") as file:
                file.seek(self._read.get(output, 0))
                data = file.read()
        except OSError:
            return []
        whole = len(data) if to_the_end else data.rfind(b"\n") + 1
        self._read[output] = self._read.get(output, 0) + whole
        return data[:whole].decode(errors="replace").splitlines()
