"""What a stage of a GPT takes, in time and resident memory, when its activations are kept, recomputed or swapped.

One rank, gpipe, so that all microbatches are in flight. Every treatment runs in a process of its own, because memory is
measured by what the system says of the process; the processes take turns.
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

MICROBATCHES, ROWS, LENGTH, WIDTH, LAYERS = 8, 4, 256, 256, 4
TREATMENTS: dict[str, dict[str, float]] = {
    "keep": {},
    "recompute": {"recompute": 1.0},
    "swap": {"swap": 1.0},
    "half and half": {"swap": 0.5, "recompute": 0.5},
}


def resident(name: str) -> int:
    """A line of the process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def rank(task: dict[str, Any]) -> None:
    import torch

    from vpipe import Pipeline
    from vpipe.models.gpt import gpt

    torch.set_num_threads(1)
    model = gpt(vocab_size=512, hidden_size=WIDTH, num_layers=LAYERS, num_heads=4, sequence_length=LENGTH)
    pipe = Pipeline(
        model.layers,
        model.loss,
        schedule="gpipe",
        num_microbatches=MICROBATCHES,
        num_ranks=1,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.01),
        **TREATMENTS[task["treatment"]],
    )
    torch.manual_seed(0)
    tokens = torch.randint(0, 512, (MICROBATCHES * ROWS, LENGTH))
    pipe.train_step(tokens[:MICROBATCHES], tokens[:MICROBATCHES])
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, seconds, cpu = resident("VmRSS"), [], []
    for _ in range(task["steps"]):
        begin, spent = perf_counter(), process_time()
        loss = pipe.train_step(tokens, tokens)
        seconds.append(perf_counter() - begin)
        cpu.append(process_time() - spent)
    records = pipe.trace().records[0]
    waited = sum(each.ready - each.begin for each in records if each.action.kind.value in ("B", "R"))
    common.answer(
        task,
        {
            "seconds": seconds,
            "cpu": cpu,
            "peak": resident("VmHWM") - before,
            "moved": sum(each.bytes for each in records),
            "waited": waited / 1e9,
            "loss": loss,
        },
    )


def table(result: dict[str, Any]) -> str:
    lines = [
        "median step, its processor time (of all threads, whoever else is busy), peak resident memory above the start, "
        "bytes out and in, waiting for the lane"
    ]
    for name, row in result["rows"].items():
        lines.append(
            f"{name:14} {row['step']['median'] * 1000:6.0f} ms   cpu {row['cpu']['median'] * 1000:6.0f} ms "
            f"({row['cpu_ratio']:.2f} × keep)   "
            f"{row['peak'] / 2**20:6.0f} MiB ({row['memory_ratio']:.2f} × keep)   "
            f"moved {row['moved'] / 2**20:6.0f} MiB   waited {row['waited'] * 1000:5.0f} ms"
        )
    return "\n".join(lines)


def main() -> None:
    arguments = common.options(__doc__ or "", rank)
    rounds, steps = (1, 2) if arguments.quick else (3, 4)
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in TREATMENTS}
    for _ in range(rounds):
        for name in TREATMENTS:
            seen[name] += common.launch(__file__, 1, {"treatment": name, "steps": steps})
    assert len({found["loss"] for runs in seen.values() for found in runs}) == 1, "no treatment changes a bit"
    rows: dict[str, dict[str, Any]] = {}
    for name, runs in seen.items():
        rows[name] = {
            "step": common.summary([each for found in runs for each in found["seconds"]]),
            "cpu": common.summary([each for found in runs for each in found["cpu"]]),
            "peak": max(found["peak"] for found in runs),
            "moved": runs[-1]["moved"],
            "waited": min(found["waited"] for found in runs),
        }
    for row in rows.values():
        row["time_ratio"] = row["step"]["median"] / rows["keep"]["step"]["median"]
        row["cpu_ratio"] = row["cpu"]["median"] / rows["keep"]["cpu"]["median"]
        row["memory_ratio"] = row["peak"] / rows["keep"]["peak"]
    common.finish(arguments, {"question": "swap", "rows": rows}, table)


if __name__ == "__main__":
    main()
