"""What a plan is worth: planned partitions against equal layer counts, and a plan under a memory cap against full
recompute (GPipe's way) and against PipeDream's way, which keeps everything and takes smaller microbatches.

The layers' costs are measured on this machine. The ranks are emulated devices: real processes and messages, layers that
sleep for as long as the real ones compute, so that four of them fit on two cores. Times are stretched by one factor."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

RANKS, MICROBATCHES = 4, 8
ROWS = (16, 8, 4, 2)
"""Rows of a microbatch; where memory is short, PipeDream's way is the first of the smaller ones that fits."""
TIMES = ("forward", "input_grad", "weight_grad", "update")
LONGEST = 0.050
"""Seconds that the slowest layer's forward is stretched or shrunk to."""
MODELS: dict[str, dict[str, Any]] = {
    "gpt, big vocabulary": {"name": "gpt", "hidden_size": 192, "num_layers": 10, "num_heads": 4, "vocab_size": 16000},
    "bert": {"name": "bert", "hidden_size": 192, "num_layers": 8, "num_heads": 4, "vocab_size": 16000},
    "translation": {"name": "translation", "hidden_size": 192, "num_layers": 6, "num_heads": 4, "vocab_size": 16000},
}


def config(name: str, rows: int) -> dict[str, Any]:
    kind = MODELS[name]["name"]
    return {
        "model": MODELS[name] | {"sequence_length": 64},
        "dataset": {"name": "synthetic", "batch_size": MICROBATCHES * rows, "extra": {"kind": kind}},
        "training": {"num_microbatches": MICROBATCHES},
    }


def rank(task: dict[str, Any]) -> None:
    """Profile a model, or run sleeping layers by a layout; a recomputed layer sleeps its forward once more."""
    import torch
    import torch.distributed as dist

    from vpipe import Pipeline
    from vpipe.config import PipelineConfig
    from vpipe.models.emulated import SleepLayer
    from vpipe.plan.costs import Profile
    from vpipe.plan.profile import Measuring, measure_layers
    from vpipe.train.measure.profile import first_unit
    from vpipe.train.session import load_data, load_model

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if "configs" in task:
        found: dict[str, list[Any]] = {rows: [] for rows in task["configs"]}
        for _ in range(task["passes"]):  # in turn: a machine that gets slower is slow for all sizes
            for rows, config in task["configs"].items():
                wanted = PipelineConfig.from_dict(config)
                data = load_data(wanted)
                model = load_model(wanted, data.vocab_size)
                unit = first_unit(wanted, data).batches[0]
                how = Measuring(model.loss, lambda ps: torch.optim.Adam(ps), task["repeats"])
                dist.barrier()
                layers, size = measure_layers(model.layers, unit.inputs, unit.targets, how)
                found[rows].append(Profile(tuple(layers), size, microbatch_rows=int(rows)).to_json())
        common.answer(task, found)
    else:
        chains = [task["microbatches"] * batches for batches in task["batches"]]
        pipe = Pipeline(
            [SleepLayer(*times) for times in task["times"]],
            lambda output, target: output.sum() * 0,
            schedule=task["schedule"],
            num_microbatches=chains[-1],
            optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0),
            partition=task["partition"],
            recompute=set(task["recompute"]),
        )
        seconds = []
        for repeat in range(task["repeats"] + 1):
            taken = []
            for count in chains:
                x = torch.zeros(count, 16)
                dist.barrier()
                begin = time.perf_counter()
                pipe.train_step(x, x, num_microbatches=count)
                taken.append(time.perf_counter() - begin)
            more = task["batches"][-1] - task["batches"][0]
            if repeat:
                seconds.append((taken[-1] - taken[0]) / more if more else taken[0])
        common.answer(task, seconds)
    dist.barrier()
    dist.destroy_process_group()


def measured(profile: Any, layout: Any, schedule: str, microbatches: int, repeats: int) -> dict[str, float]:
    """Seconds of a batch on emulated devices; of an asynchronous schedule, of one batch more in its steady state."""
    from vpipe.plan.memory import Choice

    profile = charged(profile, schedule, microbatches)
    again = [layer for stage in range(layout.num_stages) for layer in layout.layers(stage, Choice.RECOMPUTE)]
    task = {
        "times": [(x.forward, x.input_grad, x.weight_grad) for x in profile.layers],
        "partition": list(layout.counts),
        "recompute": again,
        "schedule": schedule,
        "microbatches": microbatches,
        "repeats": repeats,
    }
    chains = [2, 4] if schedule == "pipedream" else [1]
    return common.summary(common.launch(__file__, RANKS, task | {"batches": chains})[0])


def middle(passes: list[Any]) -> Any:
    """The medians of several profiles of one model."""
    from vpipe.plan.costs import profile_from_json

    found = [profile_from_json(each) for each in passes]
    layers = iter(zip(*(profile.layers for profile in found), strict=True))

    def times(_: Any) -> list[float]:
        alike = next(layers)
        return [statistics.median(getattr(layer, name) for layer in alike) for name in TIMES]

    return _with_times(found[0], times)


def stretched(profiles: dict[int, Any]) -> dict[int, Any]:
    """The same model on a slower or faster device: all times by one factor, the machine around it free."""
    factor = LONGEST / max(layer.forward for layer in profiles[ROWS[0]].layers)
    return {
        rows: _with_times(profile, lambda x: [factor * t for t in (x.forward, x.input_grad, x.weight_grad, x.update)])
        for rows, profile in profiles.items()
    }


def charged(profile: Any, schedule: str, microbatches: int) -> Any:
    """Sleeping layers have no update that costs: it is slept with the weight gradient, after every unit where the
    schedule updates then, else in equal parts over the batch."""
    share = 1 if schedule == "pipedream" else microbatches
    return _with_times(profile, lambda x: [x.forward, x.input_grad, x.weight_grad + x.update / share, 0.0])


def _with_times(profile: Any, times: Callable[[Any], list[float]]) -> Any:
    layers = (replace(layer, **dict(zip(TIMES, times(layer), strict=True))) for layer in profile.layers)
    return replace(profile, layers=tuple(layers))


def balance(profile: Any, repeats: int) -> dict[str, Any]:
    """Equal layer counts against the plan, without a memory cap, under 1F1B."""
    from vpipe.layer import even_partition
    from vpipe.plan.layout import PlannedLayout
    from vpipe.plan.planner import plan

    found = plan(profile, RANKS, num_microbatches=MICROBATCHES, schedule="1f1b", swap=False)
    even = PlannedLayout.of_counts(even_partition(profile.num_layers, RANKS))
    sides = {"plan": found.layout, "equal counts": even}
    times = {name: measured(profile, layout, "1f1b", MICROBATCHES, repeats) for name, layout in sides.items()}
    return {
        "partitions": {name: list(layout.counts) for name, layout in sides.items()},
        "seconds": times,
        "speed": times["equal counts"]["median"] / times["plan"]["median"],
        "predicted_speed": _step(profile, even, "1f1b", MICROBATCHES) / found.step_time,
        "exact": found.exact,
    }


def _step(profile: Any, layout: Any, schedule: str, microbatches: int) -> float:
    from vpipe.plan.predict import Machine, Pipe, predict

    profile = charged(profile, schedule, microbatches)
    return predict(profile, layout, Pipe.of(schedule, RANKS, microbatches), Machine.of(RANKS, None)).step_time


def least_cap(profile: Any, schedule: str, microbatches: int, recompute: bool) -> float:
    """The smallest cap under which any partition fits."""
    from vpipe.plan.memory import Options
    from vpipe.plan.predict import Machine, Pipe, stage_facts
    from vpipe.plan.shortfall import shortfall

    program = Pipe.of(schedule, RANKS, microbatches).program
    return shortfall(profile, stage_facts(program, Machine.of(RANKS, 1.0)), Options(recompute, False)).missing + 1


def capped(profiles: dict[int, Any], repeats: int) -> dict[str, Any]:
    """Under a cap where plain 1F1B fits with no partition: the plan, GPipe's way, PipeDream's way."""
    from vpipe.plan.layout import PlannedLayout
    from vpipe.plan.memory import Choice
    from vpipe.plan.planner import plan

    profile = profiles[ROWS[0]]
    plain, least = (least_cap(profile, "1f1b", MICROBATCHES, recompute) for recompute in (False, True))
    cap = least + 0.4 * (plain - least)
    ways: dict[str, dict[str, Any]] = {}
    counts = plan(profile, RANKS, num_microbatches=MICROBATCHES, schedule="gpipe", swap=False).layout.counts
    everything = PlannedLayout.of_counts(counts, [[Choice.RECOMPUTE] * count for count in counts])
    sides = {
        "plan, 1f1b": planned(profile, "1f1b", cap),
        "plan, pipedream": planned(profile, "pipedream", cap),
        "GPipe: recompute everything": everything,
    }
    for name, layout in sides.items():
        schedule = "1f1b" if "1f1b" in name else "pipedream" if "pipedream" in name else "gpipe"
        ways[name] = _way(profile, layout, schedule, repeats)
    for rows, costs in profiles.items():
        layout = planned(costs, "pipedream", cap, recompute=False)
        if layout is not None:
            ways[f"PipeDream: microbatches of {rows}"] = _way(costs, layout, "pipedream", repeats)
            break
    return {"cap": cap, "plain_1f1b_needs": plain, "ways": ways}


def planned(profile: Any, schedule: str, cap: float, recompute: bool = True) -> Any:
    """The layout of the best plan under the cap; ``None`` where nothing fits."""
    from vpipe.plan.advice import Infeasible
    from vpipe.plan.planner import plan

    options = {"schedule": schedule, "memory": cap, "swap": False, "recompute": recompute}
    try:
        return plan(profile, RANKS, num_microbatches=MICROBATCHES, **options).layout
    except Infeasible:
        return None


def _way(profile: Any, layout: Any, schedule: str, repeats: int) -> dict[str, Any] | None:
    """How fast a layout is; the number of units is such that all ways have the same batch."""
    if layout is None:
        return None
    from vpipe.plan.memory import Choice

    units = MICROBATCHES * ROWS[0] // profile.microbatch_rows
    seconds = measured(profile, layout, schedule, units, repeats)
    batch = units * profile.microbatch_rows
    return {
        "seconds": seconds,
        "rows_per_second": batch / seconds["median"],
        "predicted_rows_per_second": batch / _step(profile, layout, schedule, units),
        "recomputed_layers": sum(len(layout.layers(stage, Choice.RECOMPUTE)) for stage in range(RANKS)),
        "partition": list(layout.counts),
    }


def table(result: dict[str, Any]) -> str:
    lines = [f"planned against equal layer counts: 1F1B, p={RANKS}, m={MICROBATCHES}, emulated devices, measured costs"]
    for name, row in result["balance"].items():
        lines.append(
            f"{name:22} plan {row['partitions']['plan']} {row['seconds']['plan']['median']:.3f} s   equal "
            f"{row['partitions']['equal counts']} {row['seconds']['equal counts']['median']:.3f} s   "
            f"plan is {row['speed']:.2f} times as fast (predicted {row['predicted_speed']:.2f})"
        )
    lines.append("\nunder a memory cap where plain 1F1B does not fit")
    for name, row in result["capped"].items():
        cap, needs = row["cap"] / 2**20, row["plain_1f1b_needs"] / 2**20
        lines.append(f"{name}: cap {cap:.0f} MiB; plain 1F1B needs {needs:.0f} MiB with its best partition")
        for way, facts in row["ways"].items():
            if facts is None:
                lines.append(f"    {way:32} does not fit")
                continue
            lines.append(
                f"    {way:32} {facts['rows_per_second']:7.1f} rows/s (predicted "
                f"{facts['predicted_rows_per_second']:.1f})   {facts['partition']}, recomputes "
                f"{facts['recomputed_layers']} layers"
            )
    return "\n".join(lines)


def main() -> None:
    arguments = common.options(__doc__ or "", rank)
    repeats = 2 if arguments.quick else 5
    sizes, names = (ROWS[:2], list(MODELS)[:1]) if arguments.quick else (ROWS, list(MODELS))
    profiles = {}
    for name in names:
        task = {"configs": {rows: config(name, rows) for rows in sizes}, "repeats": 4 if arguments.quick else 8}
        found = common.launch(__file__, 2, task | {"passes": 1 if arguments.quick else 3})[0]
        profiles[name] = stretched({int(rows): middle(each) for rows, each in found.items()})
    result = {
        "question": "planner_worth",
        "balance": {name: balance(each[ROWS[0]], repeats) for name, each in profiles.items()},
        "capped": {name: capped(each, repeats) for name, each in profiles.items()},
    }
    common.finish(arguments, result, table)


if __name__ == "__main__":
    main()
