"""How long does a plan take?  python benchmarks/planner_speed/run.py [--quick] [--json]

Times ``best_partition`` (partition × keep, recompute or swap per layer, synchronous objective, 1F1B's units in flight)
on random chains: every layer of its own cost, and all layers alike. The peer is HiGHS on the same problem as a
mixed-integer program, run in turn with ours, where that ends in reasonable time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "plan"))

from plan_chains import large_chain
from plan_oracles import Problem, milp

from vpipe.plan.bounds import Options
from vpipe.plan.memory import StageFacts
from vpipe.plan.partition import Objective, Partition, best_partition
from vpipe.plan.shortfall import shortfall

SIZES = [(24, 4), (100, 8), (300, 16), (1000, 64), (1000, 8)]
LIMITS = {(100, 8): 0.050, (1000, 64): 1.0}
"""Seconds that issue 5 allows."""


ROOMS = (1.2, 0.5, 0.2)
"""Where the cap lies between what is just enough (0) and what keeps everything (1)."""


def problems(seed: int, num_layers: int, num_stages: int, *, alike: bool, swap: bool) -> list[Problem]:
    """One chain under 1F1B with each of the caps."""
    profile = large_chain(seed, num_layers, alike=float(alike), swap=float(swap))
    units = [min(2 * num_stages, num_stages - s) for s in range(num_stages)]
    tiny = [StageFacts(n, memory=1.0) for n in units]
    least, most = (shortfall(profile, tiny, options).missing + 1 for options in (Options(), Options(False, False)))
    caps = [least + room * (most - least) for room in ROOMS]
    objective = Objective(1.0, 2.0 * num_stages - 1)
    return [Problem(profile, tuple(StageFacts(n, memory=cap) for n in units), objective, Options()) for cap in caps]


def timed(given: Problem) -> tuple[float, float, Partition]:
    wall, cpu = time.perf_counter(), time.process_time()
    found = best_partition(given.profile, given.stages, given.objective, given.options)
    assert isinstance(found, Partition)
    return time.perf_counter() - wall, time.process_time() - cpu, found


def measure(num_layers: int, num_stages: int, repeats: int, *, alike: bool, swap: bool) -> dict[str, object]:
    walls, cpus, gaps = [], [], []
    for seed in range(repeats):
        for given in problems(seed, num_layers, num_stages, alike=alike, swap=swap):
            wall, cpu, found = timed(given)
            walls.append(wall)
            cpus.append(cpu)
            gaps.append(found.gap)
    return {
        "layers": num_layers,
        "stages": num_stages,
        "kind": ("alike" if alike else "mixed") + ("+swap" if swap else ""),
        "runs": len(walls),
        "median_s": statistics.median(walls),
        "worst_s": max(walls),
        "median_cpu_s": statistics.median(cpus),
        "worst_cpu_s": max(cpus),
        "worst_gap": max(gaps),
        "limit_s": LIMITS.get((num_layers, num_stages)),
    }


def against_milp(repeats: int) -> dict[str, object]:
    ours, theirs = [], []
    for seed in range(repeats):
        given = problems(seed, 32, 4, alike=False, swap=False)[1]
        wall, _, found = timed(given)
        begin = time.perf_counter()
        wanted = milp(given)
        theirs.append(time.perf_counter() - begin)
        ours.append(wall)
        assert wanted is not None
        assert abs(found.value - wanted) <= 1e-6 * wanted
    return {
        "layers": 32,
        "stages": 4,
        "runs": repeats,
        "ours_median_s": statistics.median(ours),
        "highs_median_s": statistics.median(theirs),
        "ratio": statistics.median(theirs) / statistics.median(ours),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = SIZES[:2] if arguments.quick else SIZES
    kinds = [(alike, swap) for swap in (False, True) for alike in (False, True)]
    rows = []
    if not arguments.json:
        print("layers stages kind        runs   median    worst  median cpu  worst cpu  worst gap   limit")
    for layers, stages in sizes:
        repeats = 1 if arguments.quick else 2 if layers >= 1000 else 5
        for alike, swap in kinds:
            rows.append(measure(layers, stages, repeats, alike=alike, swap=swap))
            if not arguments.json:
                show(rows[-1])
    peer = against_milp(1 if arguments.quick else 5)
    if arguments.json:
        print(json.dumps({"rows": rows, "milp": peer}))
        return
    print(
        f"HiGHS on {peer['layers']} x {peer['stages']}: {peer['highs_median_s']:.2f} s, ours "
        f"{peer['ours_median_s'] * 1e3:.1f} ms, same optimum: {peer['ratio']:.0f} times as long"
    )


def show(row: dict[str, object]) -> None:
    limit = f"{row['limit_s']:.3f}" if row["limit_s"] else "-"
    print(
        f"{row['layers']:6} {row['stages']:6} {row['kind']:11} {row['runs']:4} {row['median_s']:8.3f} "
        f"{row['worst_s']:8.3f} {row['median_cpu_s']:11.3f} {row['worst_cpu_s']:10.3f} "
        f"{row['worst_gap']:10.1e} {limit:>7}",
        flush=True,
    )


if __name__ == "__main__":
    main()
