"""How fast are lowering, verifier and simulator on large programs, and does the time per action stay constant?

Each measurement runs in a process of its own: build 1F1B, lower it, verify it, time it, summarise it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

GOAL_SECONDS, GOAL_BYTES = 3.0, 2 * 10**9


def measure(p: int, m: int) -> dict[str, float]:
    """Seconds of each part, the number of actions, and the peak memory of this process."""
    from vpipe.schedule.catalog import build
    from vpipe.schedule.lower import lower
    from vpipe.schedule.simulate import simulate
    from vpipe.schedule.verify import verify

    marks = [time.perf_counter()]
    program = build("1f1b", p, m)
    marks.append(time.perf_counter())
    lowered = lower(program)
    marks.append(time.perf_counter())
    assert not verify(lowered)
    marks.append(time.perf_counter())
    simulation = simulate(lowered)
    marks.append(time.perf_counter())
    summary = simulation.summary()
    marks.append(time.perf_counter())
    assert summary["makespan"] == 3 * (m + p - 1), summary["makespan"]
    parts = dict(
        zip(("build", "lower", "verify", "simulate", "summary"), (b - a for a, b in pairwise(marks)), strict=True)
    )
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return parts | {"seconds": marks[-1] - marks[0], "actions": len(lowered), "peak_bytes": memory}


def in_a_process(p: int, m: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, "--one", str(p), str(m)], capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def repeated(p: int, m: int, times: int) -> dict[str, Any]:
    runs = [in_a_process(p, m) for _ in range(times)]
    seconds = [run["seconds"] for run in runs]
    middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    per_action = 1e6 * middle["seconds"] / middle["actions"]
    return {
        "ranks": p,
        "microbatches": m,
        **middle,
        "spread": [min(seconds), max(seconds)],
        "us_per_action": per_action,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller programs, one run each")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one)))
        return
    times = 1 if args.quick else 3
    large = repeated(64, 256, times) if args.quick else repeated(256, 1024, times)
    wide = None if args.quick else repeated(10_000, 64, 1)
    few, many = (repeated(32, m, times) for m in ((200, 2000) if args.quick else (800, 8000)))
    growth = many["us_per_action"] / few["us_per_action"]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    answer: dict[str, Any] = {
        "machine": machine,
        "load": os.getloadavg()[0],
        "large": large,
        "wide": wide,
        "few": few,
        "many": many,
    }
    answer["ratios"] = {"us_per_action_at_ten_times_the_microbatches": growth}
    if not args.quick:
        answer["goals"] = {"seconds": large["seconds"] <= GOAL_SECONDS, "memory": large["peak_bytes"] < GOAL_BYTES}
    if args.json:
        print(json.dumps(answer))
        return
    print(f"{machine}, load {answer['load']:.1f}\n")
    columns = {"actions": 10, "build": 8, "lower": 8, "verify": 8, "simulate": 10, "summary": 9, "seconds": 9}
    print(f"{'1f1b':<16}" + "".join(f"{name:>{width}}" for name, width in columns.items()) + "     GB  µs/action")
    for row in filter(None, (large, wide, few, many)):
        figures = "".join(f"{row[name]:>{width}.{0 if name == 'actions' else 2}f}" for name, width in columns.items())
        size = f"{row['ranks']} x {row['microbatches']}"
        print(f"{size:<16}{figures}{row['peak_bytes'] / 1e9:>7.2f}{row['us_per_action']:>11.2f}")
    print("\nverify makes the timeline at equal costs, and simulate finds it there")
    print(f"time per action at ten times the microbatches: {growth:.2f} x")


if __name__ == "__main__":
    main()
