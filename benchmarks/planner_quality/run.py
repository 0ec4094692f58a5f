"""Are the plans the best there are, and what are they worth?

    python benchmarks/planner_quality/run.py [--quick] [--json]

1. Small random chains against brute force (every partition, every choice).
2. Random chains of up to 48 layers and 8 stages against HiGHS.
3. Larger random chains, and the profiles of PipeDream's authors: the gap that the planner itself reports.
4. On those profiles, under a memory cap: the plan against the two things people do by hand, both simulated by the same
   simulator: equal layer counts, and cuts balanced by time, each recomputing every layer of a stage that does not fit.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "plan"))

from plan_chains import large_problem
from plan_oracles import brute_force, close, milp, random_problem

from vpipe.plan.bounds import Options
from vpipe.plan.costs import Profile
from vpipe.plan.graph_text import load_graph
from vpipe.plan.layout import Layout
from vpipe.plan.memory import Choice
from vpipe.plan.partition import Partition, best_partition
from vpipe.plan.planner import plan
from vpipe.plan.predict import Machine, Pipe, predict, stage_facts
from vpipe.plan.shortfall import shortfall

PROFILES = Path(__file__).parents[3] / "shared" / "data" / "profiles"


def against_brute_force(count: int) -> dict[str, int]:
    equal = fitting = 0
    for seed in range(count):
        problem = random_problem(random.Random(200_000 + seed), 7, 4)
        found = best_partition(problem.profile, problem.stages, problem.objective, problem.options)
        wanted = brute_force(problem)
        fitting += wanted is not None
        value = found.value if isinstance(found, Partition) else None
        equal += value is None if wanted is None else value is not None and close(value, wanted)
    return {"chains": count, "with_a_plan": fitting, "equal": equal}


def against_milp(count: int) -> dict[str, int]:
    equal = fitting = 0
    for seed in range(count):
        problem = random_problem(random.Random(2000 + seed), 48, 8, min_layers=24)
        found = best_partition(problem.profile, problem.stages, problem.objective, problem.options, effort=10_000_000)
        wanted = milp(problem)
        fitting += wanted is not None
        value = found.value if isinstance(found, Partition) else None
        equal += value is None if wanted is None else value is not None and close(value, wanted)
    return {"chains": count, "with_a_plan": fitting, "equal": equal}


def gaps(count: int) -> dict[str, float]:
    found = []
    for seed in range(count):
        rng = random.Random(300_000 + seed)
        size = rng.choice([60, 100, 150, 200]), rng.choice([4, 8, 12, 16])
        partition = best_partition(*large_problem(300_000 + seed, *size))
        assert isinstance(partition, Partition)
        found.append(partition.gap)
    return {"chains": count, "exact": sum(gap <= 2e-9 for gap in found), "worst_gap": max(found)}


def by_hand(profile: Profile, layout: Layout, pipe: Pipe, machine: Machine) -> float | None:
    """The step time with every layer recomputed in each stage that does not fit; ``None`` if that does not help."""
    sizes = predict(profile, layout, pipe, Machine.of(pipe.num_ranks, None)).rank_memory
    choices = [
        [Choice.KEEP if size <= cap else Choice.RECOMPUTE] * count
        for count, size, cap in zip(layout.counts, sizes, machine.memory, strict=True)
    ]
    result = predict(profile, Layout.of_counts(layout.counts, choices), pipe, machine)
    fits = all(size <= cap for size, cap in zip(result.rank_memory, machine.memory, strict=True))
    return result.step_time if fits else None


def real(name: str, num_stages: int, room: float) -> dict[str, object]:
    profile = load_graph(PROFILES / f"{name}.graph.txt").to_profile()
    pipe = Pipe.of("1f1b", num_stages, 16)
    loose = plan(profile, num_stages, num_microbatches=16)
    most = max(loose.prediction.rank_memory)
    least = shortfall(profile, stage_facts(pipe.program, Machine.of(num_stages, 1.0)), Options()).missing + 1
    cap = least + room * max(0.0, most - least)
    machine = Machine.of(num_stages, cap)
    found = plan(profile, num_stages, num_microbatches=16, memory=cap)
    even = by_hand(profile, Layout.even(profile.num_layers, num_stages), pipe, machine)
    balanced = by_hand(profile, Layout.of_counts(loose.layout.counts), pipe, machine)
    return {
        "profile": name,
        "stages": num_stages,
        "cap_gib": cap / 2**30,
        "step_s": found.step_time,
        "gap": found.gap,
        "even_ratio": even and even / found.step_time,
        "balanced_ratio": balanced and balanced / found.step_time,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    quick = arguments.quick
    say = (lambda *words: None) if arguments.json else (lambda *words: print(*words, flush=True))
    result: dict[str, object] = {}
    result["brute_force"] = part = against_brute_force(200 if quick else 2000)
    say(f"brute force: {part['equal']} of {part['chains']} chains equal ({part['with_a_plan']} of them have a plan)")
    rows = []
    if PROFILES.exists():
        say("profile   stages      cap     step       gap   equal counts   balanced by time   (times the plan's step)")
        for name in ("gnmt", "resnet50", "vgg16"):
            for count in (2, 4, 8):
                for room in (1.0, 0.3):
                    rows.append(real(name, count, room))
                    say(line(rows[-1]))
    else:
        say(f"no profiles: {PROFILES} is not on this machine")
    result["profiles"] = rows
    ratios = [row["even_ratio"] for row in rows if row["even_ratio"]]
    result["median_even_ratio"] = statistics.median(ratios) if ratios else None
    result["gaps"] = part = gaps(20 if quick else 1000)
    say(f"larger chains: {part['exact']} of {part['chains']} proven exact, worst gap {part['worst_gap']:.2e}")
    result["milp"] = part = against_milp(3 if quick else 20)
    say(f"milp: {part['equal']} of {part['chains']} chains equal ({part['with_a_plan']} of them have a plan)")
    if arguments.json:
        print(json.dumps(result))


def line(row: dict[str, object]) -> str:
    ratios = [f"{row[key]:.3f}" if row[key] else "does not fit" for key in ("even_ratio", "balanced_ratio")]
    return (
        f"{row['profile']:9} {row['stages']:6} {row['cap_gib']:6.2f}G {row['step_s']:7.3f}s {row['gap']:9.1e} "
        f"{ratios[0]:>14} {ratios[1]:>18}"
    )


if __name__ == "__main__":
    main()
