"""How long is it from the death of a rank to the first new step, and what do the copies in memory cost?

    python benchmarks/recovery/run.py [--quick] [--json]

The same tiny run is hit by SIGKILL under ``vpipe train --elastic`` and, as the peer, under torchrun, which starts all
ranks anew from a checkpoint of every iteration (``--max-restarts``, ``--resume latest``). Both times go from the kill
to the moment when the first step after it is told in metrics.jsonl. What vpipe's time goes to the run itself tells.
Where torchft is installed (``pip install torchft``), it is asked the same (``torchft_peer.py``). The cost of the copies
is the time from one iteration to the next of a larger model, with and without ``--elastic``, interleaved.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
import common
import torchft_peer

from vpipe.rundir.roster import Roster

RANKS = 3
CONFIG: dict[str, Any] = {
    "model": {"name": "gpt", "hidden_size": 16, "num_layers": 4, "num_heads": 2, "sequence_length": 8},
    "dataset": {"name": "synthetic", "batch_size": 8, "extra": {"vocab_size": 32, "num_examples": 80_000}},
    "training": {"num_microbatches": 4, "epochs": 1, "evaluation_interval": -1},
    "parallel": {"model_parallel_size": RANKS, "scheduler": "1f1b", "device": "cpu"},
    "checkpoint": {"interval": -1},
    "observe": {"trace": False, "log_interval": 0},
    "launch": {"threads": 1},
}
LARGER = {"hidden_size": 256, "sequence_length": 64}
BATCH = 32


def write(folder: Path, name: str, **changes: dict[str, Any]) -> Path:
    made = json.loads(json.dumps(CONFIG))
    for section, values in changes.items():
        made[section].update(values)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(made))
    return path


def lines(directory: Path) -> list[dict[str, Any]]:
    path = directory / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def start(words: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def end(run: subprocess.Popen[bytes]) -> None:
    """The run and what it has started."""
    ours = psutil.Process(run.pid).children(recursive=True)
    run.kill()
    for process in ours:
        if process.is_running():
            process.kill()
    run.wait()


def recoveries(words: list[str], directory: Path, victims: Callable[[int], list[int]], count: int) -> list[float]:
    """Seconds from each of ``count`` kills to the first step after it."""
    run, found = start(words), []
    try:
        for number in range(count):
            known = len(lines(directory))
            while len(lines(directory)) < known + 5:  # it trains
                if run.poll() is not None:
                    raise SystemExit(f"the run ended by itself with exit code {run.returncode}")
                time.sleep(0.01)
            pid = victims(run.pid)[1 + number % (RANKS - 1)]
            struck, before = time.time(), len(lines(directory))
            os.kill(pid, signal.SIGKILL)
            while not (fresh := _first_after(lines(directory)[before:])):
                if run.poll() is not None or time.time() - struck > 60:
                    break
                time.sleep(0.01)
            if not fresh:
                break
            found.append(fresh - struck)
    finally:
        end(run)
    return found


def _first_after(told: list[dict[str, Any]]) -> float:
    """When the first step after a resumption was told; 0 while there is none."""
    marks = [index for index, line in enumerate(told) if line["kind"] == "resume"]
    later = [line["time"] for line in told[marks[0] :] if line["kind"] == "train"] if marks else []
    return later[0] if later else 0.0


def ours(folder: Path, count: int) -> dict[str, Any]:
    directory = folder / "elastic"
    words = ["vpipe", "train", str(write(folder, "elastic")), "--elastic", f"{RANKS}:{RANKS}"]

    def victims(_: int) -> list[int]:
        roster = Roster.read(directory)
        assert roster is not None
        return [roster.pids[slot] for slot in sorted(roster.pids)]

    seconds = recoveries([*words, "--output-dir", str(directory)], directory, victims, count)
    parts = [line["seconds"] for line in lines(directory) if line["kind"] == "recovery"]
    return {"seconds": seconds, "parts": {name: median([each[name] for each in parts]) for name in parts[0]}}


def theirs(folder: Path, count: int) -> dict[str, Any]:
    directory = folder / "torchrun"
    config = write(folder, "torchrun", checkpoint={"interval": 1})
    words = [
        "torch.distributed.run",
        f"--nproc_per_node={RANKS}",
        f"--max-restarts={count + 5}",
        "--monitor-interval=0.1",
    ]
    words += ["-m", "vpipe", "train", str(config), "--output-dir", str(directory), "--resume", "latest"]

    def victims(pid: int) -> list[int]:
        return sorted(child.pid for child in psutil.Process(pid).children())

    seconds = recoveries(words, directory, victims, count)
    return {"seconds": seconds, "came_back": f"{len(seconds)} of {count}"}


def replicas(folder: Path, count: int) -> dict[str, Any]:
    """torchft's times, or why there are none."""
    try:
        found = torchft_peer.measure(folder / "torchft", RANKS, count)
    except (ImportError, TimeoutError) as error:
        return {"problem": str(error)}
    return {name: median(times) for name, times in found.items()}


def copies(folder: Path, rounds: int, iterations: int) -> dict[str, list[float]]:
    """Seconds from one iteration to the next, with and without copies."""
    found: dict[str, list[float]] = {"without": [], "with": []}
    changes = {"dataset": {"batch_size": BATCH}, "model": LARGER, "training": {"max_iterations": iterations}}
    config = write(folder, "copies", **changes)
    for number in range(rounds):
        for name, more in (("without", []), ("with", ["--elastic", f"{RANKS}:{RANKS}"])):
            directory = folder / f"{name}{number}"
            if start(["vpipe", "train", str(config), *more, "--output-dir", str(directory)]).wait():
                raise SystemExit(f"the run {name} copies failed")
            times = [line["time"] for line in lines(directory) if line["kind"] == "train"][2:]
            found[name] += [after - before for before, after in pairwise(times)]
    return found


def main() -> None:
    arguments = common.options(__doc__ or "")
    count, rounds, iterations = (3, 1, 15) if arguments.quick else (9, 3, 25)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        elastic, torchrun, steps = ours(folder, count), theirs(folder, count), copies(folder, rounds, iterations)
        torchft = replicas(folder, count)
    without, with_ = median(steps["without"]), median(steps["with"])
    result = {
        "elastic": median(elastic["seconds"]),
        "parts": elastic["parts"],
        "torchrun": median(torchrun["seconds"]) if torchrun["seconds"] else None,
        "torchft": torchft,
        "came_back": {"elastic": f"{len(elastic['seconds'])} of {count}", "torchrun": torchrun["came_back"]},
        "step": {"without": without, "with": with_, "cost": with_ / without - 1},
    }
    common.finish(arguments, result, table)


def table(result: dict[str, Any]) -> str:
    parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in result["parts"].items())
    step = result["step"]
    torchrun = f"{result['torchrun']:.2f} s" if result["torchrun"] else "never"
    torchft = result["torchft"]
    replicas = torchft.get("problem") or f"others {torchft['survivors']:.2f} s, all {torchft['whole']:.2f} s"
    return "\n".join(
        (
            f"kill → first new step   vpipe --elastic {result['elastic']:.2f} s ({parts})",
            f"                        torchrun, checkpoint every iteration {torchrun}",
            f"                        torchft, replicas instead of stages: {replicas}",
            f"came back               {result['came_back']}",
            f"copies                  step {1000 * step['without']:.1f} ms without, {1000 * step['with']:.1f} ms with: "
            f"{step['cost']:+.1%}",
        )
    )


if __name__ == "__main__":
    main()
