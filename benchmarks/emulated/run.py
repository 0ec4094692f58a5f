"""Emulated devices: layers that sleep. How near is a measured step to the simulation, on more ranks than there are
cores?"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "pipedream")
MICROBATCHES = 16
FORWARD = INPUT_GRAD = WEIGHT_GRAD = 0.050
"""Seconds of one rank's whole share of a microbatch."""


def rank(task: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    from vpipe import Pipeline
    from vpipe.models.emulated import SleepLayer
    from vpipe.schedule import catalog

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    schedule, num_ranks = task["schedule"], dist.get_world_size()
    num_stages = catalog.build(schedule, num_ranks, MICROBATCHES).num_stages
    share = num_ranks / num_stages
    layers = [SleepLayer(FORWARD * share, INPUT_GRAD * share, WEIGHT_GRAD * share) for _ in range(num_stages)]
    pipe = Pipeline(
        layers,
        lambda output, target: output.sum() * 0,
        schedule=schedule,
        num_microbatches=MICROBATCHES,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0),
    )
    x = torch.zeros(MICROBATCHES, 16)
    found = []
    for repeat in range(task["repeats"] + 1):
        dist.barrier()
        begin = time.perf_counter()
        pipe.train_step(x, x)
        dist.barrier()
        if repeat:
            found.append(time.perf_counter() - begin)
    common.answer(task, found)
    dist.destroy_process_group()


def table(result: dict[str, Any]) -> str:
    lines = [f"measured step over simulated step; {MICROBATCHES} microbatches, F = I = W = {FORWARD * 1e3:.0f} ms"]
    for name, row in result["rows"].items():
        seconds = row["measured"]
        lines.append(
            f"{name:18} simulated {row['simulated']:.3f} s   measured {seconds['median']:.3f} "
            f"({seconds['low']:.3f}–{seconds['high']:.3f})   ratio {row['ratio']:.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    arguments = common.options(__doc__ or "", rank)
    from vpipe.schedule import catalog
    from vpipe.schedule.costs import uniform
    from vpipe.schedule.simulate import simulate

    rows = {}
    for num_ranks in (4, 8):
        for schedule in SCHEDULES:
            program = catalog.build(schedule, num_ranks, MICROBATCHES)
            costs = uniform(program.placement, forward=FORWARD, input_grad=INPUT_GRAD, weight_grad=WEIGHT_GRAD)
            expected = simulate(program, costs).makespan
            measured = common.launch(
                __file__, num_ranks, {"schedule": schedule, "repeats": 1 if arguments.quick else 3}
            )[0]
            facts = common.summary(measured)
            rows[f"{schedule} p={num_ranks}"] = {
                "simulated": expected,
                "measured": facts,
                "ratio": facts["median"] / expected,
            }
    common.finish(arguments, {"question": "emulated", "rows": rows}, table)


if __name__ == "__main__":
    main()
