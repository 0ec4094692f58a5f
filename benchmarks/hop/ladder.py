"""Where the millisecond of a hop is: 1f1b with sleeping layers by a loop of a few lines, one ingredient after the
other, and then our engine."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "emulated"))
import common

STEPS = {
    "sleeps, and a byte through a pipe": {"copies": False, "graph": False},
    "and two copies of 256 KB": {"graph": False},
    "and autograd": {},
    "the same, polling 200 µs": {"poll": 200e-6},
    "the same, polling 1 ms": {"poll": 1e-3},
}
"""Name → ingredients of ``emulated/bare.py``."""
ENGINE = "vpipe through shared memory"
RANKS, MICROBATCHES, NUMBERS, SECONDS = 4, 16, 64 * 1024, 0.004
SIMULATED = (MICROBATCHES + RANKS - 1) * 3 * SECONDS


def rank(task: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from bare import BarePipeline, Ingredients

    from vpipe import Pipeline
    from vpipe.models.emulated import SleepLayer
    from vpipe.schedule import catalog

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    program = catalog.build("1f1b", RANKS, MICROBATCHES)
    layers = [SleepLayer(SECONDS, SECONDS, SECONDS) for _ in range(RANKS)]

    def loss(output: Any, target: Any) -> Any:
        return output.sum() * 0

    def sgd(ps: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(ps, lr=0.0)

    def bare(number: int, ingredients: dict[str, Any]) -> BarePipeline:
        directory = Path(task["directory"]) / str(number)
        directory.mkdir(exist_ok=True)
        return BarePipeline(layers, loss, program, dist.get_rank(), sgd, directory, NUMBERS, Ingredients(**ingredients))

    sides: dict[str, Any] = {name: bare(number, STEPS[name]) for number, name in enumerate(STEPS)}
    sides[ENGINE] = Pipeline(layers, loss, schedule="1f1b", num_microbatches=MICROBATCHES, optimizer=sgd)
    x = torch.zeros(MICROBATCHES, NUMBERS)
    found: dict[str, list[list[float]]] = {name: [] for name in sides}
    for repeat in range(task["repeats"] + 2):
        for name, pipe in sides.items():
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            pipe.train_step(x, x)
            cpu = time.process_time() - cpu
            dist.barrier()
            if repeat >= 2:
                found[name].append([time.perf_counter() - begin, cpu])
    common.answer(task, found)
    dist.destroy_process_group()


def table(result: dict[str, Any]) -> str:
    lines = [
        f"1f1b on {RANKS} ranks, F/B 4/8 ms: step over simulation (median, quartiles), ms of processor a step and rank"
    ]
    for name, row in result["rows"].items():
        ratio = row["ratio"]
        spread = f"{ratio['median']:.3f} ({ratio['low']:.3f}–{ratio['high']:.3f})"
        lines.append(f"{name:36}{spread:>24}{row['cpu']['median'] * 1e3:8.1f}")
    return "\n".join(lines)


def main() -> None:
    arguments = common.options(__doc__ or "", rank)
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        task = {"repeats": 4 if arguments.quick else 12, "directory": directory}
        ranks = common.launch(__file__, RANKS, task)
    rows = {
        name: {
            "ratio": common.summary([wall / SIMULATED for wall, _ in ranks[0][name]]),
            "cpu": common.summary([cpu for each in ranks for _, cpu in each[name]]),
        }
        for name in [*STEPS, ENGINE]
    }
    common.finish(arguments, {"question": "ladder", "rows": rows}, table)


if __name__ == "__main__":
    main()
