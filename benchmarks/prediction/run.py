"""Prediction against reality: step times simulated from a profile, and measured. The profile knows single layers, links
and actions; no pipeline of the model was run for it."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "hanayo")
SIZES = {"hidden_size": 192, "num_heads": 4, "sequence_length": 64, "vocab_size": 4000}
MODELS = {name: {"name": name, "num_layers": 6, **SIZES} for name in ("gpt", "bert", "llama")}
PROFILES = 6
"""So often a model is profiled between the runs, and once after them: cores that get slower are slow for both."""
CLEAR = 0.05
"""A difference that a plan may count on."""
EMULATED_TIMES = ((0.008, 0.010, 0.006), (0.010, 0.010, 0.010), (0.006, 0.012, 0.004))
"""Forward, input gradient and weight gradient of sleeping layers, in turn."""


def rank(task: dict[str, Any]) -> None:
    """Profile the model if asked to, then run every case of the task."""
    import torch
    import torch.distributed as dist

    from vpipe import Pipeline
    from vpipe.config import PipelineConfig
    from vpipe.layer import even_partition
    from vpipe.plan.costs import Profile
    from vpipe.plan.profile import Measuring, measure_layers
    from vpipe.plan.transfer import empty_pipeline, measure_link, measure_overhead
    from vpipe.runtime.microbatches import Microbatches
    from vpipe.schedule import catalog
    from vpipe.train.measure.profile import first_unit
    from vpipe.train.session import load_data, load_model

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = PipelineConfig.from_dict(task["config"])
    data = load_data(config)
    model = load_model(config, data.vocab_size)
    unit = first_unit(config, data).batches[0]

    def adam(ps: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(ps, lr=1e-4)

    def profiled() -> Profile:
        link, overhead = measure_link(empty.transport, 10), measure_overhead(empty, 10)
        dist.barrier()
        how = Measuring(model.loss, adam, max(3, task["repeats"] // 3))
        layers, size = measure_layers(model.layers, unit.inputs, unit.targets, how)
        return Profile(
            tuple(layers), size, link_latency=link.latency, link_bandwidth=link.bandwidth, action_overhead=overhead
        )

    def pipeline(schedule: str, count: int) -> Pipeline:
        num_stages = catalog.build(schedule, dist.get_world_size(), count).num_stages
        return Pipeline(
            model.layers,
            model.loss,
            schedule=schedule,
            num_microbatches=count,
            optimizer=adam,
            partition=even_partition(len(model.layers), num_stages),
            tied=model.tied,
        )

    inputs, targets = Microbatches(lambda _: unit.inputs), Microbatches(lambda _: unit.targets)
    empty = empty_pipeline(dist.get_world_size(), "auto", 600)
    profiles = []
    pipelines = [pipeline(schedule, count) for schedule, count in task["cases"]]
    steps: list[list[float]] = [[] for _ in pipelines]
    rounds = task["repeats"] + 2
    for repeat in range(rounds):  # interleaved: a machine that gets slower is slow for all
        if task["profile"] and repeat % -(-rounds // PROFILES) == 0:
            profiles.append(profiled())
        for found, pipe in zip(steps, pipelines, strict=True):
            dist.barrier()
            begin = time.perf_counter()
            pipe.train_step(inputs, targets)
            if repeat >= 2:
                found.append(time.perf_counter() - begin)
    profiles += [profiled()] if task["profile"] else []
    common.answer(task, {"profiles": [each.to_json() for each in profiles], "steps": steps})
    dist.barrier()
    dist.destroy_process_group()


def mean(profiles: Sequence[Any]) -> Any:
    """What several profiles of one model say together."""

    def averaged(facts: Sequence[Any], names: Sequence[str]) -> Any:
        means = {name: statistics.mean(getattr(each, name) for each in facts) for name in names}
        return replace(facts[0], **means)

    times = ("forward", "input_grad", "weight_grad", "update")
    layers = zip(*(profile.layers for profile in profiles), strict=True)
    found = averaged(profiles, ("link_latency", "action_overhead"))
    return replace(found, layers=tuple(averaged(alike, times) for alike in layers))


def group(
    name: str, config: dict[str, Any], num_ranks: int, counts: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """All cases of one model on so many ranks: predicted and measured.

    The profile is made by two ranks, one for each core: more would measure how they wait for a core.
    """
    from vpipe.layer import even_partition
    from vpipe.plan.costs import profile_from_json
    from vpipe.plan.layout import PlannedLayout
    from vpipe.plan.predict import Machine, Pipe, predict

    cases = [(schedule, count) for count in counts for schedule in SCHEDULES]
    task = {"config": config, "repeats": repeats}
    if num_ranks == 2:
        found = common.launch(__file__, 2, task | {"profile": True, "cases": cases})[0]
    else:
        found = common.launch(__file__, num_ranks, task | {"profile": False, "cases": cases})[0]
        found["profiles"] = common.launch(__file__, 2, task | {"profile": True, "cases": []})[0]["profiles"]
    profiles = [profile_from_json(each) for each in found["profiles"]]
    profile = mean(profiles)
    rows = []
    for (schedule, count), steps in zip(cases, steadied(found["steps"]), strict=True):
        pipe = Pipe.of(schedule, num_ranks, count)
        layout = PlannedLayout.of_counts(even_partition(profile.num_layers, pipe.num_stages))
        predicted = predict(profile, layout, pipe, Machine.of(num_ranks, None)).step_time
        measured = common.summary(steps)
        rows.append(
            {
                "group": f"{name} p={num_ranks} m={count}",
                "schedule": schedule,
                "predicted": predicted,
                "measured": measured,
                "error": predicted / measured["median"] - 1,
            }
        )
    return rows


def steadied(steps: Sequence[Sequence[float]]) -> list[list[float]]:
    """A machine that is slow for a round is slow for all its runs: each counts relative to its round, and the usual
    round makes seconds of it again."""
    rounds = [statistics.mean(each) for each in zip(*steps, strict=True)]
    usual = statistics.median(rounds)
    return [[step / of * usual for step, of in zip(each, rounds, strict=True)] for each in steps]


def ordered(rows: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Of the pairs whose predictions differ by more than ``CLEAR``: how many were measured in that order, and all."""
    pairs = [
        (a, b)
        for a, b in permutations(rows, 2)
        if a["group"] == b["group"] and a["predicted"] * (1 + CLEAR) < b["predicted"]
    ]
    return sum(a["measured"]["median"] < b["measured"]["median"] for a, b in pairs), len(pairs)


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Spearman's: of the ranks, equal values sharing theirs."""

    def ranks(values: Sequence[float]) -> list[float]:
        shown = [float(f"{value:.2g}") for value in values]
        return [sum(b < a for b in shown) + (shown.count(a) - 1) / 2 for a in shown]

    return statistics.correlation(ranks(xs), ranks(ys))


def judged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that the question asks for."""
    errors = [abs(row["error"]) for row in rows]
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    alike = {
        name: correlation([row["predicted"] for row in each], [row["measured"]["median"] for row in each])
        for name, each in groups.items()
    }
    return {
        "num_configurations": len(rows),
        "median_error": statistics.median(errors),
        "largest_error": max(errors),
        "rank_correlation": statistics.median(alike.values()),
        "rank_correlations": alike,
        "ordered_pairs": ordered(rows),
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    lines = []
    for part in ("real", "emulated"):
        found = result[part]
        for row in found["rows"]:
            seconds = row["measured"]
            lines.append(
                f"{row['group']:22} {row['schedule']:12} predicted {row['predicted'] * 1e3:8.1f} ms   measured "
                f"{seconds['median'] * 1e3:8.1f} ({seconds['low'] * 1e3:.1f}–{seconds['high'] * 1e3:.1f})   "
                f"error {row['error']:+.1%}"
            )
        lines.append(
            f"{part}: {found['num_configurations']} configurations, median error {found['median_error']:.1%}, largest "
            f"{found['largest_error']:.1%}, rank correlation of schedules {found['rank_correlation']:.2f} (median), "
            f"{found['ordered_pairs'][0]} of {found['ordered_pairs'][1]} clear pairs in order\n"
        )
    return "\n".join(lines).rstrip()


def emulated(num_ranks: int) -> dict[str, Any]:
    """Sleeping layers of unequal times, three or more per stage where a rank holds two stages."""
    num_layers = 4 * num_ranks
    times = [EMULATED_TIMES[layer % len(EMULATED_TIMES)] for layer in range(num_layers)]
    extra = {key: [each[i] for each in times] for i, key in enumerate(("forward", "input_grad", "weight_grad"))}
    return {
        "model": {"name": "emulated", "num_layers": num_layers, "sequence_length": 1, "extra": extra},
        "dataset": {"name": "synthetic", "batch_size": 4, "extra": {"kind": "gpt"}},
        "training": {"num_microbatches": 4},
    }


def real(name: str) -> dict[str, Any]:
    kind = "bert" if name == "bert" else "gpt"
    return {
        "model": MODELS[name],
        "dataset": {"name": "synthetic", "batch_size": 16, "extra": {"kind": kind}},
        "training": {"num_microbatches": 4},
    }


def main() -> None:
    arguments = common.options(__doc__ or "", rank)
    repeats, counts = (8, (4,)) if arguments.quick else (25, (4, 8))
    models = ("gpt",) if arguments.quick else tuple(MODELS)
    sizes = (2, 4) if arguments.quick else (2, 4, 8)
    measured = [row for name in models for row in group(name, real(name), 2, counts, repeats)]
    slept = [row for ranks in sizes for row in group("emulated", emulated(ranks), ranks, (2 * ranks,), min(repeats, 5))]
    common.finish(arguments, {"question": "prediction", "real": judged(measured), "emulated": judged(slept)}, table)


if __name__ == "__main__":
    main()
