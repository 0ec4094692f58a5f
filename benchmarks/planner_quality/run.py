"""Are the plans the best there are, and what are they worth?

    python benchmarks/planner_quality/run.py [--quick] [--json]

1. Small random questions, with and without a cap, of every schedule of the catalogue, against brute force over the
   simulated step: every partition and every choice, each simulated on its own. How many plans are the best, how many
   are proven, the worst miss; and that no lower bound lies above the best step (asserted).
2. The table of issue 12: 36 questions each for four schedules, against every partition.
3. The profiles of PipeDream's authors, under a memory cap: the plan's gap, and the plan against the two things people
   do by hand, both simulated by the same simulator: equal layer counts, and cuts balanced by time, each recomputing
   every layer of a stage that does not fit.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "plan"))

from plan_oracles import SCHEDULES, Problem, brute_force, random_problem, random_profile

from vpipe.compat.graph_text import load_graph
from vpipe.layer import even_partition
from vpipe.plan.costs import Profile
from vpipe.plan.floor import Floor
from vpipe.plan.judge import Judge
from vpipe.plan.layout import PlannedLayout
from vpipe.plan.memory import Choice, Options
from vpipe.plan.planner import plan
from vpipe.plan.predict import Machine, Pipe, predict, stage_facts
from vpipe.plan.shortfall import shortfall

PROFILES = Path(__file__).parents[3] / "shared" / "data" / "profiles"


class Tally:
    """How plans compare with brute force."""

    def __init__(self) -> None:
        self.asked = self.fitting = self.best = self.proven = 0
        self.worst = 0.0

    def ask(self, problem: Problem) -> None:
        wanted, found = brute_force(problem), problem.plan()
        self.asked += 1
        if wanted is None:
            assert found is None, problem
            return
        bound = Floor(Judge(problem.profile, problem.pipe, problem.machine), problem.options).bound
        assert bound <= wanted, problem
        self.fitting += 1
        miss = float("inf") if found is None else found.step_time / wanted - 1 if wanted else 0.0
        assert found is None or found.lower_bound <= wanted * (1 + 1e-9), problem
        self.best += miss <= 1e-9
        self.proven += found is not None and found.exact
        self.worst = max(self.worst, miss)

    def to_json(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("asked", "fitting", "best", "proven", "worst")}

    def __str__(self) -> str:
        return (
            f"{self.best} of {self.fitting} are the best ({self.asked} asked), {self.proven} proven, worst miss "
            f"{self.worst:.1%}, no bound above a step"
        )


def small(count: int, *, capped: bool) -> Tally:
    """``count`` questions of every schedule."""
    tally = Tally()
    for schedule in SCHEDULES:
        for seed in range(count):
            problem = random_problem(50_000 + seed, schedule, capped=capped, most_layers=4 if capped else 7)
            if problem is not None:
                tally.ask(problem)
    return tally


def reported(schedule: str) -> Tally:
    """36 questions: 6 chains of 8 layers, 2 and 3 ranks, 3 numbers of microbatches."""
    tally = Tally()
    for seed in range(6):
        profile = random_profile(random.Random(seed), 8)
        for ranks in (2, 3):
            for count in (2, 4, 8):
                tally.ask(Problem(profile, schedule, ranks, count))
    return tally


def by_hand(profile: Profile, layout: PlannedLayout, pipe: Pipe, machine: Machine) -> float | None:
    """The step time with every layer recomputed in each stage that does not fit; ``None`` if that does not help."""
    sizes = predict(profile, layout, pipe, Machine.of(pipe.num_ranks, None)).rank_memory
    choices = [
        [Choice.KEEP if size <= cap else Choice.RECOMPUTE] * count
        for count, size, cap in zip(layout.counts, sizes, machine.memory, strict=True)
    ]
    result = predict(profile, PlannedLayout.of_counts(layout.counts, choices), pipe, machine)
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
    even = by_hand(profile, PlannedLayout.of_counts(even_partition(profile.num_layers, num_stages)), pipe, machine)
    balanced = by_hand(profile, PlannedLayout.of_counts(loose.layout.counts), pipe, machine)
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
    for name, capped, count in (("no cap", False, 4 if quick else 30), ("capped", True, 2 if quick else 10)):
        tally = small(count, capped=capped)
        result[name] = tally.to_json()
        say(f"brute force, {name}: {tally}")
    for schedule in ("1f1b", "eager-1f1b", "zb-h1", "zb-h2"):
        tally = reported(schedule)
        result[schedule] = tally.to_json()
        say(f"issue 12, {schedule}: {tally}")
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
    if arguments.json:
        print(json.dumps(result))


def line(row: dict[str, object]) -> str:
    ratios = [f"{row[key]:.3f}" if row[key] else "does not fit" for key in ("even_ratio", "balanced_ratio")]
    return (
        f"{row['profile']:9} {row['stages']:6} {row['cap_gib']:6.2f}G {row['step_s']:7.3f}s {row['gap']:9.2%} "
        f"{ratios[0]:>14} {ratios[1]:>18}"
    )


if __name__ == "__main__":
    main()
