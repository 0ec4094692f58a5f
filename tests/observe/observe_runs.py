"""Run directories without a trainer: simulated programs, written down by the real recorder."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vpipe.rundir.journal import Beat, Ending, EndingKind, conclude
from vpipe.rundir.recorder import Recorder
from vpipe.schedule.catalog import build
from vpipe.schedule.lower import lower, swap
from vpipe.schedule.program import Program, to_csv
from vpipe.schedule.semantics import LANE, Lane, version_table
from vpipe.schedule.simulate import simulate
from vpipe.schedule.timeline import Costs, StageCosts

MakeRun = Callable[..., Path]
Vpipe = Callable[..., "subprocess.CompletedProcess[str]"]
MS = 1_000_000


def uneven(program: Program, seed: int, latency: float = 0.0) -> Costs:
    """Random costs in milliseconds."""
    dice = random.Random(seed)
    stages = [
        StageCosts(
            dice.uniform(1, 3), dice.uniform(1, 3), dice.uniform(1, 3), step=0.5, reduce=0.2, recompute=1.0, swap=0.8
        )
        for _ in range(program.num_stages)
    ]
    return Costs(tuple(stages), latency=latency, overhead=0.05)


def records(program: Program, costs: Costs, origin: int) -> list[list[Any]]:
    """What engines would record: every action of every row, SEND and RECV between the compute actions."""
    line = simulate(program, costs).timeline
    ranks = []
    for rank, row in enumerate(program.rows):
        now, found = 0.0, []
        start = int(line.flat.row_start[rank])
        for index, action in enumerate(row):
            if LANE[action.kind] is Lane.COMPUTE:
                ready, end = line.begin[start + index], line.end[start + index]
                times = (min(now, ready), ready, end)
                now = end
            elif LANE[action.kind] is Lane.SWAP:
                times = (now, line.begin[start + index], line.end[start + index])
            else:
                times = (now, now, now)
            begin, ready, end = (origin + round(time * MS) for time in times)
            found.append(SimpleNamespace(action=action, begin=begin, ready=ready, end=end, bytes=1024))
        ranks.append(found)
    return ranks


def write_run(
    path: Path,
    schedule: str = "1f1b",
    ranks: int = 4,
    microbatches: int = 8,
    *,
    steps: int = 6,
    finished: bool = True,
    name: str = "gpt",
    layer: str = "block",
    latency: float = 0.1,
    seed: int = 0,
    swapped: Collection[int] = (),
    trace: bool = True,
    **options: Any,
) -> Path:
    """A run directory as the trainer writes it."""
    program = lower(swap(build(schedule, ranks, microbatches, **options), swapped))
    path.mkdir(parents=True, exist_ok=True)
    stages = [
        {
            "stage": s,
            "layers": [f"{layer}{2 * s}", f"{layer}{2 * s + 1}"],
            "parameters": 1000 * (s + 1),
            "weight_bytes": 2**22,
        }
        for s in range(program.num_stages)
    ]
    facts = {
        "vpipe": "0.1.0",
        "torch": "2.13.0",
        "started": "2026-11-16T00:00:00+00:00",
        "schedule": schedule,
        "num_ranks": program.num_ranks,
        "num_stages": program.num_stages,
        "num_microbatches": program.num_microbatches,
        "partition": [2] * program.num_stages,
        "program": to_csv(program),
        "versions": program.versions.value,
        "placement": [list(each) for each in program.placement.ranks_of],
        "model": {"name": name, "parameters": sum(int(str(each["parameters"])) for each in stages)},
        "stages": stages,
        "hosts": ["localhost"] * program.num_ranks,
        "command": ["vpipe", "train", "config.yaml"],
        "trace": trace,
    }
    (path / "run.json").write_text(json.dumps(facts))
    (path / "config.yaml").write_text(f"model:\n  name: {name}\ndataset:\n  name: synthetic\n")
    dice = random.Random(seed)
    lines = []
    for number in range(1, 10 * steps + 1):
        loss = 8 * 0.97**number + 2 + dice.uniform(-0.05, 0.05)
        lines.append(
            {"kind": "train", "iteration": number, "epoch": number // 40, "update": number, "loss": loss,
             "learning_rate": 3e-4, "tokens": 4096, "seconds": 0.05,
             "tokens_per_second": 4096 / dice.uniform(0.048, 0.055),
             "gradient_norm": 1.0, "skipped": False, "time": 1.79e9 + number * 0.05}
        )  # fmt: skip
        if number % 20 == 0:
            lines.append(
                {"kind": "evaluation", "iteration": number, "loss": loss + 0.1, "seconds": 0.1, "time": 1.79e9}
            )
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recorders = [Recorder(path, rank, versions=version_table(program)) for rank in range(program.num_ranks)]
    span = 0
    for number in range(steps):
        found = records(program, uneven(program, seed + number // 100, latency), 10**9 + span)
        span += max(row[-1].end - 10**9 - span for row in found) + 2 * MS
        for rank, recorder in enumerate(recorders):
            weights = 2**22 * len(program.placement.stages_of[rank])
            memory = {"allocated": weights + 2**20, "peak": weights * 2, "weights": weights, "versions": 0}
            recorder.record(number, 10 * number, found[rank], memory)
    for recorder in recorders:
        recorder.close()
    beat = Beat("0123456789ab", "training", 10 * steps, 100)
    beat.write(path)
    if finished:
        summary = {"total_time_seconds": 3.0, "total_iterations": 10 * steps, "throughput_tokens_per_second": 81000.0,
                   "mfu": "n/a", "final_loss": lines[-1]["loss"]}  # fmt: skip
        conclude(path, beat.run, Ending.of(EndingKind.FINISHED, "all iterations are trained"), summary)
    return path
