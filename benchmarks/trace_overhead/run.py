"""What it costs to write every action down: CPU time of the recorder, and of taking the times, as part of a step.

The costs are measured where they arise (CPU time of the recorder's thread and of ``record()``), not as the difference
of two noisy runs; steps with and without the recorder are shown beside, interleaved, as a check. All ranks are threads
of one process, and every second step is recorded, so both the cost and the step are those of four ranks.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

CASES = {
    "tiny: 2 Linear(64) per stage, 4 rows": (64, 4, 2),
    "small: 2 Linear(256) per stage, 32 rows": (256, 32, 2),
    "ordinary: 4 Linear(512) per stage, 64 rows": (512, 64, 4),
}
STAGES, MICROBATCHES = 4, 16


def stamp_cost() -> float:
    """Seconds of CPU that the engine spends per action on two clock readings and one record."""
    from vpipe.runtime.job import Record
    from vpipe.schedule.action import Action, Kind

    action, row, count = Action(0, Kind.F, 0), 100, 2000
    begin = time.process_time()
    for _ in range(count):  # a new list for each step, as the engine makes it
        kept = []
        for _ in range(row):
            at = time.perf_counter_ns()
            kept.append(Record(action, at, at, time.perf_counter_ns()))
    return (time.process_time() - begin) / (count * row)


def measure(width: int, rows: int, depth: int, seconds: float) -> dict[str, Any]:
    import torch
    from torch import nn

    from vpipe import Pipeline
    from vpipe.rundir.recorder import Recorder

    class Watched(Recorder):
        cost = 0.0

        def record(self, *args: Any) -> None:
            begin = time.thread_time()
            super().record(*args)
            self.cost += time.thread_time() - begin

        def _write(self, paused: bool) -> None:
            begin, last = time.thread_time(), self._stop
            super()._write(paused)
            if not last:  # the last writing is after the last step
                self.cost += time.thread_time() - begin

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))) for _ in range(STAGES)]
    pipe = Pipeline(
        layers,
        nn.functional.mse_loss,
        schedule="1f1b",
        num_microbatches=MICROBATCHES,
        num_ranks=STAGES,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.01),
    )
    x, y = torch.randn(rows * MICROBATCHES, width), torch.randn(rows * MICROBATCHES, width)
    steps: dict[str, list[float]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as directory:
        recorders = [Watched(directory, rank) for rank in range(STAGES)]
        for _ in range(3):
            pipe.train_step(x, y)
        spent = actions = 0.0
        until = time.monotonic() + seconds
        number = 0
        while time.monotonic() < until or number < 20:
            on = number % 2 == 0
            began, cpu = time.perf_counter(), time.process_time()
            pipe.train_step(x, y)
            if on:
                trace = pipe.trace()
                for rank, recorder in enumerate(recorders):
                    recorder.record(number // 2, number, trace.records[rank], {"weights": 1})
                    actions += len(trace.records[rank])
            steps["with" if on else "without"].append(time.perf_counter() - began)
            spent += (time.process_time() - cpu) if on else 0.0
            number += 1
        for recorder in recorders:
            recorder.close()
        recording = sum(recorder.cost for recorder in recorders)
        problems = [recorder.problem for recorder in recorders if recorder.problem]
    assert not problems, problems
    stamps = actions * stamp_cost()
    return {
        "steps": len(steps["with"]),
        "actions_per_step": actions / len(steps["with"]),
        "step_cpu_seconds": spent / len(steps["with"]),
        "recording": recording / spent,
        "stamping": stamps / spent,
        "total": (recording + stamps) / spent,
        "wall": {name: common.summary(times) for name, times in steps.items()},
    }


def table(result: dict[str, Any]) -> str:
    lines = ["part of a step's CPU time: writing steps down + taking the times of every action"]
    for name, row in result["rows"].items():
        ratio = row["wall"]["with"]["median"] / row["wall"]["without"]["median"]
        size = f"{row['actions_per_step']:.0f} actions, {row['step_cpu_seconds'] * 1e3:.1f} ms of CPU"
        cost = f"{row['recording']:.2%} + {row['stamping']:.2%} = {row['total']:.2%}"
        lines.append(f"{name:44} {cost}   ({size}; wall ratio {ratio:.3f})")
    return "\n".join(lines)


def main() -> None:
    arguments = common.options(__doc__ or "")
    seconds = 4.0 if arguments.quick else 20.0
    rows = {name: measure(*case, seconds) for name, case in CASES.items()}
    ratios = {name: row["total"] for name, row in rows.items()}
    common.finish(arguments, {"question": "trace_overhead", "rows": rows, "ratios": ratios}, table)


if __name__ == "__main__":
    main()
