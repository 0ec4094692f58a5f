"""``vpipe doctor --gpu``: whether this machine's accelerators train what the CPU trains, and what to send back.

No GPU was at hand where vpipe was written. Every trial (``proof.trials``) runs in processes of its own, by the devices'
own backend, as users' ranks do; one that does not end in time is stopped, is told, and the next begins. Groups of few
ranks run side by side, on other devices.

    bouts   one after the other: the ways, what makes devices wait, ranks that die, then the matrix
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
SOUND = {"equal", "near", "refused", "all work", "measured", "ended"}
"""Verdicts that are no fault."""
STEADY = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Without it cuBLAS may choose another kernel from one call to the next, and sound code would read as different."""
VARIANTS: dict[str, dict[str, str]] = {
    "launches wait": dict.fromkeys(("CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING"), "1"),
    "one connection": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    "kernels loaded lazily": {"CUDA_MODULE_LOADING": "LAZY"},
    "kernels loaded at once": {"CUDA_MODULE_LOADING": "EAGER"},
}
"""What vendors' environments have, and makes devices wait."""
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


Trial = Mapping[str, Any]
Bout = Sequence[Trial]
"""Trials that share their processes, as many as the first one's ranks, as long as none of them fails."""


class TrialPlan(NamedTuple):
    """What is tried on which machine."""

    kind: str
    devices: int
    width: int
    limit: float

    def trial(self, kind: str, name: str, ranks: int, **more: Any) -> Trial:
        base = {"kind": kind, "name": name, "ranks": ranks, "device": self.kind, "width": self.width, "variables": {}}
        return base | {"limit": self.limit * 2 / 3, "schedule": "1f1b", "model": "chain"} | more

    def equal(self, ranks: int, schedule: str, model: str, what: str = "", **more: Any) -> Trial:
        name = f"{ranks} ranks, {schedule}, {model}{what and ', ' + what}"
        return self.trial("equal", name, ranks, schedule=schedule, model=model, **more)

    def first(self) -> Iterator[Bout]:
        """What is tried beside the matrix."""
        most = max(p for p in (2, 4, 8) if p <= self.devices)
        yield [self.trial("reach", "the ways between devices", 1)]
        yield [self.trial("posted", "products under posted receives", 2)]
        for what, variables in VARIANTS.items():
            some = ("1f1b", "zb-v", "pipedream")
            yield [self.equal(most, schedule, "chain", what, variables=variables) for schedule in some]
        yield [self.equal(most, "1f1b", "chain", "memory at 95 %", fill=0.95)]
        yield [self.equal(most, "1f1b", "chain", "40 checkpoints, then a move", checkpoints=40)]
        yield [self.trial("killed", "a rank is killed in a step", 2, how="signal")]
        yield [self.trial("killed", "a device without memory", 2, how="memory")]
        yield [self.trial("elastic", "an elastic run loses a rank", 2)]
        yield [self.trial("predicted", "a step and a peak, predicted", 2)]
        names, gloo = [entry.name for entry in catalog.entries()], {"device_messages": False}
        yield [self.equal(most, name, "chain", "through main memory", options=gloo) for name in names]

    def matrix(self) -> Iterator[list[Bout]]:
        """Of each number of ranks a round after the other; as many rounds as there is room for run side by side."""
        names = [entry.name for entry in catalog.entries()]
        turns = range(len(MODELS))
        rounds = {
            ranks: [
                [self.equal(ranks, n, MODELS[(i + turn) % len(MODELS)]) for i, n in enumerate(names)] for turn in turns
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
        raise UserError(f"this machine has {told['number']} {told['kind']} device; run it where there are two or more")
    asked = ["nvidia-smi", "--query-gpu=driver_version,pci.bus_id", "--format=csv,noheader"]
    told["driver"], told["topology"] = "; ".join(lines_of(asked)), lines_of(["nvidia-smi", "topo", "-m"])
    told["environment"] = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VENDORS)}
    return told


def accept(plan: TrialPlan, minutes: float, wanted: str, tell: Callable[[TrialResult], None]) -> int:
    """Run all trials whose names have ``wanted`` in them, as long as there is time; how many were left out."""
    until, left = monotonic() + 60 * minutes, 0
    for bouts in (*([bout] for bout in plan.first()), *plan.matrix()):
        chosen = [some for bout in bouts if (some := [each for each in bout if wanted in each["name"]])]
        if monotonic() > until:
            left += sum(map(len, chosen))
        elif chosen:
            with ThreadPoolExecutor(len(chosen)) as pool:
                list(pool.map(lambda lane, bout: run(lane, bout, plan.limit, tell), range(len(chosen)), chosen))
    return left


def run(lane: int, bout: Bout, limit: float, tell: Callable[[TrialResult], None]) -> None:
    """All trials of a bout, on this lane's devices. After one that has failed the others have new processes."""
    ranks = bout[0]["ranks"]
    devices = ",".join(map(str, range(lane * ranks, (lane + 1) * ranks)))
    environment = os.environ | STEADY | {DEVICES: devices} | bout[0]["variables"]
    while bout:
        with tempfile.TemporaryDirectory(prefix="vpipe-doctor-") as scratch:
            for result in _together(bout, Path(scratch), environment, limit):
                tell(result)
                bout = bout[1:]


def _together(
    trials: Sequence[Trial], folder: Path, environment: Mapping[str, str], limit: float
) -> Iterator[TrialResult]:
    """The trials' results as they come, until one has failed. An elastic run is two, of which one loses a rank, by
    ``vpipe chaos``: they must end equal."""
    first, told = trials[0], folder / "told.jsonl"
    told.touch()
    (folder / "trials.json").write_text(json.dumps(trials))
    (folder / "job.yaml").write_text(JOB.format(**first))
    words = ["run", "--quiet", "--grace", "1", "--nproc", str(first["ranks"]), "-m", TRIALS, str(folder)]
    if first["kind"] == "elastic":
        words, limit = ["chaos", "job.yaml", "--kills", "1"], 2 * limit
    command = [sys.executable, AS_MODULE, "vpipe", *words]
    with open(folder / "said", "wb") as said:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=said, stderr=subprocess.STDOUT)
    at, seen, since, goes_on = 0, 0, monotonic(), True
    try:
        while goes_on:
            goes_on = process.poll() is None and monotonic() - since < limit
            for found in map(json.loads, told.read_text().split("\n")[seen:-1]):
                seen, since = seen + 1, monotonic()
                if "ended" in found:
                    yield TrialResult(trials[at]["name"], found["verdict"], found["detail"], found["seconds"])
                    at += 1
            sleep(POLL)
        code = process.poll()
    finally:
        process.terminate()
        try:
            process.wait(ENDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if at < len(trials):
        yield _ended(trials[at], folder, monotonic() - since, code, limit)


def _ended(trial: Trial, folder: Path, seconds: float, code: int | None, limit: float) -> TrialResult:
    """Of a trial that has told no end: its processes have ended with this code, or not in time."""
    lines = [line.strip() for line in (folder / "said").read_text(errors="replace").splitlines() if line.strip()]
    said, mark = " | ".join(dict.fromkeys((*lines[:1], *lines[-1:])))[:MOST], folder / "mark"
    verdict = "FAILS"
    if code is None:
        verdict, said = "HANGS", f"it has not ended within {limit:g} s; {said}"
    elif trial["kind"] == "elastic":
        verdict, said = "FAILS" if code else "equal", " | ".join(lines[-2:])[:MOST]
    elif trial["kind"] == "killed" and mark.exists() and (trial["how"] == "signal" or MEMORY in str(lines).lower()):
        seconds = time() - mark.stat().st_mtime
        verdict, said = "ended" if seconds < ENDS else "TOO LATE", f"all ranks, {seconds:.1f} s later; {said}"
    return TrialResult(trial["name"], verdict, said, seconds)
