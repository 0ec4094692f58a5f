"""Does a run that is killed at random, again and again, end with the weights of the run that nobody killed?

    python benchmarks/kills/run.py [--kills 40] [--seed 0] [--json]

Ranks are forked from a process that has imported torch, as torchrun would start them, and train a tiny model with a
checkpoint every second iteration. At a random moment some or all of them get SIGKILL; the next life goes on by
``--resume latest`` in the same directory. When a run has come to its end, size and sha256 of every file of its last
checkpoint (weights, moments, buffers) are those of the run that was never killed.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import yaml

from vpipe.cli.main import main as vpipe
from vpipe.launch.zygote_start import PRELOAD
from vpipe.rundir.journal import EndingKind, read_ending
from vpipe.rundir.manifest import CheckpointManifest, find

CASES = [
    {"transport": transport, "data_parallel_size": replicas, "scheduler": scheduler}
    for transport in ("shm", "distributed")
    for replicas in (1, 2)
    for scheduler in ("1f1b", "zb-h1", "gpipe")
]
ITERATIONS = 24


@dataclass
class Tally:
    """What was seen."""

    kills: int = 0
    lives: int = 0
    runs: int = 0
    unequal: int = 0


def config(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": {"name": "gpt", "hidden_size": 16, "num_layers": 2, "num_heads": 2, "sequence_length": 8},
        "dataset": {"name": "synthetic", "batch_size": 8, "extra": {"vocab_size": 32, "num_examples": 64}},
        "training": {
            "learning_rate": 0.01,
            "num_microbatches": 2,
            "epochs": 100,
            "max_iterations": ITERATIONS,
            "evaluation_interval": -1,
        },
        "parallel": {"model_parallel_size": 2, "timeout": 30.0, **case},
        "checkpoint": {"interval": 2, "keep": 2},
        "observe": {"trace": False, "log_interval": 0},
        "launch": {"threads": 1},
    }


def life(file: Path, directory: Path, num_ranks: int) -> list[int]:
    """Start the ranks of one life; their pids."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pids = []
    for rank in range(num_ranks):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        os.environ.update(
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
            }
        )
        said = os.open(directory.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(said, 1)
        os.dup2(said, 2)
        _as_rank(["train", str(file), "--output-dir", str(directory), "--resume", "latest"])
    return pids


def _as_rank(words: list[str]) -> NoReturn:
    """Run the command to the end of this process, which must not clean up after its parent."""
    code = 1
    try:
        vpipe(words)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    atexit._run_exitfuncs()
    os._exit(code)


def ended(pids: list[int], seconds: float) -> bool:
    """Whether all have ended within that time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for pid in list(pids):
            if os.waitpid(pid, os.WNOHANG)[0]:
                pids.remove(pid)
        if not pids:
            return True
        time.sleep(0.01)
    return False


def _finished(directory: Path) -> bool:
    found = read_ending(directory)
    return found is not None and found.kind is EndingKind.FINISHED


def _until_it_trains(directory: Path, pids: list[int]) -> None:
    """Until this life has written a line, or ended."""
    metrics = directory / "metrics.jsonl"
    before = metrics.stat().st_size if metrics.exists() else 0
    while not ended(pids, 0.01) and (metrics.stat().st_size if metrics.exists() else 0) == before:
        pass


def kill(pids: list[int], how_many: int, dice: random.Random) -> None:
    for pid in dice.sample(pids, min(how_many, len(pids))):
        os.kill(pid, signal.SIGKILL)
    if not ended(pids, 20.0):  # the others end by themselves; on a busy machine not at once
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        ended(pids, 60.0)


def result(directory: Path) -> dict[str, Any]:
    newest = CheckpointManifest.read(find(directory)[0])
    assert newest.standing.iteration == ITERATIONS, newest.standing
    return {name: (facts.bytes, facts.sha256) for name, facts in newest.files.items()}


def killed_run(file: Path, directory: Path, num_ranks: int, whole: float, dice: random.Random, tally: Tally) -> None:
    """One run, killed at random until it comes to its end: at most six times, most of them while it trains."""
    for number in range(100):
        pids = life(file, directory, num_ranks)
        tally.lives += 1
        if number < 6 and dice.random() < 0.9:  # else at any moment, before the first iteration too
            _until_it_trains(directory, pids)
        if ended(pids, dice.uniform(0.0, 0.9) * whole if number < 6 else 300.0):
            if _finished(directory):
                return
            continue
        trains = (directory / "metrics.jsonl").exists()
        kill(pids, dice.choice([1, num_ranks, num_ranks]) if trains else num_ranks, dice)
        tally.kills += 1
    raise AssertionError(f"{directory} never came to its end; see {directory.with_suffix('.log')}")


def measure(kills: int, seed: int, folder: Path, say: Any) -> dict[str, Any]:
    dice, tally, by_case = random.Random(seed), Tally(), Counter[str]()
    expected: dict[str, tuple[Any, float]] = {}
    for number, case in enumerate(CASES * (1 + kills)):
        if tally.kills >= kills:
            break
        name = "-".join(str(value) for value in case.values())
        file = folder / f"{name}.yaml"
        num_ranks = 2 * int(case["data_parallel_size"])
        if name not in expected:
            file.write_text(yaml.safe_dump(config(case)))
            if not ended(life(file, folder / name, num_ranks), 300.0) or not _finished(folder / name):
                raise AssertionError(f"{name} does not train: {(folder / name).with_suffix('.log').read_text()}")
            spent = json.loads((folder / name / "summary.json").read_text())["total_time_seconds"]
            expected[name] = (result(folder / name), 1.5 * spent)
        directory, before = folder / f"{name}-{number}", tally.kills
        killed_run(file, directory, num_ranks, expected[name][1], dice, tally)
        equal = result(directory) == expected[name][0]
        tally.runs, tally.unequal = tally.runs + 1, tally.unequal + (not equal)
        by_case[name] += tally.kills - before
        say(f"{name}: {tally.kills - before} kills, {'equal' if equal else 'NOT EQUAL'}; {tally.kills} in all")
        if equal:
            shutil.rmtree(directory)
    return {**tally.__dict__, "by_case": dict(by_case), "seed": seed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="Six kills.")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="vpipe-kills-"))  # not one that cleans up at exit: ranks are forks of this
    say = (lambda text: None) if chosen.json else lambda text: print(text, flush=True)
    for name in (*PRELOAD, "vpipe.train.worker"):
        import_module(name)  # once for all lives, as the launcher does
    found = measure(6 if chosen.quick else chosen.kills, chosen.seed, folder, say)
    shutil.rmtree(folder)
    words = f"{found['kills']} kills, {found['runs']} runs, {found['unequal']} unequal"
    print(json.dumps(found) if chosen.json else words)
    return 1 if found["unequal"] else 0


if __name__ == "__main__":
    sys.exit(main())
