"""Does a run that goes from four ranks to three and back go on at the predicted speed?

    python benchmarks/adapt/scale.py [--quick] [--json]

Twelve sleeping layers (5 ms for forward, input gradient and weight gradient each, ``1f1b``, 8 microbatches) in an
elastic run, whose number of ranks is changed as ``vpipe scale`` does it. The median step of each phase is compared with
the simulation of the same schedule and partition with the true times.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

from vpipe.plan.costs import LayerCost, Profile
from vpipe.plan.planner import plan
from vpipe.rundir import roster as rosters

LAYERS, MICROBATCHES, UNIT, PHASES = 12, 8, 0.005, (4, 3, 4)
CONFIG: dict[str, Any] = {
    "model": {
        "name": "emulated",
        "num_layers": LAYERS,
        "extra": {"forward": UNIT, "input_grad": UNIT, "weight_grad": UNIT},
    },
    "dataset": {"name": "synthetic", "batch_size": 8, "extra": {"num_examples": 80_000}},
    "training": {"num_microbatches": MICROBATCHES, "epochs": 1, "evaluation_interval": -1},
    "parallel": {"model_parallel_size": 4, "scheduler": "1f1b", "device": "cpu"},
    "checkpoint": {"interval": -1},
    "observe": {"trace": False, "log_interval": 0},
    "launch": {"threads": 1, "elastic": "3:4"},
}


def predicted(num_ranks: int) -> float:
    layers = tuple(LayerCost(f"layer {index}", UNIT, UNIT, UNIT, 0, 0) for index in range(LAYERS))
    options: dict[str, Any] = {"recompute": False, "swap": False}
    return plan(Profile(layers), num_ranks, num_microbatches=MICROBATCHES, schedule="1f1b", **options).step_time


def steps(directory: Path) -> list[float]:
    """Seconds of every step since the run began or went on last."""
    path = directory / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    begin = max((index for index, line in enumerate(lines) if line["kind"] == "resume"), default=0)
    return [line["seconds"] for line in lines[begin:] if line["kind"] == "train"]


def main() -> None:
    arguments = common.options(__doc__ or "")
    count = 6 if arguments.quick else 20
    result: dict[str, Any] = {"phases": []}
    with tempfile.TemporaryDirectory(prefix="vpipe-scale-") as name:
        folder = Path(name)
        config, directory = folder / "config.yaml", folder / "run"
        config.write_text(yaml.safe_dump(CONFIG))
        words = [sys.executable, "-m", "vpipe", "train", str(config), "--quiet", "--output-dir", str(directory)]
        run = subprocess.Popen(words)
        try:
            for number, num_ranks in enumerate(PHASES):
                if number:
                    rosters.want(directory, num_ranks)
                while (
                    (now := rosters.Roster.read(directory)) is None
                    or not now.has_stepped
                    or len(now.ranks) != num_ranks
                ):
                    if run.poll() is not None:
                        raise SystemExit(f"the run ended with exit code {run.returncode}")
                    time.sleep(0.02)
                while len(found := steps(directory)) < count + 2:
                    time.sleep(0.05)
                wanted, median = predicted(num_ranks), statistics.median(found[2:])
                result["phases"].append(
                    {"ranks": num_ranks, "predicted": wanted, "measured": median, "ratio": wanted / median}
                )
        finally:
            run.terminate()
            run.wait()
    common.finish(arguments, result, table)


def table(result: dict[str, Any]) -> str:
    rows = ["| ranks | predicted step | measured | of the predicted speed |", "| --- | --- | --- | --- |"]
    rows += [
        f"| {phase['ranks']} | {phase['predicted']:.3f} s | {phase['measured']:.3f} s | {phase['ratio']:.0%} |"
        for phase in result["phases"]
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    main()
