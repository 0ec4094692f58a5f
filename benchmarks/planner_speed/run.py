"""How long does a plan take?  python benchmarks/planner_speed/run.py [--quick] [--json]

Times ``plan`` (partition × keep, recompute or swap per layer, 1F1B, two microbatches per rank) on random chains whose
layers all differ: without a cap, with caps between what is just enough and what keeps everything, and 2 % above the
least. Beside the seconds stands the gap that the plan states.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "plan"))

from plan_chains import cap_of, large_chain

from vpipe.plan.planner import plan

SIZES = [(24, 4), (100, 8), (300, 16), (500, 32), (1000, 64)]
LIMITS = {(100, 8): 0.2, (1000, 64): 3.0}
"""Seconds that issue 12 allows."""
ROOMS = (None, 0.5, 0.2, "2%")
"""Where the cap lies between what is just enough (0) and what keeps everything (1); None: no cap."""


def measure(num_layers: int, num_ranks: int, room: float | str | None, repeats: int, swap: float) -> dict[str, object]:
    walls, cpus, gaps = [], [], []
    for seed in range(repeats):
        profile = large_chain(seed, num_layers, alike=0.0, swap=swap)
        cap = None
        if room is not None:
            share = 0.0 if isinstance(room, str) else room
            cap = cap_of(profile, "1f1b", num_ranks, 2 * num_ranks, share) * (1.02 if isinstance(room, str) else 1.0)
        wall, cpu = time.perf_counter(), time.process_time()
        found = plan(profile, num_ranks, num_microbatches=2 * num_ranks, memory=cap)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
        gaps.append(found.gap)
    return {
        "layers": num_layers,
        "ranks": num_ranks,
        "room": room,
        "swap": bool(swap),
        "runs": repeats,
        "median_s": statistics.median(walls),
        "median_cpu_s": statistics.median(cpus),
        "worst_cpu_s": max(cpus),
        "median_gap": statistics.median(gaps),
        "worst_gap": max(gaps),
        "limit_s": LIMITS.get((num_layers, num_ranks)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = SIZES[:2] if arguments.quick else SIZES
    rows = []
    if not arguments.json:
        print("layers ranks room  swap  runs   median  median cpu  worst cpu  median gap  worst gap   limit")
    for layers, ranks in sizes:
        for swap in (0.0, 1.0):
            for room in ROOMS:
                if swap and room is None:
                    continue
                rows.append(measure(layers, ranks, room, 1 if layers >= 500 or arguments.quick else 3, swap))
                if not arguments.json:
                    show(rows[-1])
    if arguments.json:
        print(json.dumps({"rows": rows}))


def show(row: dict[str, object]) -> None:
    limit = f"{row['limit_s']:.1f}" if row["limit_s"] else "-"
    print(
        f"{row['layers']:6} {row['ranks']:5} {row['room'] or 'none'!s:>4} {'yes' if row['swap'] else 'no':>5} "
        f"{row['runs']:5} {row['median_s']:8.3f} {row['median_cpu_s']:11.3f} {row['worst_cpu_s']:10.3f} "
        f"{row['median_gap']:11.2%} {row['worst_gap']:10.2%} {limit:>7}",
        flush=True,
    )


if __name__ == "__main__":
    main()
