"""What does a head in shards buy? The step over the ideal step for shapes of real models, simulated for the best cut of
a whole head and for a split one, and measured on layers that sleep."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

SHAPES = {
    "GPT-2 small": (12, 50257 * 768 / 7.08e6),
    "Qwen2.5-0.5B": (24, 151936 * 896 / 14.9e6),
    "Llama-3.2-1B": (16, 128256 * 2048 / 60.8e6),
    "Gemma-3-1B": (26, 262144 * 1152 / 26.8e6),
    "Llama-3-8B": (32, 128256 * 4096 / 218e6),
}
"""Name → (blocks, how many blocks the head weighs, by their weights)."""
SIDES = {"1f1b": False, "zb-h1": False, "zb-v split": True}
SECONDS = 0.06
"""Of one rank's forward of a microbatch, where layers sleep."""


def cut_of(num_blocks: int, head: float, num_ranks: int, split: bool) -> tuple[list[float], list[int]]:
    """(work of every layer, layers per stage): a norm and an embedding weigh nothing and are left out."""
    from vpipe.layer import balanced
    from vpipe.train.cut import by_work

    if not split:
        work = [1.0] * num_blocks + [head]
        return work, balanced(work, num_ranks)
    work = [1.0] * num_blocks + [head / num_ranks] * num_ranks + [0.0]
    return work, by_work(work, num_ranks, 2 * num_ranks)


def simulated(num_blocks: int, head: float, num_ranks: int, side: str) -> float:
    """The step over the ideal step."""
    from vpipe.schedule import catalog
    from vpipe.schedule.simulate import simulate
    from vpipe.schedule.timeline import Costs, StageCosts

    work, counts = cut_of(num_blocks, head, num_ranks, SIDES[side])
    num_microbatches = 4 * num_ranks
    first, stages = 0, []
    for count in counts:
        share = sum(work[first : first + count])
        stages.append(StageCosts(share, share, share))
        first += count
    program = catalog.build(side.split()[0], num_ranks, num_microbatches)
    return simulate(program, Costs(tuple(stages))).makespan / ideal(num_blocks, head, num_ranks, num_microbatches)


def ideal(num_blocks: int, head: float, num_ranks: int, num_microbatches: int) -> float:
    return 3 * num_microbatches * (num_blocks + head) / num_ranks


def rank(task: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn

    from vpipe import Layer, Pipeline
    from vpipe.models.emulated import SleepLayer

    class Shard(SleepLayer):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return super().forward(x)[:, :2]

    class Join(nn.Module):
        def forward(self, labels: Tensor, *shards: Tensor) -> Tensor:
            return torch.stack(shards).sum()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    num_ranks, num_microbatches = dist.get_world_size(), 4 * dist.get_world_size()
    num_blocks, head = SHAPES[task["shape"]]
    seconds = SECONDS * num_ranks / (num_blocks + head)
    x = torch.zeros(num_microbatches, 1024)
    sides: dict[str, Any] = {}
    for side, split in SIDES.items():
        work, counts = cut_of(num_blocks, head, num_ranks, split)
        layers: list[Any] = [SleepLayer(*[seconds * share] * 3) for share in work[: num_blocks + (not split)]]
        if split:
            shares = [seconds * share for share in work[num_blocks:-1]]
            layers += [Layer(Shard(*[s] * 3), ("x", "labels"), (f"s{i}",)) for i, s in enumerate(shares)]
            layers += [Layer(Join(), ("labels", *(f"s{i}" for i in range(num_ranks))))]
        sides[side] = Pipeline(
            layers,
            lambda output, target: output.sum() * 0,
            schedule=side.split()[0],
            num_microbatches=num_microbatches,
            partition=counts,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        )
    found: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(task["repeats"] + 1):
        for side, pipe in sides.items():
            dist.barrier()
            begin = time.perf_counter()
            pipe.train_step({"x": x, "labels": x[:, :1]} if SIDES[side] else x, x)
            dist.barrier()
            if repeat:
                found[side].append((time.perf_counter() - begin) / (3 * num_microbatches * SECONDS))
    common.answer(task, found)
    dist.destroy_process_group()


def table(result: dict[str, Any]) -> str:
    lines = [f"step over ideal step, 4 microbatches a rank\n{'':26}" + "".join(f"{side:>20}" for side in SIDES)]
    for name, row in result["rows"].items():
        told = [f"{row['simulated'][side]:.3f}" for side in SIDES]
        if "measured" in row:
            told = [f"{value} ({row['measured'][side]['median']:.3f})" for value, side in zip(told, SIDES, strict=True)]
        lines.append(f"{name:26}" + "".join(f"{value:>20}" for value in told))
    return "\n".join([*lines, "in brackets: measured, layers that sleep"])


def choices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--measured", nargs="*", choices=SHAPES, default=["Qwen2.5-0.5B"], help="shapes to run, too")


def main() -> None:
    arguments = common.options(__doc__ or "", rank, more=choices)
    rows: dict[str, Any] = {}
    for name, (num_blocks, head) in SHAPES.items():
        for num_ranks in arguments.ranks:
            row: dict[str, Any] = {"simulated": {side: simulated(num_blocks, head, num_ranks, side) for side in SIDES}}
            if name in arguments.measured and not arguments.quick:
                ranks = common.launch(__file__, num_ranks, {"shape": name, "repeats": 3})
                row["measured"] = {side: common.summary(ranks[0][side]) for side in SIDES}
            rows[f"{name}, {num_ranks} ranks"] = row
    common.finish(arguments, {"rows": rows, "load": os.getloadavg()[0]}, table)


if __name__ == "__main__":
    main()
