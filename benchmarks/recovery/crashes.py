"""A rank is killed at every step of a move and of a recovery: the old layout or the new one, never a mixture?

    python benchmarks/recovery/crashes.py [--quick] [--json]

One elastic run of three ranks, with frozen layers. For every step of the protocol (those that ``Move`` tells, those
between the order of a new epoch and its first step, and the middle of writing a copy) a rank is told to kill itself
there (SIGKILL): while layers move, or while it recovers from the loss of another one. After each blow the partition
must be the one before or the one that was asked for, and at the end the run must be the undisturbed one, byte by byte.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

from vpipe.launch import chaos
from vpipe.rundir.roster import Roster, want_layout

HANG = 120.0
PLUGIN = '''
"""Kills this process where the driver has said."""
import json, os, signal
from pathlib import Path
from vpipe.runtime.pipeline import Pipeline
from vpipe.train import copies, elastic

ARM = Path(os.environ["CRASH_ARM"])
FROZEN = (1, 2, 4)
counts = {}

def reached(kind, step):
    counts[kind] = counts.get(kind, -1) + 1
    try:
        wanted = json.loads(ARM.read_text())
    except (OSError, ValueError):
        return
    if (wanted["kind"], wanted["at"], wanted["slot"]) == (kind, counts[kind], int(os.environ.get("VPIPE_SLOT", "-1"))):
        ARM.rename(ARM.with_suffix(".done"))
        ARM.with_suffix(".step").write_text(step)
        os.kill(os.getpid(), signal.SIGKILL)

move, mark, checksum, begin = Pipeline.move, elastic.Marks.mark, copies._sum, Pipeline.__init__

def beginning(self, *given, **more):
    begin(self, *given, **more)
    for layer, module in self.modules().items():
        module.requires_grad_(layer not in FROZEN)

def moving(self, layout, *given, **more):
    counts["move"] = -1
    done = move(self, layout, *given, notice=lambda step: reached("move", step))
    reached("move", "moved")
    return done

def marking(self, name):
    if name == "agreed":
        counts["recovery"] = -1
    reached("recovery", name)
    mark(self, name)

def summing(memory):
    reached("copy", "a copy is written but not whole")
    counts["copy"] = -1
    return checksum(memory)

Pipeline.move, elastic.Marks.mark, copies._sum, Pipeline.__init__ = moving, marking, summing, beginning
'''
CONFIG: dict[str, Any] = {
    "model": {"name": "gpt", "hidden_size": 16, "num_layers": 4, "num_heads": 2, "sequence_length": 8},
    "dataset": {"name": "synthetic", "batch_size": 8, "extra": {"vocab_size": 32, "num_examples": 80_000}},
    "training": {"num_microbatches": 4, "epochs": 1, "evaluation_interval": -1},
    "parallel": {"model_parallel_size": 3, "scheduler": "1f1b", "device": "cpu"},
    "checkpoint": {"interval": 1_000_000},
    "observe": {"trace": False, "log_interval": 0},
    "launch": {"threads": 1},
}
LAYOUTS = ([1, 1, 4], [3, 2, 1])


class Driver:
    """One run that is hit again and again."""

    def __init__(self, folder: Path, iterations: int) -> None:
        self.arm, self.run = folder / "arm.json", folder / "run"
        self.earlier: list[int] = []
        """The partition before the last move: a rank that dies before the first copy after it takes the run back."""
        plugin, config = folder / "crash.py", folder / "config.yaml"
        plugin.write_text(PLUGIN)
        config.write_text(yaml.safe_dump(CONFIG))
        self.words = ["train", str(config), "--set", f"training.max_iterations={iterations}", "--quiet"]
        self.words += ["--plugin", str(plugin)]
        elastic = ["--elastic", "3:3", "--output-dir", str(self.run)]
        os.environ["CRASH_ARM"] = str(self.arm)
        self.process = subprocess.Popen([sys.executable, "-m", "vpipe", *self.words, *elastic])

    def wait(self, holds: Any) -> bool:
        end = time.monotonic() + HANG
        while not holds():
            if self.process.poll() is not None or time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def stepped(self, epoch: int = -1) -> bool:
        return self.wait(lambda: (now := Roster.read(self.run)) is not None and now.has_stepped and now.epoch > epoch)

    def roster(self) -> Roster:
        found = Roster.read(self.run)
        assert found is not None
        return found

    def partition(self) -> list[int]:
        return list(json.loads((self.run / "run.json").read_text())["partition"])

    def hit(self, kind: str, at: int, slot: int, turn: int) -> str:
        """Let a rank die at a step; which one, empty where it has no such step."""
        if not self.stepped():
            raise SystemExit(f"the run does not go on ({kind} {at} of slot {slot})")
        for suffix in (".done", ".step"):
            self.arm.with_suffix(suffix).unlink(missing_ok=True)
        before, epoch, wanted = self.partition(), self.roster().epoch, LAYOUTS[turn % 2]
        self.earlier = self.earlier or before
        self.arm.write_text(json.dumps({"kind": kind, "at": at, "slot": slot}))
        if kind == "move":
            if before == wanted:
                wanted = LAYOUTS[(turn + 1) % 2]
            want_layout(self.run, wanted, [1, 2, 0])
            self.wait(lambda: self.arm.with_suffix(".step").exists() or self.partition() == wanted)
        elif kind == "recovery":
            os.kill(self.roster().pids[(slot + 1) % 3], signal.SIGKILL)
            self.stepped(epoch)
        else:
            self.wait(self.arm.with_suffix(".step").exists)
        self.arm.unlink(missing_ok=True)
        step = self.arm.with_suffix(".step")
        if not step.exists():
            self.earlier = before
            return ""
        if not self.stepped(epoch):
            raise SystemExit(f"the run does not go on after {kind} {at} of slot {slot}")
        now = self.partition()
        if now not in (before, wanted, self.earlier):
            raise SystemExit(f"{kind} {at} of slot {slot}: {before} → {wanted}, but {now}")
        return step.read_text()


def main() -> None:
    arguments = common.options(__doc__ or "")
    hits: list[str] = []
    with tempfile.TemporaryDirectory(prefix="vpipe-crashes-") as name:
        folder = Path(name)
        driver = Driver(folder, 400 if arguments.quick else 2500)
        turn = 0
        for slot in (1,) if arguments.quick else (0, 1, 2):
            for kind in ("copy", "recovery", "move"):
                for at in range(1 if kind == "copy" else 100):
                    turn += 1
                    step = driver.hit(kind, at, slot, turn)
                    if not step:
                        break
                    hits.append(f"{kind}: {step} (slot {slot})")
                    print(hits[-1], file=sys.stderr)
        code = driver.process.wait()
        plain = subprocess.run([sys.executable, "-m", "vpipe", *driver.words, "--output-dir", str(folder / "plain")])
        different = chaos.differences(folder / "plain", driver.run) if not code + plain.returncode else ["it failed"]
    found = {"crashes": len(hits), "equal": not different, "differences": different}
    told = f"{len(hits)} crashes: " + ("equal to the undisturbed run" if not different else "; ".join(different))
    print(json.dumps(found) if arguments.json else told)
    raise SystemExit(1 if different else 0)


if __name__ == "__main__":
    main()
