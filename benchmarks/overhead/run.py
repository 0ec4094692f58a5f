"""What the runtime itself costs: CPU time per microbatch on a middle stage beyond the module's own work, on three
ranks, and on two, where each may have a core of its own."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

PAIRS = {"F/B (gpipe)": "gpipe", "F/B (interleaved, torch's IR runtime)": "interleaved", "F/I/W (zb-v)": "zb-v"}
MIDDLE = 1
"""The rank whose time is measured: of three the middle one, of two the last."""
TWO_RANKS = ("interleaved", "zb-v")
"""What is measured on two ranks too, of which each may have a core of its own. (gpipe has no middle stage there.)"""
WIDTH, ROWS = 64, 4


def rank(task: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from peers import TorchPipeline
    from torch import nn

    from vpipe import Pipeline

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    schedule, m, repeats = task["schedule"], task["microbatches"], task["repeats"]
    stages_per_rank = 1 if schedule == "gpipe" else 2
    num_stages = stages_per_rank * dist.get_world_size()
    loss = nn.functional.mse_loss

    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(num_stages)]

    def sgd(ps: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(ps, lr=0.01)

    ours = Pipeline(
        layers(),
        loss,
        schedule=schedule,
        num_microbatches=m,
        optimizer=sgd,
        skip_nonfinite=False,
        transport=task["transport"],
    )
    peer = TorchPipeline(layers(), loss, schedule, m, [1] * num_stages, sgd)
    x, y = torch.randn(ROWS * m, WIDTH), torch.randn(ROWS * m, WIDTH)
    modules = layers()[:stages_per_rank]
    units = [torch.randn(ROWS, WIDTH, requires_grad=True) for _ in range(m)]
    gradient = torch.ones(ROWS, WIDTH)

    def alone() -> None:
        """A middle rank's own work: all forwards, then all backwards, of as many modules, and nothing else."""
        outputs = [module(unit) for module in modules for unit in units]
        for output in outputs:
            output.backward(gradient)

    sides: dict[str, Any] = {
        "vpipe": lambda: ours.train_step(x, y),
        "torch": lambda: peer.train_step(x, y),
        "alone": alone,
    }
    found: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 3):
        for name, step in sides.items():
            dist.barrier()
            begin = time.process_time()
            step()
            if repeat >= 3:
                found[name].append((time.process_time() - begin) / (m * stages_per_rank) * 1e6)
    common.answer(task, found)
    dist.barrier()
    dist.destroy_process_group()


def table(result: dict[str, Any]) -> str:
    lines = ["CPU time per microbatch and middle stage beyond the module's own work, µs (median, quartiles)"]
    for name, row in result["rows"].items():
        ours, peer = row["vpipe"], row["torch"]
        lines.append(
            f"{name:48} vpipe {ours['median']:6.0f} ({ours['low']:.0f}–{ours['high']:.0f})   "
            f"torch {peer['median']:6.0f} "
            f"({peer['low']:.0f}–{peer['high']:.0f})   ratio {row['ratio']:.2f}   (module alone {row['own']:.0f})"
        )
    return "\n".join(lines)


def main() -> None:
    arguments = common.options(__doc__ or "", rank, transports=True)
    transport = "distributed" if arguments.gloo else "auto"
    cases = [(name, schedule, 3) for name, schedule in PAIRS.items()]
    cases += [(f"{name}, 2 ranks", schedule, 2) for name, schedule in PAIRS.items() if schedule in TWO_RANKS]
    rows = {}
    for name, schedule, num_ranks in cases:
        task = {
            "schedule": schedule,
            "microbatches": 30,
            "repeats": 5 if arguments.quick else 30,
            "transport": transport,
        }
        middle = common.launch(__file__, num_ranks, task)[MIDDLE]
        own = middle.pop("alone")
        sides = {side: common.summary([a - b for a, b in zip(middle[side], own, strict=True)]) for side in middle}
        ratio = sides["vpipe"]["median"] / sides["torch"]["median"]
        rows[name] = {**sides, "own": common.summary(own)["median"], "ratio": ratio}
    common.finish(arguments, {"question": "overhead", "rows": rows}, table)


if __name__ == "__main__":
    main()
