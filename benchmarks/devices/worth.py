"""What a plan is worth on devices whose kernels cost a launch and a rate: VPipe's plan under a memory cap against
PipeDream's way (keep everything, smaller microbatches) and GPipe's (recompute everything).

Four emulated accelerators run the real models by the real runtime; their kernels compute nothing and take the time that
the cost model says, so small microbatches are not free. Layers are profiled on such a device as ``vpipe profile`` does.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "emulated")]
import common

RANKS, MICROBATCHES = 4, 8
ROWS = (16, 8, 4, 2)
"""Rows of a microbatch; where memory is short, PipeDream's way is the first of the smaller ones that fits."""
STRETCH = 100
"""How much slower than the stated device the emulated one is, so that the host of four fits on two cores."""
LAUNCHES = (5.0, 20.0)
"""Microseconds that a kernel takes at least: a GPU's own launch, and a launch by a host that is slower than it."""
FLOPS, BYTES, LINK, COPY, LATENCY = 10e12, 500e9, 10e9, 10e9, 10.0
"""A second of the stated device: products, memory, a link to a neighbour, the bus to the host; a message's µs."""
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"name": "gpt", "hidden_size": 256, "num_layers": 10, "num_heads": 4, "vocab_size": 2000},
    "bert": {"name": "bert", "hidden_size": 256, "num_layers": 8, "num_heads": 4, "vocab_size": 2000},
    "translation": {"name": "translation", "hidden_size": 256, "num_layers": 6, "num_heads": 4, "vocab_size": 2000},
}
CAP = 0.4
"""Of the way from the least memory that recompute can reach to the least that plain 1F1B needs."""


def devices(launch: float) -> Any:
    """The emulated devices with the cost model, ``STRETCH`` times as slow."""
    import emulated_device as emulated

    emulated.reset()
    slow = 1e6 * STRETCH
    emulated.settings(
        op_us=launch * STRETCH, flops_per_us=FLOPS / slow, bytes_per_us=BYTES / slow, link_bytes_per_us=LINK / slow,
        link_latency_us=LATENCY * STRETCH, copy_bytes_per_us=COPY / slow, skip_compute=1, poison=0,
    )  # fmt: skip
    return emulated


@dataclass(frozen=True)
class Given:
    """A model, and a microbatch of it with its measured costs."""

    model: Any
    unit: Any
    pad_id: int | None
    profile: Any


def given(name: str, rows: int) -> Given:
    import emulated_device as emulated
    import torch

    from vpipe.config import PipelineConfig
    from vpipe.plan.costs import Profile
    from vpipe.plan.profile import Measuring, measure_layers
    from vpipe.train.measure.profile import first_unit
    from vpipe.train.session import load_data, load_model

    class ByCostModel(Measuring):
        """Layers cost what their kernels are charged: a plan does not depend on how busy this machine is."""

        def now(self) -> float:
            super().now()
            return float(emulated.native.charged_ns()) * 1e-9

    config = PipelineConfig.from_dict(
        {
            "model": MODELS[name] | {"sequence_length": 64, "extra": {"tied": False}},  # asynchronous, too
            "dataset": {"name": "synthetic", "batch_size": MICROBATCHES * rows, "extra": {"kind": name}},
            "training": {"num_microbatches": MICROBATCHES},
        }
    )
    data = load_data(config)
    model = load_model(config, data.vocab_size)
    unit = first_unit(config, data).batches[0]
    how = ByCostModel(model.loss, torch.optim.Adam, 1, device=torch.device("emu", 0))
    layers, size = measure_layers(model.layers, unit.inputs, unit.targets, how)
    slow = float(STRETCH)
    profile = Profile(
        tuple(layers), size, microbatch_rows=rows, link_latency=LATENCY * 1e-6 * slow, link_bandwidth=LINK / slow,
        swap_bandwidth=COPY / slow, device={"name": "emulated", "memory_bytes": 1e12},
    )  # fmt: skip
    return Given(model, unit, data.pad_id, profile)


def measured(what: Given, layout: Any, schedule: str, units: int, repeats: int) -> tuple[list[float], int]:
    """Seconds of a batch, of an asynchronous schedule those of one more in its steady state; and the most bytes that a
    device's allocator has given out."""
    import torch

    from vpipe import Pipeline
    from vpipe.plan.memory import Choice
    from vpipe.train.feed import Units

    def chosen(choice: Choice) -> set[int]:
        return {layer for stage in range(RANKS) for layer in layout.layers(stage, choice)}

    pipe = Pipeline(
        what.model.layers, what.model.loss, schedule=schedule, num_microbatches=units, num_ranks=RANKS,
        partition=list(layout.counts), recompute=chosen(Choice.RECOMPUTE), swap=chosen(Choice.SWAP), device="emu",
        optimizer=torch.optim.Adam, skip_nonfinite=False, tied=what.model.tied,
    )  # fmt: skip

    def taken(count: int) -> float:
        data = Units([what.unit] * count, what.pad_id)
        begin = time.perf_counter()
        pipe.train_step(data.inputs(), data.targets(), num_microbatches=count)
        return time.perf_counter() - begin

    gc.collect()  # what another way has left on the devices
    steady = schedule == "pipedream"
    taken(RANKS if steady else units)
    for rank in range(RANKS):
        torch.accelerator.reset_peak_memory_stats(rank)
    found = [taken(2 * units) - taken(units) if steady else taken(units) for _ in range(repeats)]
    most = max(torch.accelerator.max_memory_allocated(rank) for rank in range(RANKS))
    pipe.close()
    return found, int(most)


def way(what: Given, layout: Any, schedule: str, repeats: int) -> dict[str, Any]:
    """How fast a layout is; the number of units is such that all ways have the same batch."""
    from vpipe.plan.memory import Choice
    from vpipe.plan.predict import Machine, Pipe, predict

    units = MICROBATCHES * ROWS[0] // what.profile.microbatch_rows
    expected = predict(what.profile, layout, Pipe.of(schedule, RANKS, units), Machine.of(RANKS, None))
    seconds, peak = measured(what, layout, schedule, units, repeats)
    facts = common.summary(seconds)
    rows = MICROBATCHES * ROWS[0] * STRETCH
    return {
        "seconds": facts,
        "rows_per_second": rows / facts["median"],
        "predicted_rows_per_second": rows / expected.step_time,
        "peak_bytes": peak,
        "predicted_peak_bytes": max(expected.rank_memory),
        "partition": list(layout.counts),
        **{
            choice.value: sum(len(layout.layers(stage, choice)) for stage in range(RANKS))
            for choice in (Choice.RECOMPUTE, Choice.SWAP)
        },
    }


def least_cap(profile: Any, recompute: bool) -> float:
    """The smallest cap under which any partition of 1F1B fits."""
    from vpipe.plan.memory import Options
    from vpipe.plan.predict import Machine, Pipe, stage_facts
    from vpipe.plan.shortfall import shortfall

    pipe = Pipe.of("1f1b", RANKS, MICROBATCHES)
    facts = stage_facts(pipe.program, Machine.of(RANKS, 1.0), messages=pipe.messages)
    return shortfall(profile, facts, Options(recompute, False)).missing + 1


def planned(profile: Any, schedule: str, cap: float | None, **may: bool) -> Any:
    """The layout of the best plan under the cap; ``None`` where nothing fits."""
    from vpipe.plan.advice import Infeasible
    from vpipe.plan.planner import plan

    try:
        return plan(profile, RANKS, num_microbatches=MICROBATCHES, schedule=schedule, memory=cap, **may).layout
    except Infeasible:
        return None


def compared(name: str, launch: float, repeats: int) -> dict[str, Any]:
    """All ways of one model under the cap."""
    from vpipe.plan.layout import PlannedLayout
    from vpipe.plan.memory import Choice

    devices(launch)
    whole = given(name, ROWS[0])
    plain, least = (least_cap(whole.profile, recompute) for recompute in (False, True))
    cap = least + CAP * (plain - least)
    counts = planned(whole.profile, "gpipe", None, swap=False, recompute=False).counts
    everything = PlannedLayout.of_counts(counts, [[Choice.RECOMPUTE] * count for count in counts])
    sides = {
        "VPipe: plan, pipedream": (planned(whole.profile, "pipedream", cap), "pipedream"),
        "plan, 1f1b": (planned(whole.profile, "1f1b", cap), "1f1b"),
        "GPipe: recompute everything": (everything, "gpipe"),
    }
    ways = {side: way(whole, layout, schedule, repeats) for side, (layout, schedule) in sides.items() if layout}
    for rows in ROWS:
        smaller = whole if rows == ROWS[0] else given(name, rows)
        layout = planned(smaller.profile, "pipedream", cap, recompute=False, swap=False)
        if layout is not None:
            ways[f"PipeDream: microbatches of {rows}"] = way(smaller, layout, "pipedream", repeats)
            break
    dearer = _row_cost(smaller.profile) / _row_cost(whole.profile)
    return {"cap": cap, "plain_1f1b_needs": plain, "row_cost_of_smaller": dearer, "ways": ways}


def _row_cost(profile: Any) -> float:
    return float(sum(layer.total for layer in profile.layers)) / float(profile.microbatch_rows)


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{RANKS} emulated devices; a kernel takes a launch + products at {FLOPS / 1e12:.0f} TFLOP/s or memory at "
        f"{BYTES / 1e9:.0f} GB/s; link {LINK / 1e9:.0f} GB/s after {LATENCY:.0f} µs; bus {COPY / 1e9:.0f} GB/s"
    ]
    for title, row in result["models"].items():
        lines.append(
            f"{title}: cap {row['cap'] / 2**20:.0f} MiB (plain 1F1B needs {row['plain_1f1b_needs'] / 2**20:.0f}); a "
            f"row of PipeDream's microbatch costs {row['row_cost_of_smaller']:.2f} of one of 16"
        )
        for side, facts in row["ways"].items():
            lines.append(
                f"    {side:30} {facts['rows_per_second']:7.0f} rows/s (predicted "
                f"{facts['predicted_rows_per_second']:.0f})   peak {facts['peak_bytes'] / 2**20:.0f} MiB (predicted "
                f"{facts['predicted_peak_bytes'] / 2**20:.0f})   {facts['partition']}, recomputes "
                f"{facts['recompute']}, swaps {facts['swap']}"
            )
    return "\n".join(lines)


def main() -> None:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model", choices=[*MODELS], help="only this one")
        parser.add_argument("--launch", type=float, choices=LAUNCHES, help="only this cost of a launch, in µs")
        parser.add_argument("--repeats", type=int, default=1, help="sleeps differ little")

    arguments = common.options(__doc__ or "", more=more)
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="the gradients of")  # no values, so I and W cannot be told apart
    names = [arguments.model] if arguments.model else list(MODELS)[: 1 if arguments.quick else None]
    found = {
        f"{name}, a launch of {launch:.0f} µs": compared(name, launch, arguments.repeats)
        for name in names
        for launch in ([arguments.launch] if arguments.launch else LAUNCHES[: 1 if arguments.quick else None])
    }
    common.finish(arguments, {"question": "devices/worth", "models": found}, table)


if __name__ == "__main__":
    main()
