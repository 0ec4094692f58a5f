"""Peak live bytes of tensors on each rank: 1f1b must not grow with the number of microbatches; torch's in the same
run."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

WIDTH, ROWS = 512, 64


def live_bytes(step: Callable[[], Any], *but: Any) -> int:
    """The most bytes of living storages that operations of ``step`` have made, ``but`` for those of some tensors."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Live(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.sizes: dict[int, int] = {tensor.untyped_storage()._cdata: 0 for tensor in but}
            self.now = self.peak = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else (result,):
                if isinstance(tensor, torch.Tensor):
                    self.add(tensor.untyped_storage())
            return result

        def add(self, storage: Any) -> None:
            key = storage._cdata
            if key not in self.sizes:
                self.sizes[key] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.drop, key)

        def drop(self, key: int) -> None:
            self.now -= self.sizes.pop(key, 0)

    with Live() as live:
        step()
    return live.peak


def rank(task: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from peers import TorchPipeline
    from torch import nn

    from vpipe import Pipeline

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
    common.answer(task, live_bytes(lambda: pipe.train_step(x, y), x, y))
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
    arguments = common.options(__doc__ or "")
    if arguments.rank_task:
        rank(json.loads(arguments.rank_task))
        return
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
