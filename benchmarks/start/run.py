"""How long from the command to its answer: the tenth step of four ranks, and what answers without torch.

``vpipe train`` of a tiny GPT on four ranks, until its tenth step has ended and been told (the second one is counted,
which once took longer than the start); its first step; the same under torchrun; and
``--help``, ``draw`` and ``simulate``, until they have ended. Every command is run in turn, so that all see the same
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

CONFIG = Path(__file__).parents[2] / "configs/gpt_1f1b_cpu.yaml"
VPIPE = [sys.executable, "-m", "vpipe"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=4", "-m", "vpipe"]
SHORT = ["--set", "training.max_iterations=10", "--set", "observe.log_interval=1", "--set", "checkpoint.interval=-1"]
GOAL = 2.5


def to_step(words: Sequence[str], step: int = 10) -> float:
    """Seconds until a training has told this step of its ten."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*words, "train", str(CONFIG), "--output-dir", f"{folder}/run", *SHORT]
        begin = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if f"iteration {step}/" in line:
                break
        else:
            raise SystemExit(f"{' '.join(command)} never told its step {step}:\n{''.join(said)}")
        took = time.perf_counter() - begin
        for _ in process.stdout:
            pass  # to its end: what leaves slowly would slow the next
        process.wait()
        return took


def to_end(words: Sequence[str]) -> float:
    begin = time.perf_counter()
    subprocess.run([*VPIPE, *words], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one run each: to see that it runs, not to quote")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    measured = {
        "vpipe train, 4 ranks, to the tenth step": lambda: to_step(VPIPE),
        "vpipe train, 4 ranks, to the first step": lambda: to_step(VPIPE, 1),
        "torchrun -m vpipe train, 4 ranks, to the tenth step": lambda: to_step(TORCHRUN),
        "vpipe --help": lambda: to_end(["--help"]),
        "vpipe draw 1f1b -p 4 -m 8": lambda: to_end(["draw", "1f1b", "-p", "4", "-m", "8"]),
        "vpipe simulate 1f1b -p 4 -m 8": lambda: to_end(["simulate", "1f1b", "-p", "4", "-m", "8"]),
    }
    for measure in measured.values():
        measure()  # files are in memory from here on
    runs: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(1 if args.quick else 5):
        for name, measure in measured.items():
            runs[name].append(measure())
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    answer = {
        "machine": machine,
        "load": os.getloadavg()[0],
        "seconds": {name: statistics.median(found) for name, found in runs.items()},
        "spread": {name: [min(found), max(found)] for name, found in runs.items()},
    }
    if not args.quick:
        answer["goals"] = {"tenth step": statistics.median(next(iter(runs.values()))) <= GOAL}
    if args.json:
        print(json.dumps(answer))
        return
    print(f"{machine}, load {answer['load']:.1f}; medians of {len(runs['vpipe --help'])}, spread in brackets\n")
    for name, found in runs.items():
        print(f"{name:<54}{statistics.median(found):>6.2f} s   [{min(found):.2f}, {max(found):.2f}]")


if __name__ == "__main__":
    main()
