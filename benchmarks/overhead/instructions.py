"""What the runtime itself costs, counted instead of timed: instructions of the middle rank per microbatch and stage.

    python benchmarks/overhead/instructions.py [--quick] [--json]

Instructions are the same from run to run, whatever else the machine does, so that a change of one percent shows. The
middle rank of the same three runs under ``valgrind --tool=callgrind`` (it must be installed), which counts from the
fourth step on. What it does not see is the kernel: sockets, waking, gloo's threads waiting for their lock.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import common
from run import PAIRS, ROWS, WIDTH

SIDES = ("alone", "vpipe", "torch")
MICROBATCHES = 30


def rank(task: dict[str, Any]) -> None:
    """One of three: some steps to warm up, then those that are counted."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    step = stepping(task["side"], task["schedule"])
    for _ in range(3):
        step()
    dist.barrier()
    if dist.get_rank() == 1:
        _counting("on")
    for _ in range(task["steps"]):
        step()
    if dist.get_rank() == 1:
        _counting("off")
    dist.barrier()
    os._exit(0)  # to take an interpreter apart under valgrind takes longer than the steps


def stepping(side: str, schedule: str) -> Callable[[], Any]:
    """The step of one side; ``alone`` is a middle rank's own work, as in ``run.py``."""
    import torch
    from peers import TorchPipeline
    from torch import nn

    from vpipe import Pipeline

    torch.set_num_threads(1)
    torch.manual_seed(0)
    num_stages = 3 if schedule == "gpipe" else 6
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(num_stages)]
    x, y = torch.randn(ROWS * MICROBATCHES, WIDTH), torch.randn(ROWS * MICROBATCHES, WIDTH)
    loss = nn.functional.mse_loss

    def sgd(ps: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(ps, lr=0.01)

    if side == "torch":
        peer = TorchPipeline(layers, loss, schedule, MICROBATCHES, [1] * num_stages, sgd)
        return lambda: peer.train_step(x, y)
    if side == "vpipe":
        ours = Pipeline(
            layers, loss, schedule=schedule, num_microbatches=MICROBATCHES, optimizer=sgd, skip_nonfinite=False
        )
        return lambda: ours.train_step(x, y)
    units = [torch.randn(ROWS, WIDTH, requires_grad=True) for _ in range(MICROBATCHES)]
    gradient = torch.ones(ROWS, WIDTH)

    def alone() -> None:
        for output in [module(unit) for module in layers[: num_stages // 3] for unit in units]:
            output.backward(gradient)

    return alone


def _counting(switch: str) -> None:
    """Tell the valgrind around this process to begin or to end."""
    subprocess.run(["callgrind_control", f"--instr={switch}", str(os.getpid())], check=True, stdout=subprocess.DEVNULL)


def counted(side: str, schedule: str, steps: int) -> float:
    """Instructions of the middle rank per microbatch and stage."""
    with tempfile.TemporaryDirectory() as directory:
        around = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={directory}/out"]
        said = Path(directory, "said")
        with said.open("w") as stream:
            task = {"side": side, "schedule": schedule, "steps": steps}
            common.launch(__file__, 3, task, around={1: around}, errors={1: stream}, answers=False)
        found = re.search(r"Collected\s*:\s*(\d+)", said.read_text())
    if found is None:
        raise SystemExit("valgrind has counted nothing; is it installed with callgrind_control?")
    return int(found[1]) / (steps * MICROBATCHES * (1 if schedule == "gpipe" else 2))


def table(result: dict[str, Any]) -> str:
    lines = ["instructions per microbatch and middle stage beyond the module's own, thousands (and the module's own)"]
    for name, row in result["rows"].items():
        ours, peer = row["vpipe"] - row["alone"], row["torch"] - row["alone"]
        lines.append(
            f"{name:42} vpipe {ours / 1e3:5.0f}   torch {peer / 1e3:5.0f}   ratio {row['ratio']:.2f}   "
            f"(module alone {row['alone'] / 1e3:.0f})"
        )
    return "\n".join(lines)


def main() -> None:
    arguments = common.options(__doc__ or "", rank)
    rows = {}
    for name, schedule in PAIRS.items():
        row = {side: counted(side, schedule, steps=1 if arguments.quick else 4) for side in SIDES}
        row["ratio"] = (row["vpipe"] - row["alone"]) / (row["torch"] - row["alone"])
        rows[name] = row
    common.finish(arguments, {"question": "overhead, in instructions", "rows": rows}, table)


if __name__ == "__main__":
    main()
