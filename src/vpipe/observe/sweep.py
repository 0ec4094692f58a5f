"""A fair sweep: which runs, in which order, each in a process of its own, and where it stopped last time.

Fair means that runs differ in nothing but what is compared. All take the same config file, and with it the seed, the
initial weights (a function of seed and layer), the data, the precision and the partition; checkpoints and the live page
are off. Repeats are interleaved (all schedules once, then all again), so that a machine that gets slower in the
afternoon is slow for everyone.

    DIR/comparison.json          what is compared; a directory holds one comparison
    DIR/runs/<name>.json         the result of one run, written when it has ended: what exists is not run again
    DIR/runs/<name>/             its run directory
    DIR/runs/<name>.log          what it printed
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any

import vpipe
from vpipe.errors import UserError, nearest_file
from vpipe.observe.result import measured, outcome
from vpipe.process import AS_MODULE
from vpipe.rundir import writing
from vpipe.schedule.catalog import get

FAIR = ("checkpoint.interval=-1", "training.profile_iteration=-1", "observe.trace=true", "observe.dashboard=false")
"""Set for every run: what would disturb the clock is off, what is measured is on."""

Train = Callable[[Sequence[str], Path, float], int]
"""(command, log file, seconds it may take) → exit code."""


@dataclass(frozen=True)
class Case:
    """One run of the sweep; ``model`` is empty where the config's is taken."""

    schedule: str
    num_microbatches: int
    repeat: int
    model: str = ""

    @property
    def name(self) -> str:
        parts = [self.model, self.schedule, f"m{self.num_microbatches}", f"r{self.repeat}"]
        return "-".join(re.sub(r"[^A-Za-z0-9_.]+", "-", part) for part in parts if part)


@dataclass(frozen=True)
class Sweep:
    """What is compared."""

    config: Path
    schedules: tuple[str, ...]
    microbatches: tuple[int, ...]
    models: tuple[str, ...] = ()
    repeats: int = 1
    overrides: tuple[str, ...] = ()
    timeout: float = 3600.0

    def cases(self) -> Iterator[Case]:
        """All of the first repeat, then all of the second: that is what makes machines that drift fair."""
        for repeat in range(self.repeats):
            for model in self.models or ("",):
                for count in self.microbatches:
                    for schedule in self.schedules:
                        yield Case(schedule, count, repeat, model)

    def command(self, case: Case, directory: Path) -> list[str]:
        settings = [*FAIR, f"training.num_microbatches={case.num_microbatches}"]
        if case.model:
            settings.append(f"model.name={case.model}")
        settings += self.overrides
        sets = [word for setting in settings for word in ("--set", setting)]
        head = [sys.executable, AS_MODULE, "vpipe", "train", str(self.config), "--scheduler", case.schedule]
        return [*head, *sets, "--output-dir", str(directory)]

    def fingerprint(self) -> str:
        """Changes with whatever would make old results another experiment's; more repeats or schedules do not."""
        said = [self.config.read_text(encoding="utf-8"), *self.overrides, code()]
        return sha256("\0".join(said).encode()).hexdigest()[:16]


def code() -> str:
    """What runs: the version, and a digest of the package's sources, for those who change them between two runs."""
    found = sha256()
    home = Path(vpipe.__file__).parent
    for path in sorted(home.rglob("*.py")):
        found.update(path.relative_to(home).as_posix().encode() + b"\0" + path.read_bytes())
    return f"{vpipe.__version__}+{found.hexdigest()[:12]}"


def check(sweep: Sweep) -> None:
    """Refuse before the first run what could never run."""
    if not sweep.config.is_file():
        hint = nearest_file(sweep.config) or "; give the config that all runs share"
        raise UserError(f"{sweep.config} does not exist{hint}")
    for schedule in sweep.schedules:
        get(schedule)
    named: dict[str, Sequence[object]] = {
        "schedule": sweep.schedules,
        "number of microbatches": sweep.microbatches,
        "model": sweep.models,
    }
    for what, values in named.items():
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise UserError(f"the {what} {twice} is named twice")


def run(
    sweep: Sweep, output: Path, say: Callable[[str], None], train: Train | None = None, retry: bool = False
) -> list[dict[str, Any]]:
    """Run what has not run yet (``retry``: and what has failed); the results of all cases."""
    check(sweep)
    runs = output / "runs"
    _claim(sweep, output)
    results = []
    cases = list(sweep.cases())
    for number, case in enumerate(cases, 1):
        where = f"[{number}/{len(cases)}] {case.name}"
        kept = runs / f"{case.name}.json"
        result = writing.read(kept)
        if result is None or (retry and result.get("status") != "done"):
            say(f"{where} …")
            result = _one(sweep, case, runs, train or subprocess_train)
            writing.replace(kept, result)
            say(f"{where}: {outcome(result)}")
        else:
            say(f"{where}: {outcome(result)} (from before)")
        results.append(result)
    return results


def _claim(sweep: Sweep, output: Path) -> None:
    """The directory is this comparison's: new, or left by the same one."""
    about = output / "comparison.json"
    print_of = sweep.fingerprint()
    known = writing.read(about)
    if known is not None and known.get("fingerprint") != print_of:
        raise UserError(f"{output} holds a comparison of another config, --set or code; choose another directory")
    try:
        (output / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}") from None
    said = asdict(sweep) | {"config": str(sweep.config), "fingerprint": print_of, "code": code()}
    writing.replace(about, said)


def _one(sweep: Sweep, case: Case, runs: Path, train: Train) -> dict[str, Any]:
    directory, log = runs / case.name, runs / f"{case.name}.log"
    shutil.rmtree(directory, ignore_errors=True)  # what an interrupted run left would be mixed into this one
    began = monotonic()
    command = sweep.command(case, directory)
    about = {**asdict(case), "name": case.name, "mode": get(case.schedule).mode, "command": command, "code": code()}
    try:
        exit_code = train(command, log, sweep.timeout)
    except subprocess.TimeoutExpired:
        return about | failed(f"took more than {sweep.timeout:.0f} s and was ended", began)
    if exit_code != 0:
        return about | failed(_reason(log, exit_code), began)
    try:
        return about | {"status": "done", "wall_seconds": monotonic() - began} | measured(directory)
    except UserError as error:
        return about | failed(str(error), began)


def failed(reason: str, began: float) -> dict[str, Any]:
    return {"status": "failed", "reason": reason, "wall_seconds": monotonic() - began}


def subprocess_train(command: Sequence[str], log: Path, timeout: float) -> int:
    """Run in a process group of its own; what it says goes to the log. An interrupt ends it with us."""
    environment = {key: value for key, value in os.environ.items() if key != "VPIPE_DEBUG"}
    with log.open("wb") as file, subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment
    ) as process:  # fmt: skip
        try:
            return process.wait(timeout)
        except BaseException:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
            raise


def _reason(log: Path, exit_code: int) -> str:
    """The sentence that the run ended with; else its last line."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    spoken = [number for number, line in enumerate(lines) if line.startswith("vpipe: ")]
    at = spoken[-1] if spoken else len(lines) - 1
    said = lines[at].removeprefix("vpipe: ") if lines else "it said nothing"
    if said.startswith("this happened at ") and at > 0:  # where an exception arose; the line before is the exception
        said = f"{lines[at - 1]}: {said}"
    return f"{said[:500]} (exit code {exit_code})"
