"""Peak live bytes of tensors on each rank: 1f1b must not grow with the number of microbatches; torch's in the same
run."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

WIDTH, ROWS = 512, 64


def rank(task: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from peers import TorchPipeline
    from torch import nn

    from vpipe import Pipeline
    from vpipe.runtime.memory.live import LiveBytes

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    side, m, schedule = task["side"], task["microbatches"], task["schedule"]
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(8)]
    loss = nn.functional.mse_loss

    def sgd(ps: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(ps, lr=0.01)

    pipe: Any
    if side == "vpipe":
        pipe = Pipeline(layers, loss, schedule=schedule, num_microbatches=m, optimizer=sgd)
    else:
        pipe = TorchPipeline(layers, loss, schedule, m, [2] * dist.get_world_size(), sgd)
    x, y = torch.randn(ROWS * m, WIDTH), torch.randn(ROWS * m, WIDTH)
    pipe.train_step(x, y)
    gc.collect()
    with LiveBytes() as live:
        pipe.train_step(x, y)
    common.answer(task, live.peak)
    dist.barrier()
    dist.destroy_process_group()


def table(result: dict[str, Any]) -> str:
    lines = ["peak live tensor bytes of rank 0 beyond the batch itself, MiB; growth = m=64 over m=8"]
    for name, row in result["rows"].items():
        lines.append(
            f"{name:16} m=8 {row['8'] / 2**20:7.2f}   m=64 {row['64'] / 2**20:7.2f}   growth {row['growth']:.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    arguments = common.options(__doc__ or "", rank)
    rows = {}
    for side in ("vpipe", "torch"):
        for schedule in ("1f1b", "gpipe"):
            peaks = {
                m: max(common.launch(__file__, 4, {"side": side, "microbatches": m, "schedule": schedule}))
                for m in (8, 64)
            }
            rows[f"{side} {schedule}"] = {**{str(m): peak for m, peak in peaks.items()}, "growth": peaks[64] / peaks[8]}
    common.finish(arguments, {"question": "memory", "rows": rows}, table)


if __name__ == "__main__":
    main()
