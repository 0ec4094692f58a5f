"""Emulated devices: layers that sleep. How near is a measured step to the simulation, on more ranks than there are
cores, through shared memory, over gloo, under torch.distributed.pipelining, and by a loop of a few lines?"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "pipedream")
SPEEDS = {"20/40": 0.020, "4/8": 0.004}
"""Milliseconds of one rank's forward and backward of a microbatch → seconds of F, of I and of W."""
SIDES = {"bare": "", "shm": "auto", "gloo": "distributed", "torch": ""}
"""``bare`` is what the machine allows: a loop of a few lines over pipes (``bare.py``)."""
PEERS = ("gpipe", "1f1b", "interleaved")
"""Schedules that torch has too. (Its split backward would run the sleeping function's backward twice.) The loop
of a few lines knows F and B alone, too."""
MICROBATCHES, NUMBERS = 16, 64 * 1024
"""A message has 256 KB."""


def rank(task: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from bare import BarePipeline
    from peers import TorchPipeline

    from vpipe import Pipeline
    from vpipe.models.emulated import SleepLayer
    from vpipe.schedule import catalog

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    schedule, num_ranks = task["schedule"], dist.get_world_size()
    program = catalog.build(schedule, num_ranks, MICROBATCHES)
    num_stages = program.num_stages
    seconds = task["seconds"] * num_ranks / num_stages

    def loss(output: Any, target: Any) -> Any:
        return output.sum() * 0

    def sgd(ps: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(ps, lr=0.0)

    def pipeline(side: str) -> Any:
        layers = [SleepLayer(seconds, seconds, seconds) for _ in range(num_stages)]
        if side == "bare":
            return BarePipeline(layers, loss, program, dist.get_rank(), sgd, Path(task["directory"]), NUMBERS)
        if side == "torch":
            return TorchPipeline(layers, loss, schedule, MICROBATCHES, [1] * num_stages, sgd)
        return Pipeline(
            layers,
            loss,
            schedule=schedule,
            num_microbatches=MICROBATCHES,
            optimizer=sgd,
            transport=SIDES[side],
        )

    # The first stage computes an input gradient too, where torch would not: its time passes either way.
    x = torch.zeros(MICROBATCHES, NUMBERS)
    sides = {side: pipeline(side) for side in task["sides"]}
    found: dict[str, list[list[float]]] = {side: [] for side in sides}
    for repeat in range(task["repeats"] + 2):
        for side, pipe in sides.items():
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            pipe.train_step(x, x)
            cpu = time.process_time() - cpu
            dist.barrier()
            if repeat >= 2:
                found[side].append([time.perf_counter() - begin, cpu])
    common.answer(task, found)
    dist.destroy_process_group()


def table(result: dict[str, Any]) -> str:
    shown = [side for side in SIDES if any(side in row["sides"] for row in result["rows"].values())]
    lines = [
        f"measured step over simulated step, median (quartiles); {MICROBATCHES} microbatches, "
        f"messages of {NUMBERS * 4 // 1024} KB; and milliseconds of processor per step and rank",
        f"{'':28}{'simulated':>10}" + "".join(f"{side:>24}{'cpu':>6}" for side in shown),
    ]
    return "\n".join([*lines, *(line(name, row, shown) for name, row in result["rows"].items())])


def line(name: str, row: dict[str, Any], shown: list[str]) -> str:
    """A row; a side that it lacks stays empty."""
    found = f"{name:28}{row['simulated'] * 1e3:7.0f} ms"
    for side in shown:
        if side not in row["sides"]:
            found += " " * 30
        else:
            facts, cpu = row["sides"][side]["ratio"], row["sides"][side]["cpu"]["median"]
            spread = f"{facts['median']:.3f} ({facts['low']:.3f}–{facts['high']:.3f})"
            found += f"{spread:>24}{cpu * 1e3:6.0f}"
    return found


def measured(schedule: str, num_ranks: int, speed: str, sides: list[str], repeats: int) -> dict[str, Any]:
    """One row: every side's step over the simulated one."""
    from vpipe.schedule import catalog
    from vpipe.schedule.simulate import simulate
    from vpipe.schedule.timeline import uniform

    seconds = SPEEDS[speed]
    program = catalog.build(schedule, num_ranks, MICROBATCHES)
    costs = uniform(program.placement, forward=seconds, input_grad=seconds, weight_grad=seconds)
    expected = simulate(program, costs).makespan
    known = [side for side in sides if side in ("shm", "gloo") or schedule in PEERS]
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        task = {
            "schedule": schedule, "seconds": seconds, "sides": known, "repeats": repeats, "directory": directory
        }  # fmt: skip
        ranks = common.launch(__file__, num_ranks, task)
    return {
        "simulated": expected,
        "sides": {
            side: {
                "ratio": common.summary([wall / expected for wall, _ in ranks[0][side]]),
                "cpu": common.summary([cpu for rank in ranks for _, cpu in rank[side]]),
            }
            for side in known
        },
    }


def choices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--speeds", nargs="+", choices=SPEEDS, default=list(SPEEDS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))


def main() -> None:
    arguments = common.options(__doc__ or "", rank, more=choices)
    rows = {}
    for speed in arguments.speeds:
        repeats = 2 if arguments.quick else {"20/40": 3, "4/8": 9}[speed]
        for num_ranks in arguments.ranks:
            for schedule in arguments.schedules:
                name = f"{schedule} p={num_ranks}, {speed} ms"
                rows[name] = measured(schedule, num_ranks, speed, arguments.sides, repeats)
                print(line(name, rows[name], arguments.sides), file=sys.stderr)  # the whole takes minutes
    common.finish(arguments, {"question": "emulated", "rows": rows}, table)


if __name__ == "__main__":
    main()
