"""Breaking a run on purpose, and the proof that it ended equal.

One run is left alone; others of the same config lose ranks at random moments: killed, stopped, now and then while the
run is still recovering from the loss before; and their layers are moved to other ranks, now and then with a rank killed
on the way. Each must end well, leave no process behind, and have written the same
bytes: every layer's weights, buffers and optimizer state, where it stands, and told the same: loss, rate, norm, tokens
of every iteration, evaluations, the summary.

The judge shares nothing with what it judges: it compares files by their bytes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from vpipe.errors import UserError
from vpipe.process import AS_MODULE
from vpipe.rundir import lineage, writing
from vpipe.rundir.layout import CHECKPOINTS, CREW, METRICS, RUN, SUMMARY
from vpipe.rundir.manifest import MANIFEST, checkpoints
from vpipe.rundir.roster import Roster, want_layout

MARK = "VPIPE_CHAOS"
"""A variable that all processes of a broken run carry, so that none can hide."""
POLL = 0.01
IMPATIENT = 0.15
"""Share of the blows that fall while the run still recovers from the one before."""
MOVE = "move"
"""The blow that hits no process: layers go elsewhere."""
Blow = signal.Signals | str
PATIENCE = 30.0
"""Seconds after which a move is asked for again."""
TOLD = ("train", "evaluation")
TIMED = {
    *("time", "seconds", "tokens_per_second", "throughput_tokens_per_second", "samples_per_second", "mfu"),
    *("total_time_seconds", "effective_time_seconds", "time_per_iteration_seconds"),
}
"""Figures of a clock: no two runs tell the same."""
TOTALS = ("total_iterations", "total_tokens", "effective_iterations", "effective_tokens", "warmup_iterations")
"""Of a run that goes on from another these count its own part."""
HANG = 600.0
"""Seconds without a new iteration or epoch that mean a hang."""


@dataclass
class ChaosResult:
    """What came of all runs."""

    runs: int = 0
    kills: int = 0
    stops: int = 0
    moves: int = 0
    recoveries: list[dict[str, float]] = field(default_factory=list)
    """Seconds of each part of every recovery that came to a step."""
    noticed: list[float] = field(default_factory=list)
    """Seconds from each blow to the moment when the launcher knew of it."""
    problems: list[str] = field(default_factory=list)
    hasty: bool = False
    """Whether the last blow fell during a recovery; no two in a row do, since a run that is lost again and again before
    it has done a step ends, as it should."""


@dataclass(frozen=True)
class Breaker:
    """``command`` is ``vpipe train …`` without its run directory; ``folder`` takes the runs. ``elastic`` is added where
    a run is broken: the one that is left alone is a plain one."""

    command: Sequence[str]
    elastic: Sequence[str]
    folder: Path
    replaces: bool = True
    """Whether a lost rank comes back; else none is hit where the run could not go on with fewer."""
    cuts: bool = True
    """Whether a move may change the partition; with an asynchronous schedule only ranks change places, since another
    partition has other weight versions."""
    say: Callable[[str], None] = lambda text: None

    def undisturbed(self) -> Path:
        """The run that the others are compared with."""
        directory = self.folder / "undisturbed"
        with self._started(directory, "undisturbed", ()) as run:
            code = run.wait()
        if code:
            log = (self.folder / "undisturbed.log").read_text(errors="replace").splitlines()
            raise UserError(f"the run fails without being broken: {log[-1] if log else f'exit code {code}'}")
        return directory

    def broken(self, number: int, blows: list[Blow], chance: random.Random, found: ChaosResult) -> Path:
        """One run that gets blows until it ends or there are none left; those that fell are taken off the list."""
        name = f"broken-{number}"
        directory = self.folder / name
        with self._started(directory, name, self.elastic) as run:
            sign, since = _sign(directory), time.monotonic()
            while run.poll() is None and blows:
                blow = blows[-1]
                if isinstance(blow, str):
                    self._move(directory, blows, chance, found)
                elif self._strike(directory, blow, chance, found):
                    blows.pop()
                sign, since = (sign, since) if sign == _sign(directory) else (_sign(directory), time.monotonic())
                if time.monotonic() - since > HANG:
                    break
                time.sleep(POLL)
            try:
                code = run.wait(HANG)
            except subprocess.TimeoutExpired:
                code = -1
                run.kill()
                found.problems.append(f"{name} hung; its output is in {self.folder / name}.log")
        found.runs += 1
        if code > 0:
            found.problems.append(f"{name} ended with exit code {code}; its output is in {self.folder / name}.log")
        found.problems += [f"{name} left process {pid} behind" for pid in self._left(name)]
        return directory

    def _strike(self, directory: Path, blow: signal.Signals, chance: random.Random, found: ChaosResult) -> bool:
        """Wait for the moment, then hit a rank; whether it was hit."""
        roster = Roster.read(directory)
        if roster is None or not roster.pids:
            return False
        if not roster.has_stepped and (found.hasty or chance.random() > IMPATIENT * POLL):
            return False
        if not self.replaces and len(roster.pids) <= roster.least:
            return False
        time.sleep(chance.random() ** 2 * 0.5)
        slot = chance.choice(sorted(roster.pids))
        try:
            os.kill(roster.pids[slot], blow)
        except ProcessLookupError:
            return False
        struck = time.monotonic()
        found.hasty = not roster.has_stepped
        self.say(f"{blow.name} to slot {slot} in epoch {roster.epoch}")
        if blow is signal.SIGKILL:
            found.kills += 1
        else:
            found.stops += 1
        while (now := Roster.read(directory)) is not None and now.pids.get(slot) == roster.pids[slot]:
            if time.monotonic() - struck > 60 or not psutil.pid_exists(roster.pids[slot]):
                break
            time.sleep(POLL)
        found.noticed.append(time.monotonic() - struck)
        return True

    def _move(self, directory: Path, blows: list[Blow], chance: random.Random, found: ChaosResult) -> None:
        """Ask for a random layout and wait until the layers are there; now and then a rank is killed meanwhile. What
        was not carried out, because a rank was lost, stays on the list."""
        roster, facts = Roster.read(directory), writing.read(directory / RUN)
        if roster is None or not roster.has_stepped or not facts:
            return
        counts, ranks = list(facts["partition"]), list(range(len(roster.ranks)))
        if self.cuts:
            ends = sorted(chance.sample(range(1, sum(counts)), len(counts) - 1))
            counts = [end - begin for begin, end in pairwise([0, *ends, sum(counts)])]
        chance.shuffle(ranks)
        before = _moved(directory)
        want_layout(directory, counts, ranks)
        self.say(f"layers per stage {counts} on ranks {ranks} in epoch {roster.epoch}")
        if (
            signal.SIGKILL in blows
            and chance.random() < IMPATIENT
            and self._strike(directory, signal.SIGKILL, chance, found)
        ):
            blows.remove(signal.SIGKILL)
        until = time.monotonic() + PATIENCE
        while _moved(directory) == before and (now := Roster.read(directory)) is not None:
            if (
                now.epoch != roster.epoch
                or time.monotonic() > until
                or not any(map(psutil.pid_exists, now.pids.values()))
            ):
                return
            time.sleep(POLL)
        found.moves += 1
        blows.pop()

    def _started(self, directory: Path, name: str, more: Sequence[str]) -> subprocess.Popen[bytes]:
        words = [sys.executable, AS_MODULE, "vpipe", *self.command, *more, "--output-dir", str(directory)]
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {MARK: f"{os.getpid()}-{name}"},
            )

    def _left(self, name: str) -> list[int]:
        """Processes that are still there a moment after the run has ended."""
        until = time.monotonic() + 5
        while (left := _marked(f"{os.getpid()}-{name}")) and time.monotonic() < until:
            time.sleep(0.05)
        return left


def _moved(directory: Path) -> int:
    """How often layers have moved."""
    with suppress(OSError):
        return (directory / METRICS).read_bytes().count(b'"action": "move"')
    return 0


def _sign(directory: Path) -> tuple[int, int]:
    """What changes while a run lives."""
    with suppress(OSError):
        return (directory / METRICS).stat().st_size, (directory / CREW).stat().st_mtime_ns
    return 0, 0


def _marked(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def differences(left: Path, right: Path) -> list[str]:
    """Where two finished runs differ, in words; empty where they are the same run."""
    first, second = (checkpoints(each / CHECKPOINTS) for each in (left, right))
    if not first or not second:
        return [f"{(right if first else left)} has no checkpoint to compare"]
    return [*_of_checkpoints(first[-1], second[-1]), *_of_what_is_told(left, right)]


def _of_checkpoints(left: Path, right: Path) -> Iterator[str]:
    stands = [json.loads((path / MANIFEST).read_text())["position"] for path in (left, right)]
    if stands[0] != stands[1]:
        yield f"{right} stands at {stands[1]}, not at {stands[0]}"
    names = [sorted(path.name for path in each.glob("layer-*.safetensors")) for each in (left, right)]
    if names[0] != names[1]:
        yield f"{right} has {len(names[1])} layers, not {len(names[0])}"
    for name in names[0]:
        other = right / name
        if other.exists() and (left / name).read_bytes() != other.read_bytes():
            yield f"{other} differs in {', '.join(_tensors(left / name, other)) or 'its form'}"


def _tensors(left: Path, right: Path) -> list[str]:
    """The names of the tensors that differ."""
    (first, some), (second, others) = _parsed(left), _parsed(right)
    return [name for name in first if name not in second or some[slice(*first[name])] != others[slice(*second[name])]]


def _parsed(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    return {name: facts["data_offsets"] for name, facts in header.items() if name != "__metadata__"}, data[8 + size :]


def _of_what_is_told(left: Path, right: Path) -> Iterator[str]:
    """The first figure of each kind that differs. The norm of an asynchronous run is that of rank 0's stages, which
    moves change."""
    entries = [lineage.current(each) for each in (left, right)]
    first, second = told(left), told(right)
    resumed = any(entry is not None and entry.line.ancestors for entry in entries)
    rank_0 = (writing.read(left / RUN) or {}).get("synchronous") is False
    seen = {("summary", name) for name in (*TOTALS, *TIMED) if resumed} | {
        ("train", "gradient_norm") for _ in range(rank_0)
    }
    for kind, iteration in sorted(first.keys() | second.keys()):
        ones, others = first.get((kind, iteration), {}), second.get((kind, iteration), {})
        for name in sorted(ones.keys() | others.keys()):
            if ones.get(name) != others.get(name) and (kind, name) not in seen:
                seen.add((kind, name))
                where = f"of iteration {iteration}" if iteration else "of the whole run"
                yield f"{right} tells {others.get(name)} as {name} {where} ({kind}), not {ones.get(name)}"


def told(directory: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """(train, evaluation or summary; iteration) → the figures that were told last, as a step that was run again has
    told its own twice. Of what a clock says only whether it says anything."""
    lines = [json.loads(line) for line in (directory / METRICS).read_text().splitlines()]
    found = {(str(line["kind"]), int(line["iteration"])): line for line in lines if line["kind"] in TOLD}
    summary = writing.read(directory / SUMMARY) or {}
    summary.pop("ranks_lost", None)
    ending = summary.pop("ending", None) or {}
    found["summary", 0] = {**summary, "run": None, "ending": ending.get("kind"), "sentence": ending.get("sentence")}
    return {key: {name: bool(x) if name in TIMED else x for name, x in line.items()} for key, line in found.items()}


def recoveries(directory: Path) -> list[dict[str, float]]:
    """Seconds of each part of the recoveries of a run."""
    lines = [json.loads(line) for line in (directory / METRICS).read_text().splitlines()]
    return [line["seconds"] for line in lines if line.get("kind") == "recovery"]
