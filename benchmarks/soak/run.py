"""Does anything grow while a run trains on and on?

    python benchmarks/soak/run.py                      100,000 iterations of a tiny model on two ranks
    python benchmarks/soak/run.py --iterations 5000 --minutes 5 --json

While it trains, memory (without what processes share), descriptors and threads of the launcher and its ranks are read,
and the sizes of what the run has written. Told are: bytes a thousand iterations, a line through the second half of the
run; descriptors and threads at the beginning and at the end; speed in the last tenth over that in the second; and how
long the report of such a run takes, and how large it is. When its minutes are over the run is stopped, and the
iterations that it made are told.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

SAMPLES = 400
"""At most, however long the run is."""


def config(iterations: int) -> dict[str, Any]:
    seldom = max(1, iterations // 20)
    return {
        "model": {"name": "gpt", "hidden_size": 8, "num_layers": 1, "num_heads": 1, "sequence_length": 4},
        "dataset": {"name": "synthetic", "batch_size": 2, "extra": {"vocab_size": 16, "num_examples": 4000}},
        "training": {
            "num_microbatches": 2,
            "epochs": 1_000_000,
            "max_iterations": iterations,
            "ema": 0.999,
            "gradient_clipping": 1.0,
            "evaluation_interval": seldom,
            "evaluation_batches": 1,
        },
        "parallel": {"model_parallel_size": 2, "scheduler": "1f1b"},
        "checkpoint": {"interval": seldom, "best": "evaluation.loss"},
        "observe": {"log_interval": 0},
        "launch": {"threads": 1},
    }


def processes(root: psutil.Process) -> dict[str, psutil.Process]:
    """The launcher, and what it has started in the order in which it did: the server of forks, and the ranks."""
    children = sorted(root.children(recursive=True), key=lambda child: child.pid)
    return {"launcher": root} | {f"process {number}": child for number, child in enumerate(children, start=1)}


def seen(root: psutil.Process, run: Path) -> dict[str, Any]:
    """One look at everything."""
    told: dict[str, Any] = {"time": time.monotonic(), "iteration": iteration_of(run), "processes": {}, "files": {}}
    for name, process in processes(root).items():
        with suppress(psutil.Error):
            memory = process.memory_full_info()
            told["processes"][name] = {
                "bytes": memory.uss,
                "descriptors": process.num_fds(),
                "threads": process.num_threads(),
            }
    for path in run.rglob("*"):
        with suppress(OSError):
            if path.is_file() and "checkpoints" not in path.parts:
                told["files"][str(path.relative_to(run))] = path.stat().st_size
    return told


def iteration_of(run: Path) -> int:
    try:
        return int(json.loads((run / "state.json").read_text())["iteration"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def train(iterations: int, minutes: float, folder: Path) -> tuple[list[dict[str, Any]], int]:
    """What was seen of a run, and its exit code."""
    file, run = folder / "job.yaml", folder / "run"
    file.write_text(yaml.safe_dump(config(iterations)))
    words = [sys.executable, "-m", "vpipe", "train", str(file), "--output-dir", str(run), "--quiet"]
    with (folder / "said.txt").open("w") as said:
        process = subprocess.Popen(words, stdout=said, stderr=subprocess.STDOUT)
    begin, looks = time.monotonic(), []
    pause = max(0.5, 60 * minutes / SAMPLES)
    while process.poll() is None:
        with suppress(psutil.Error):
            looks.append(seen(psutil.Process(process.pid), run))
        if time.monotonic() - begin > 60 * minutes:
            process.send_signal(signal.SIGTERM)
            begin = float("inf")
        with suppress(subprocess.TimeoutExpired):
            process.wait(pause)
    return [look for look in looks if look["iteration"]], process.returncode


def growth(looks: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Of one process."""
    known = [(look["iteration"], look["processes"][name]) for look in looks if name in look["processes"]]
    half = [each for each in known if each[0] >= looks[-1]["iteration"] / 2]
    line = statistics.linear_regression([at for at, _ in half], [found["bytes"] for _, found in half])
    first, last = known[len(known) // 10][1], known[-2][1]  # the last look may be of a process that ends
    told = {key: [first[key], last[key]] for key in ("bytes", "descriptors", "threads")}
    return {"bytes a thousand iterations": round(1000 * line.slope), **told}


def speeds(run: Path) -> dict[str, float]:
    """Medians of iterations a second in tenths of the run: what else the machine does comes and goes."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["seconds"] for line in lines if line["kind"] == "train"]
    tenth = len(seconds) // 10
    tenths = [1 / statistics.median(seconds[tenth * k : tenth * (k + 1)]) for k in range(10)]
    return {"second tenth": tenths[1], "last tenth": tenths[9], "last over second": tenths[9] / tenths[1]}


def reported(run: Path) -> dict[str, Any]:
    """The report of the run, made by the command: seconds and bytes."""
    begin = time.monotonic()
    words = [sys.executable, "-m", "vpipe", "report", str(run), "-o", str(run / "report.html")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr[-300:]}
    return {"seconds": round(time.monotonic() - begin, 1), "bytes": (run / "report.html").stat().st_size}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=60.0, help="when the run is stopped at the latest")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vpipe-soak-") as name:
        folder = Path(name)
        looks, code = train(told.iterations, told.minutes, folder)
        if len(looks) < 10:
            print(
                f"the run ended with code {code} after {len(looks)} looks:\n{(folder / 'said.txt').read_text()[-2000:]}"
            )
            return 1
        names = [name for name in looks[len(looks) // 2]["processes"] if name in looks[-2]["processes"]]
        answer = {
            "iterations": max(look["iteration"] for look in looks),
            "exit code": code,
            "seconds": round(looks[-1]["time"] - looks[0]["time"]),
            "processes": {name: growth(looks, name) for name in sorted(names)},
            "files": looks[-1]["files"],
            "iterations a second": speeds(folder / "run"),
            "report": reported(folder / "run"),
            "checkpoints": len(list((folder / "run" / "checkpoints").glob("iteration-*"))),
        }
    print(json.dumps(answer, indent=None if told.json else 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
