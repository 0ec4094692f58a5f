"""``vpipe doctor --gpu``: whether this machine's accelerators train what the CPU trains, and what to send back.

No GPU was at hand where vpipe was written. Every trial (``proof.trials``) runs in processes of its own, by the devices'
own backend, as users' ranks do; one that does not end in time is stopped, is told, and the next begins. Groups of few
ranks run side by side, on other devices.

    bouts   one after the other: the ways, the messages, what makes devices wait, ranks that die, then the matrix
            (schedule × ranks × model), in rounds of which each has all schedules and all models
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any, NamedTuple

from vpipe.errors import UserError
from vpipe.launch.doctor import OFFERED, lines_of
from vpipe.launch.environment import VENDORS
from vpipe.process import AS_MODULE, num_cores
from vpipe.runtime.device import DEVICES, to_have_one
from vpipe.schedule import catalog

LIMIT = 60.0
"""Seconds that a trial may take, or processes to start."""
ENDS = 30.0
"""Seconds in which ranks must end after one of them has died."""
POLL, MOST = 0.05, 400
"""Seconds between two looks at what is told, and letters of what processes have said."""
TRIALS, MEMORY = "vpipe.train.proof.trials", "out of memory"
MODELS = ("chain", "two tensors", "two-tensor skip", "translation", "tied", "bfloat16", "dropout", "swap")
SOUND = {"equal", "near", "refused", "kept", "all work", "measured", "ended"}
"""Verdicts that are no fault."""
STEADY = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Without it cuBLAS may choose another kernel from one call to the next, and sound code would read as different."""
JOB = """
model: {{name: gpt, hidden_size: {width}, num_layers: 4, num_heads: 2, sequence_length: 8, extra: {{dropout: 0.1}}}}
dataset: {{name: synthetic, batch_size: 8}}
training: {{num_microbatches: 4, max_iterations: 12, evaluation_interval: -1}}
parallel: {{model_parallel_size: {ranks}, scheduler: 1f1b, device: {device}}}
observe: {{trace: false}}
launch: {{threads: 1}}
"""


class TrialResult(NamedTuple):
    """What came of a trial."""

    name: str
    verdict: str
    detail: str
    seconds: float

    @property
    def sound(self) -> bool:
        return self.verdict in SOUND


@dataclass(frozen=True)
class Bout:
    """Trials that share their processes, as long as none of them fails."""

    ranks: int
    trials: Sequence[Mapping[str, Any]]
    environment: Mapping[str, str] = field(default_factory=dict)


class TrialPlan(NamedTuple):
    """What is tried on which machine."""

    kind: str
    devices: int
    width: int
    limit: float

    def trial(self, kind: str, name: str, ranks: int, **more: Any) -> dict[str, Any]:
        base = {"kind": kind, "name": name, "ranks": ranks, "device": self.kind, "width": self.width}
        return base | {"limit": self.limit * 2 / 3, "schedule": "1f1b", "model": "chain"} | more

    def equal(self, ranks: int, schedule: str, model: str, what: str = "", **more: Any) -> dict[str, Any]:
        name = f"{ranks} ranks, {schedule}, {model}{what and ', ' + what}"
        return self.trial("equal", name, ranks, schedule=schedule, model=model, **more)

    def first(self) -> Iterator[Bout]:
        """What is tried beside the matrix."""
        most = max(p for p in (2, 4, 8) if p <= self.devices)
        yield Bout(1, [self.trial("reach", "the ways between devices", 1)])
        yield Bout(2, [self.trial("messages", "messages of every kind", 2)])
        yield Bout(2, [self.trial("posted", "products under posted receives", 2)])
        some = [self.equal(most, schedule, "chain", "") for schedule in ("1f1b", "zb-v", "pipedream")]
        variants = {
            "launches wait": dict.fromkeys(("CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING"), "1"),
            "one connection": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            "kernels loaded lazily": {"CUDA_MODULE_LOADING": "LAZY"},
            "kernels loaded at once": {"CUDA_MODULE_LOADING": "EAGER"},
        }
        for what, variables in variants.items():
            yield Bout(most, [{**trial, "name": f"{trial['name']}, {what}"} for trial in some], variables)
        yield Bout(most, [self.equal(most, "1f1b", "chain", "memory at 95 %", fill=0.95)])
        yield Bout(most, [self.equal(most, "1f1b", "chain", "40 checkpoints, then a move", checkpoints=40)])
        for how, name in (("signal", "a rank is killed in a step"), ("memory", "a device without memory")):
            yield Bout(2, [self.trial("killed", name, 2, how=how)])
        yield Bout(2, [self.trial("elastic", "an elastic run loses a rank", 2)])
        yield Bout(2, [self.trial("predicted", "a step and a peak, predicted", 2)])
        names = [entry.name for entry in catalog.entries()]
        gloo = {"device_messages": False}
        yield Bout(most, [self.equal(most, name, "chain", "through main memory", options=gloo) for name in names])

    def matrix(self) -> Iterator[list[Bout]]:
        """Of each number of ranks a round after the other; as many rounds as there is room for run side by side."""
        names = [entry.name for entry in catalog.entries()]
        rounds = {
            ranks: [
                Bout(ranks, [self.equal(ranks, n, MODELS[(i + turn) % len(MODELS)]) for i, n in enumerate(names)])
                for turn in range(len(MODELS))
            ]
            for ranks in (8, 4, 2)
            if ranks <= self.devices
        }
        while any(rounds.values()):
            for ranks, left in rounds.items():
                lanes = max(1, min(self.devices, num_cores()) // ranks)
                yield [left.pop(0) for _ in range(min(lanes, len(left)))]


def facts() -> dict[str, Any]:
    """What the machine is; devices are asked in a process of its own."""
    found = lines_of([sys.executable, "-P", "-c", OFFERED], LIMIT)
    told: dict[str, Any] = json.loads(found[-1]) if found else {}
    if not told:
        raise UserError(f"torch finds no accelerator on this machine; {to_have_one()}, or leave --gpu out")
    if told["number"] < 2:
        raise UserError(
            f"this machine has {told['number']} {told['kind']} device, but ranks are tried on several; "
            "run it where there are two"
        )
    asked = ["nvidia-smi", "--query-gpu=driver_version,pci.bus_id", "--format=csv,noheader"]
    told["driver"], told["topology"] = "; ".join(lines_of(asked)), lines_of(["nvidia-smi", "topo", "-m"])
    told["environment"] = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VENDORS)}
    return told


def accept(plan: TrialPlan, minutes: float, wanted: str, tell: Callable[[TrialResult], None]) -> int:
    """Run all trials whose names have ``wanted`` in them, as long as there is time; how many were left out."""
    until, left = monotonic() + 60 * minutes, 0
    for bouts in (*([bout] for bout in plan.first()), *plan.matrix()):
        chosen = [replace(bout, trials=[each for each in bout.trials if wanted in each["name"]]) for bout in bouts]
        chosen = [bout for bout in chosen if bout.trials]
        if monotonic() > until:
            left += sum(len(bout.trials) for bout in chosen)
        elif chosen:
            with ThreadPoolExecutor(len(chosen)) as pool:
                places = [range(lane * bout.ranks, (lane + 1) * bout.ranks) for lane, bout in enumerate(chosen)]
                list(pool.map(lambda bout, devices: run(bout, devices, plan.limit, tell), chosen, places))
    return left


def run(bout: Bout, devices: Sequence[int], limit: float, tell: Callable[[TrialResult], None]) -> None:
    """All trials of a bout. After one that has failed the others have new processes."""
    left = list(bout.trials)
    environment = os.environ | STEADY | {DEVICES: ",".join(map(str, devices))} | dict(bout.environment)
    while left:
        attempt = _elastic if left[0]["kind"] == "elastic" else _together
        with tempfile.TemporaryDirectory(prefix="vpipe-doctor-") as scratch:
            for result in attempt(tuple(left), Path(scratch), environment, limit):
                tell(result)
                left.pop(0)


def _together(
    trials: Sequence[Mapping[str, Any]], folder: Path, environment: Mapping[str, str], limit: float
) -> Iterator[TrialResult]:
    """The trials' results as they come, until one has failed."""
    told = folder / "told.jsonl"
    told.touch()
    (folder / "trials.json").write_text(json.dumps(trials))
    words = ["run", "--quiet", "--grace", "1", "--nproc", str(trials[0]["ranks"]), "-m", TRIALS, str(folder)]
    seen, at, since, goes_on = 0, 0, monotonic(), True
    with _started(words, folder, environment) as process:
        while goes_on:
            goes_on = process.poll() is None and monotonic() - since < limit
            lines = told.read_text().split("\n")[:-1]
            for found in map(json.loads, lines[seen:]):
                since = monotonic()
                if "ended" in found:
                    yield TrialResult(trials[at]["name"], found["verdict"], found["detail"], found["seconds"])
                    at += 1
            seen = len(lines)
            sleep(POLL)
        late = process.poll() is None
    if at < len(trials):
        yield _failure(trials[at], folder, monotonic() - since, late, limit)


@contextmanager
def _started(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A command of ours, which writes to a file; in the end it is stopped, with all that it has started."""
    with open(folder / "said", "wb") as said:
        command = [sys.executable, AS_MODULE, "vpipe", *words]
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=said, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(ENDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _failure(trial: Mapping[str, Any], folder: Path, seconds: float, late: bool, limit: float) -> TrialResult:
    """Of a trial that has not come to its end: as it should not, or as it should have."""
    lines = [line.strip() for line in (folder / "said").read_text(errors="replace").splitlines() if line.strip()]
    said = " | ".join(dict.fromkeys((*lines[:1], *lines[-1:])))[:MOST]
    mark = folder / "mark"
    if late:
        return TrialResult(trial["name"], "HANGS", f"it has not ended within {limit:g} s; {said}", seconds)
    if (
        trial["kind"] != "killed"
        or not mark.exists()
        or (trial["how"] == "memory" and MEMORY not in " ".join(lines).lower())
    ):
        return TrialResult(trial["name"], "FAILS", said, seconds)
    after = time() - mark.stat().st_mtime
    return TrialResult(
        trial["name"], "ended" if after < ENDS else "TOO LATE", f"all ranks, {after:.1f} s later; {said}", after
    )


def _elastic(
    trials: Sequence[Mapping[str, Any]], folder: Path, environment: Mapping[str, str], limit: float
) -> Iterator[TrialResult]:
    """Two runs, of which one loses a rank, by ``vpipe chaos``: they must end equal."""
    trial, begin = trials[0], monotonic()
    (folder / "job.yaml").write_text(JOB.format(**trial))
    with _started(["chaos", "job.yaml", "--kills", "1"], folder, environment) as process:
        try:
            code = process.wait(2 * limit)
        except subprocess.TimeoutExpired:
            yield _failure(trial, folder, monotonic() - begin, True, 2 * limit)
            return
    lines = (folder / "said").read_text(errors="replace").splitlines()
    yield TrialResult(trial["name"], "FAILS" if code else "equal", " | ".join(lines[-2:])[:MOST], monotonic() - begin)
