"""What is a plan worth that knows the machine: replicas of a stage, and a link that is slower than the others?

Emulated devices: real processes, real messages, layers that sleep. Four ranks run a model whose longest layer cannot be
divided, with one rank for each stage and with the replicas that the planner chooses. Three hosts (network namespaces,
root only), one of them behind a slow cable, run a model with narrow and wide boundaries: cut as if all links were
alike, cut by links that were measured, and with the hosts in an order that the planner chooses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

UNITS = 8
LONG_LAYER = [0.01, 0.01, 0.04, 0.01, 0.01]
"""Seconds of a layer's forward, input gradient and weight gradient each."""
LAYERS, SECONDS = 9, 0.01
NARROW, WIDE = 1 << 10, 1 << 18
"""Numbers of four bytes that cross a boundary."""
WIDTHS = [NARROW if layer in (1, 6) else WIDE for layer in range(LAYERS)]
RATE = "60mbit"
WEIGHTS, CAP = 1 << 20, 8 << 20
"""Bytes that the planner is told of a layer's weights and of a rank: all layers do not fit on one. (They cost nothing
here: a sleeping layer has one number, and the link is told to be free.)"""


def rank(task: dict[str, Any]) -> None:
    """Measure the links, or run sleeping layers by a layout."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from vpipe import Pipeline
    from vpipe.models.emulated import SleepLayer
    from vpipe.plan.transfer import measure_links
    from vpipe.runtime.transport.distributed import DistributedTransport

    class Narrowing(SleepLayer):
        """Its result has as many columns as it is told."""

        def __init__(self, seconds: float, width: int) -> None:
            super().__init__(seconds, seconds, seconds)
            self.width = width

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            missing = self.width - x.shape[1]
            return nn.functional.pad(x, (0, missing)) if missing > 0 else x[:, : self.width].contiguous()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if "links" in task:
        links = measure_links(DistributedTransport(timeout=600), task["repeats"])
        common.answer(task, links.to_json())
    else:
        pipe = Pipeline(
            [Narrowing(*layer) for layer in task["layers"]],
            lambda output, target: output.sum() * 0,
            schedule=task["schedule"],
            num_microbatches=task["units"],
            optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0),
            partition=task["partition"],
            replicas=task["replicas"],
            transport=task["transport"],
            timeout=600,
        )
        common.answer(task, _steps(task, pipe))
        pipe.close()
    dist.barrier()
    dist.destroy_process_group()


def _steps(task: dict[str, Any], pipe: Any) -> list[float]:
    """Seconds of a batch; of an asynchronous schedule of one batch more between two drains."""
    import torch
    import torch.distributed as dist

    chains = [2, 4] if task["schedule"] == "pipedream" else [1]
    seconds = []
    for repeat in range(task["repeats"] + 1):
        taken = []
        for batches in chains:
            rows = torch.zeros(task["rows"] * batches, task["width"])
            dist.barrier()
            begin = time.perf_counter()
            pipe.train_step(rows, rows, num_microbatches=task["units"] * batches)
            taken.append(time.perf_counter() - begin)
        if repeat:
            seconds.append((taken[-1] - taken[0]) / (chains[-1] - chains[0]) if len(chains) > 1 else taken[0])
    return seconds


def profile(seconds: list[float], widths: list[int], **machine: Any) -> Any:
    from vpipe.plan.costs import LayerCost, Profile

    layers = (
        LayerCost(f"layer {index}", s, s, s, 4 * width, 4 * width, WEIGHTS)
        for index, (s, width) in enumerate(zip(seconds, widths, strict=True))
    )
    return Profile(tuple(layers), 4 * widths[0], **machine)


def task_of(found: Any, seconds: list[float], widths: list[int], repeats: int, transport: str) -> dict[str, Any]:
    same = len(set(found.replicas)) <= 1
    return {
        "layers": list(zip(seconds, widths, strict=True)),
        "width": widths[0],
        "schedule": found.schedule,
        "units": found.num_microbatches,
        "rows": found.rows,
        "partition": list(found.layout.counts),
        "replicas": (found.replicas[0] if found.replicas else 1) if same else list(found.replicas),
        "repeats": repeats,
        "transport": transport,
    }


def replicas(repeats: int) -> list[dict[str, Any]]:
    """Four ranks with one stage each, and divided as the planner thinks best; the same rows in each step."""
    from vpipe.plan.planner import plan

    model = profile(LONG_LAYER, [16] * len(LONG_LAYER))
    rows = []
    for schedule in ("1f1b", "pipedream"):
        sides = {"one rank for each stage": 1, "replicas chosen": "auto"}
        for name, copies in sides.items():
            found = plan(model, 4, num_microbatches=UNITS, schedule=schedule, replicas=copies, memory=CAP)
            task = task_of(found, LONG_LAYER, [16] * len(LONG_LAYER), repeats, "auto")
            seconds = common.summary(common.launch(__file__, 4, task)[0])
            shape = f"{found.num_ranks} stages x {','.join(map(str, sorted(set(found.replicas)) or [1]))}"
            if len(set(found.replicas)) > 1:
                shape = f"stages x {','.join(map(str, found.replicas))}"
            rows.append(_row(f"{schedule}, {name}", found, seconds, shape))
    return rows


def links(repeats: int) -> list[dict[str, Any]]:
    """Three hosts, the second behind a slow cable."""
    from vpipe.plan.links import Links, links_from_json
    from vpipe.plan.planner import plan

    times = [SECONDS] * LAYERS
    rows = []
    with hosts() as spaces:
        measured = links_from_json(launch(spaces, {"links": True, "repeats": repeats})[0], "measured")
        assert measured.bandwidth is not None
        assert measured.latency is not None
        quick, soon = measured.bandwidth[0][2], measured.latency[0][2]
        alike = Links(((soon,) * 3,) * 3, ((quick,) * 3,) * 3)
        model = profile(times, WIDTHS)
        sides = {
            "as if all links were alike": {"links": alike},
            "by measured links": {"links": measured},
            "by measured links, order free": {"links": measured, "free_order": True},
        }
        for name, how in sides.items():
            found = plan(model, 3, num_microbatches=UNITS, schedule="1f1b", swap=False, **how)
            order = found.order or (0, 1, 2)
            task = task_of(found, times, WIDTHS, repeats, "distributed")
            seconds = common.summary(launch([spaces[host] for host in order], task)[0])
            rows.append(_row(name, found, seconds, f"hosts {list(order)}"))
    return rows


def _row(name: str, found: Any, seconds: dict[str, float], shape: str) -> dict[str, Any]:
    counts = list(found.layout.counts)
    return {"way": name, "shape": shape, "partition": counts, "seconds": seconds, "predicted": found.step_time}


@contextmanager
def hosts() -> Iterator[list[str]]:
    """Three namespaces on a bridge in a fourth; what the second sends and gets is held back."""
    tag = f"vw{os.getpid() % 100_000}"
    names, switch = [f"{tag}{letter}" for letter in "abc"], f"{tag}s"

    def ip(words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True, capture_output=True)

    try:
        ip(f"netns add {switch}")
        ip(f"-n {switch} link add bridge type bridge")
        ip(f"-n {switch} link set bridge up")
        for index, name in enumerate(names):
            ip(f"netns add {name}")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} link add cable type veth peer name port{index} netns {switch}")
            ip(f"-n {switch} link set port{index} master bridge up")
            ip(f"-n {name} address add 10.199.76.{index + 2}/24 dev cable")
            ip(f"-n {name} link set cable up")
        for space, device in ((names[1], "cable"), (switch, "port1")):
            ip(f"netns exec {space} tc qdisc add dev {device} root tbf rate {RATE} burst 32kb latency 1s")
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def launch(spaces: list[str], task: dict[str, Any]) -> list[Any]:
    """A rank in each namespace, in this order."""
    address = f"10.199.76.{2 + 'abc'.index(spaces[0][-1])}"
    with tempfile.TemporaryDirectory() as directory:
        processes = []
        for number, space in enumerate(spaces):
            places = {"RANK": str(number), "WORLD_SIZE": str(len(spaces)), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
            places |= {"MASTER_ADDR": address, "MASTER_PORT": "29519", "GLOO_SOCKET_IFNAME": "cable"}
            words = json.dumps(task | {"answer": f"{directory}/rank{number}.json"})
            command = ["ip", "netns", "exec", space, sys.executable, __file__, "--rank-task", words]
            quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
            processes.append(subprocess.Popen(command, env=os.environ | places | quiet))
        if any(codes := [process.wait(timeout=600) for process in processes]):
            raise SystemExit(f"a rank of {task} failed: exit codes {codes}")
        return [json.loads(Path(f"{directory}/rank{number}.json").read_text()) for number in range(len(spaces))]


def table(result: dict[str, Any]) -> str:
    lines = []
    titles = {
        "replicas": f"four ranks, {UNITS} microbatches, one layer four times as long as the others",
        "links": f"three hosts, the second behind {RATE}; narrow boundaries behind layers 1 and 6 of {LAYERS}",
    }
    for key, title in titles.items():
        lines.append(title)
        if not result[key]:
            lines.append("    network namespaces need root: not measured")
        for row in result[key]:
            median = row["seconds"]["median"]
            lines.append(
                f"    {row['way']:36} {row['shape']:18} {row['partition']!s:18} {1e3 * median:7.1f} ms   predicted "
                f"{1e3 * row['predicted']:7.1f} ms ({row['predicted'] / median - 1:+.1%})"
            )
    return "\n".join(lines)


def main() -> None:
    arguments = common.options(__doc__ or "", rank)
    repeats = 2 if arguments.quick else 7
    result = {
        "question": "planner_worth/machines",
        "replicas": replicas(repeats),
        "links": links(repeats) if os.geteuid() == 0 else [],
    }
    common.finish(arguments, result, table)


if __name__ == "__main__":
    main()
