"""What does a checkpoint cost the step that it falls on?

    python benchmarks/checkpoint/run.py [--quick] [--json]

One process trains a stage (Linear layers with AdamW: weights and two moments) and saves now and then, by turns: vpipe
beside training, vpipe blocking, ``torch.distributed.checkpoint`` synchronous and asynchronous. *Stall* is the call
alone: what the step that it falls on waits. *Added* is the stall plus what the steps until the save has ended take
longer than the median step without one. *Copy* is a plain copy of the same bytes into memory that is there already, the
least that any of them can cost. vpipe's writes carry a sha256 and an fsync per file; torch's have no checksum.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import finish, options, summary

from vpipe.rundir.lineage import Line
from vpipe.rundir.manifest import Standing
from vpipe.train.checkpoints import layer_file
from vpipe.train.checkpoints.writer import CheckpointPlace, Save, Saver

Begin = Callable[[int], Callable[[], bool]]
"""Begins a save of a number; what it returns says whether the save has ended."""


class Stage:
    """What is trained: layers, their optimizers, and one step."""

    def __init__(self, num_layers: int, width: int) -> None:
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), lr=1e-4)
        self._x = torch.randn(64, width)

    def step(self) -> float:
        begin = perf_counter()
        x = self._x
        for layer in self.layers:
            x = torch.relu(layer(x))
        x.square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return perf_counter() - begin

    def tensors(self) -> dict[int, dict[str, torch.Tensor]]:
        return {n: layer_file.tensors_of(layer, self.optimizer) for n, layer in enumerate(self.layers)}

    def flat(self) -> dict[str, torch.Tensor]:
        return {f"{n}/{name}": tensor for n, kept in self.tensors().items() for name, tensor in kept.items()}


def ours(stage: Stage, folder: Path, blocking: bool) -> Begin:
    saver = Saver(CheckpointPlace(folder, 0, 1, 1), blocking=blocking)
    line = Line("a" * 12)

    def begin(number: int) -> Callable[[], bool]:
        save = Save(Standing(number, 0, 0, 0, number, 1.0, 0, 0, "adamw", "m"), line, {})
        saver.wait()
        saver.done()
        saver.begin(save, stage.tensors())
        return lambda: bool(save.seconds)

    return begin


def torchs(stage: Stage, folder: Path, asynchronous: bool) -> Begin:
    pending: list[Any] = []

    def begin(number: int) -> Callable[[], bool]:
        for future in pending:
            future.result()
        pending.clear()
        shutil.rmtree(folder / f"{number - 1}", ignore_errors=True)
        where = str(folder / f"{number}")
        if not asynchronous:
            dcp.save(stage.flat(), checkpoint_id=where)
            return lambda: True
        future = dcp.async_save(stage.flat(), checkpoint_id=where)
        pending.append(future)
        return lambda: bool(future.done())

    return begin


def measure(stage: Stage, begin: Begin, number: int, plain: float) -> tuple[float, float]:
    """(stall, added) of one save, in seconds."""
    start = perf_counter()
    ended = begin(number)
    stall = perf_counter() - start
    spent, count = 0.0, 0
    while True:
        spent, count = spent + stage.step(), count + 1
        if ended():
            break
    return stall, stall + max(0.0, spent - count * plain)


def copying(stage: Stage) -> float:
    live = list(stage.flat().values())
    kept = [tensor.clone() for tensor in live]
    times = []
    for _ in range(5):
        begin = perf_counter()
        for there, tensor in zip(kept, live, strict=True):
            there.copy_(tensor)
        times.append(perf_counter() - begin)
    return statistics.median(times)


def table(result: dict[str, Any]) -> str:
    head = f"{result['megabytes']:.0f} MB, a step {1000 * result['step']:.0f} ms, a copy {1000 * result['copy']:.0f} ms"
    rows = [f"| {'how':<28} | stall, ms | added, ms | added over a copy |", "| --- | --- | --- | --- |"]
    for name, each in result["ways"].items():
        stall, added = 1000 * each["stall"]["median"], 1000 * each["added"]["median"]
        rows.append(f"| {name:<28} | {stall:.0f} | {added:.0f} | {each['over_copy']:.1f} |")
    return "\n".join([head, "", *rows])


def main() -> None:
    arguments = options(__doc__.splitlines()[0])
    torch.set_num_threads(1)
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stage = Stage(*((4, 768) if arguments.quick else (8, 1024)))
    repeats = 3 if arguments.quick else 7
    for _ in range(3):
        stage.step()
    plain = statistics.median(stage.step() for _ in range(20))
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        ways = {
            "vpipe, beside training": ours(stage, place / "a", False),
            "vpipe, blocking": ours(stage, place / "b", True),
            "torch dcp, save": torchs(stage, place / "c", False),
            "torch dcp, async_save": torchs(stage, place / "d", True),
        }
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for number in range(1, repeats + 2):
            for name, begin in ways.items():
                found = measure(stage, begin, number, plain)
                if number > 1:  # the first of each allocates what the later ones use again
                    seen[name].append(found)
            plain = statistics.median([plain, *(stage.step() for _ in range(4))])
    copy = copying(stage)
    result = {
        "megabytes": sum(t.numel() * t.element_size() for t in stage.flat().values()) / 1e6,
        "step": plain,
        "copy": copy,
        "ways": {
            name: {
                "stall": summary([stall for stall, _ in found]),
                "added": summary([added for _, added in found]),
                "over_copy": statistics.median(added for _, added in found) / copy,
                "stall_over_copy": statistics.median(stall for stall, _ in found) / copy,
            }
            for name, found in seen.items()
        },
    }
    dist.destroy_process_group()
    finish(arguments, result, table)


if __name__ == "__main__":
    main()
