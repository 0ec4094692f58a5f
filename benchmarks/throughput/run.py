"""A GPT on two gloo ranks: our step time against torch.distributed.pipelining's, schedule by schedule, interleaved."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

PIPEDREAM = (
    "pipedream, an update a batch",
    "pipedream, an update a microbatch",
    "pipedream, an update a microbatch, both fused",
)
"""The last has torch's fused Adam on both sides: four times as fast, and its last bits are its own."""
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-v", *PIPEDREAM)
MICROBATCHES, ROWS, LENGTH, VOCABULARY = 8, 2, 64, 512


def rank(task: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from peers import TorchPipeline

    from vpipe import Pipeline
    from vpipe.models.model import build

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    schedule, _, updates = task["schedule"].partition(", ")
    repeats, against = task["repeats"], task["against"]
    num_stages = 2 if against in ("gpipe", "1f1b") else 4
    section = {"hidden_size": 128, "num_layers": 6, "num_heads": 4, "sequence_length": LENGTH, "vocab_size": VOCABULARY}
    model = build("gpt", section)
    partition = {2: [4, 4], 4: [2, 2, 2, 2]}[num_stages]

    def adam(ps: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(ps, lr=1e-3, fused=True if updates.endswith("fused") else None)

    units = MICROBATCHES * (task["chain"] if schedule == "pipedream" else 1)
    ours = Pipeline(
        model.layers,
        model.loss,
        schedule=schedule,
        num_microbatches=units,
        optimizer=adam,
        partition=partition,
        skip_nonfinite=False,
        transport=task["transport"],
        schedule_options={"update_interval": MICROBATCHES} if updates == "an update a batch" else None,
    )
    peer = TorchPipeline(model.build(), model.loss, against, MICROBATCHES, partition, adam)
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (ROWS * units, LENGTH + 1))
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    rows = ROWS * MICROBATCHES
    sides: dict[str, Any] = {
        "vpipe": (lambda: ours.train_step(x, y), units / MICROBATCHES),
        "torch": (lambda: peer.train_step(x[:rows], y[:rows]), 1),
    }
    found: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 2):
        for name, (step, batches) in sides.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            dist.barrier()
            if repeat >= 2:
                found[name].append((time.perf_counter() - begin) / batches * 1e3)
    common.answer(task, found)
    dist.destroy_process_group()


def table(result: dict[str, Any]) -> str:
    lines = [f"milliseconds per batch of {MICROBATCHES} microbatches (median, quartiles); speed = torch / vpipe"]
    for name, row in result["rows"].items():
        ours, peer = row["vpipe"], row["torch"]
        lines.append(
            f"{name:46} vpipe {ours['median']:7.1f} ({ours['low']:.1f}–{ours['high']:.1f})   torch {row['against']:12} "
            f"{peer['median']:7.1f} ({peer['low']:.1f}–{peer['high']:.1f})   speed {row['ratio']:.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    arguments = common.options(__doc__ or "", rank, transports=True)
    transport = "distributed" if arguments.gloo else "auto"
    rows = {}
    for schedule in SCHEDULES:
        against = "1f1b" if schedule in PIPEDREAM else schedule
        task = {
            "schedule": schedule,
            "against": against,
            "repeats": 4 if arguments.quick else 20,
            "chain": 8,
            "transport": transport,
        }
        first = common.launch(__file__, 2, task)[0]
        sides = {side: common.summary(first[side]) for side in ("vpipe", "torch")}
        ratio = sides["torch"]["median"] / sides["vpipe"]["median"]
        rows[schedule] = {**sides, "ratio": ratio, "against": against}
    common.finish(arguments, {"question": "throughput", "rows": rows}, table)


if __name__ == "__main__":
    main()
