"""Is the ranking of one device, DDP, FSDP and a pipeline predicted as it is measured?

Two ranks, each with one core, connected by gloo: over loopback, and over a cable of 200 Mbit/s between two network
namespaces (root only). For every model, layers and link are measured, ``vpipe.plan.against`` predicts, and all four
ways train the same rows, interleaved."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

UNITS, LAYERS = 8, 8
SHAPES = {"wide, few rows": (768, 8), "wide": (512, 64), "middle": (256, 256), "narrow, many rows": (128, 1024)}
"""Name → (width of a layer, rows of a unit): weights against work."""
RATE = "200mbit"


def rank(task: dict[str, Any]) -> None:
    """Measure layers and link, then train each way in turn."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from vpipe import Pipeline
    from vpipe.layer import as_layers
    from vpipe.plan.profile import Measuring, measure_layers
    from vpipe.plan.sharding import measure_wrappers
    from vpipe.plan.transfer import empty_pipeline, measure_link, measure_overhead
    from vpipe.runtime.transport.distributed import DistributedTransport

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    width, rows = task["shape"]

    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)]

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-3)

    loss = nn.functional.mse_loss
    unit = (torch.randn(rows, width), torch.randn(rows, width))
    measuring = Measuring(loss, optimizer, repeat=task["repeat"])
    costs, input_bytes = measure_layers(as_layers(layers()), *unit, measuring)
    link = measure_link(DistributedTransport(blocking=False, timeout=600), task["repeat"])
    own = vars(measure_wrappers(link, task["repeat"]))
    own["action_overhead"] = measure_overhead(empty_pipeline(2, "distributed", 600), task["repeat"])
    ways = _ways(task, layers, optimizer, loss, Pipeline)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(task["repeat"] + 1):
        for name, step in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            dist.barrier()
            if turn:
                times[name].append(time.perf_counter() - begin)
    fields = [{name: getattr(cost, name) for name in cost.__dataclass_fields__} for cost in costs]
    common.answer(task, {"layers": fields, "input": input_bytes, "link": vars(link), "own": own, "times": times})


def _ways(task: dict[str, Any], layers: Any, optimizer: Any, loss: Any, pipeline: Any) -> dict[str, Callable[[], Any]]:
    """Name → one step over all rows of a batch."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    width, rows = task["shape"]
    me = dist.get_rank()
    inputs, targets = torch.randn(UNITS * rows, width), torch.randn(UNITS * rows, width)
    alone, replica, shards = (nn.Sequential(*layers()) for _ in range(3))
    ddp = DistributedDataParallel(replica)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for layer in shards:
        fully_shard(layer, mesh=mesh)
    fully_shard(shards, mesh=mesh)
    pipe = pipeline(
        layers(),
        loss,
        schedule="1f1b",
        num_microbatches=UNITS,
        optimizer=optimizer,
        transport="distributed",
        timeout=600,
    )

    def plain(module: nn.Module, first: int, last: int, rounds: int) -> Callable[[], None]:
        stepper = optimizer(module.parameters())

        def step() -> None:
            size = (last - first) // rounds
            for k in range(rounds):
                part = slice(first + k * size, first + (k + 1) * size)
                last_one = k == rounds - 1 or not isinstance(module, DistributedDataParallel)
                with nullcontext() if last_one else module.no_sync():
                    (loss(module(inputs[part]), targets[part]) / rounds).backward()
            stepper.step()
            stepper.zero_grad()

        return step

    from contextlib import nullcontext

    half = UNITS * rows // 2
    here = (0, half) if me == 0 else (half, 2 * half)
    single = plain(alone, 0, 2 * half, UNITS)
    return {
        "single": single if me == 0 else lambda: None,
        "ddp": plain(ddp, *here, UNITS // 2),
        "fsdp": plain(shards, *here, 1),
        "pipeline": lambda: pipe.train_step(inputs if pipe.is_first else None, targets if pipe.is_last else None),
    }


@contextmanager
def cable() -> Iterator[list[str]]:
    """Two namespaces, joined by a cable that is slow both ways."""
    names = [f"va{os.getpid() % 10_000}{side}" for side in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
        for index, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.199.79.{index + 2}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            shape = [
                "tc",
                "qdisc",
                "add",
                "dev",
                "cable",
                "root",
                "tbf",
                "rate",
                RATE,
                "burst",
                "64kb",
                "latency",
                "1s",
            ]
            subprocess.run(["ip", "netns", "exec", name, *shape], check=True, capture_output=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def run(task: dict[str, Any], spaces: list[str] | None) -> list[Any]:
    """Both ranks, in their namespaces where there are some."""
    if spaces is None:
        return common.launch(__file__, 2, task)
    with tempfile.TemporaryDirectory() as directory:
        processes = []
        for rank, space in enumerate(spaces):
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "MASTER_ADDR": "10.199.79.2",
                "MASTER_PORT": "29517",
                "GLOO_SOCKET_IFNAME": "cable",
                "OMP_NUM_THREADS": "1",
            }
            words = json.dumps(task | {"answer": f"{directory}/rank{rank}.json"})
            command = ["ip", "netns", "exec", space, sys.executable, __file__, "--rank-task", words]
            processes.append(subprocess.Popen(command, env=environment))
        if any(codes := [process.wait(timeout=900) for process in processes]):
            raise SystemExit(f"a rank of {task} failed: exit codes {codes}")
        return [json.loads(Path(f"{directory}/rank{rank}.json").read_text()) for rank in range(2)]


def predicted(found: dict[str, Any]) -> dict[str, float]:
    """What the planner says of the four ways."""
    from vpipe.plan.against import compare
    from vpipe.plan.costs import LayerCost, Profile
    from vpipe.plan.machine import Machine
    from vpipe.plan.planner import plan

    profile = Profile(
        tuple(LayerCost(**layer) for layer in found["layers"]),
        input_bytes=found["input"],
        link_latency=found["link"]["latency"],
        link_bandwidth=found["link"]["bandwidth"],
        **found["own"],
    )
    ways = compare(["single", "ddp", "fsdp"], profile, Machine.of(2, None), UNITS)
    step = plan(profile, 2, num_microbatches=UNITS, schedule="1f1b", recompute=False, swap=False).step_time
    return {way.name: way.step_time for way in ways} | {"pipeline": step}


def main() -> None:
    arguments = common.options(__doc__ or "", rank)
    repeat = 3 if arguments.quick else 10
    rows = []
    shapes = dict(list(SHAPES.items())[:2]) if arguments.quick else SHAPES
    links: list[tuple[str, Any]] = [("loopback", None)]
    with cable() if os.geteuid() == 0 else _nothing() as spaces:
        links += [(RATE, spaces)] if spaces else []
        for link, where in links:
            for name, shape in shapes.items():
                found = run({"shape": shape, "repeat": repeat}, where)[0]
                said = predicted(found)
                seen = {way: statistics.median(times) for way, times in found["times"].items()}
                rows.append({"link": link, "model": name, "predicted": said, "measured": seen} | _score(said, seen))
    right, pairs = (sum(row[key] for row in rows) for key in ("right", "pairs"))
    best = sum(row["best"] for row in rows)
    common.finish(arguments, {"rows": rows, "clear_pairs": [right, pairs], "best_named": [best, len(rows)]}, table)


@contextmanager
def _nothing() -> Iterator[None]:
    yield None


def _score(said: dict[str, float], seen: dict[str, float]) -> dict[str, int]:
    """Of the pairs of ways that differ clearly (by a tenth), how many are in the predicted order."""
    clear = [(a, b) for a, b in combinations(seen, 2) if max(seen[a], seen[b]) > 1.1 * min(seen[a], seen[b])]
    right = sum((said[a] < said[b]) == (seen[a] < seen[b]) for a, b in clear)
    chosen = min(said, key=lambda way: said[way])
    return {"pairs": len(clear), "right": right, "best": int(seen[chosen] <= 1.1 * min(seen.values()))}


def table(result: dict[str, Any]) -> str:
    lines = [
        "ms per step, predicted / measured",
        f"{'link':9} {'model':18} {'single':>15} {'ddp':>15} {'fsdp':>15} {'pipeline':>15}",
    ]
    for row in result["rows"]:
        cells = [f"{1e3 * row['predicted'][way]:.1f} / {1e3 * row['measured'][way]:.1f}" for way in row["measured"]]
        lines.append(f"{row['link']:9} {row['model']:18} " + " ".join(f"{cell:>15}" for cell in cells))
    right, pairs = result["clear_pairs"]
    best, number = result["best_named"]
    lines.append(f"clear pairs in the predicted order: {right} of {pairs}")
    lines.append(f"the way that is predicted to be best is within a tenth of the best: {best} of {number}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
