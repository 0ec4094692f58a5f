"""``vpipe plan --check``: the plan's prediction beside a few real steps on this machine."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from vpipe import config as configs
from vpipe.cli.bar import following
from vpipe.rundir.layout import PLAN

if TYPE_CHECKING:
    from vpipe.plan.planner import Plan

STEPS = 8


def compare(plan: Plan, config: configs.PipelineConfig, quiet: bool = True) -> dict[str, Any] | int:
    """Step, stages and ranks, predicted and measured; or the exit code of a run that failed, which was said."""
    from vpipe.launch import local
    from vpipe.launch.zygote_start import PRELOAD

    with tempfile.TemporaryDirectory(prefix="vpipe-check-") as directory:
        path = Path(directory) / PLAN
        plan.save(path)
        arguments = {"config": _obedient(config, plan, path), "directory": directory, "num_steps": STEPS}
        with following(Path(directory), "checking", quiet):
            code = local.run(
                "vpipe.train.measure.plan_check:steps",
                plan.total_ranks,
                arguments=arguments,
                environment={"KINETO_LOG_LEVEL": "99"},  # the profiler that counts bytes would talk
                threads=config.launch.threads,
                preload=(*PRELOAD, "vpipe.train.measure.plan_check"),
            )
        if code:
            return code
        seen = [json.loads((Path(directory) / f"check{rank}.json").read_text()) for rank in range(plan.total_ranks)]
    times = {int(stage): time for rank in seen for stage, time in rank["stages"].items()}
    found = plan.prediction
    return {
        "steps": STEPS,
        "step": _pair(found.step_time, median(seen[0]["steps"])),
        "stages": [_pair(time, times[stage]) for stage, time in enumerate(found.stage_times)],
        "rank_memory": [_pair(size, rank["tensors"]) for size, rank in zip(found.rank_memory, seen, strict=True)],
        "rank_resident": [rank["resident"] for rank in seen],
    }


def _obedient(config: configs.PipelineConfig, plan: Plan, path: Path) -> dict[str, Any]:
    """The config as a run of the plan, one pipeline of local processes."""
    from vpipe.cli.plan import run_settings

    values = config.to_dict()
    for section, settings in run_settings(plan, path, config).items():
        values[section] |= settings
    values["parallel"] |= {
        "scheduler": plan.schedule,
        "recompute": 0.0,
        "swap": 0.0,
        "transport": "auto" if config.parallel.transport == "inprocess" else config.parallel.transport,
        "priority": "none",
        "use_orion_scheduler": False,
    }
    return values


def _pair(predicted: float, measured: float) -> dict[str, float]:
    return {"predicted": predicted, "measured": measured, "error": predicted / measured - 1 if measured else 0.0}


def table(check: dict[str, Any]) -> str:
    """The comparison as a person reads it."""
    from vpipe.plan.costs import align
    from vpipe.plan.units import format_bytes, format_seconds

    def row(name: str, pair: dict[str, float], write: Callable[[float], str]) -> tuple[str, ...]:
        return name, write(pair["predicted"]), write(pair["measured"]), f"{pair['error']:+.1%}"

    cells = [row("step", check["step"], format_seconds)]
    cells += [row(f"stage {stage}", pair, format_seconds) for stage, pair in enumerate(check["stages"])]
    cells += [row(f"tensors of rank {rank}", pair, format_bytes) for rank, pair in enumerate(check["rank_memory"])]
    head = f"checked by {check['steps']} steps on this machine"
    resident = ", ".join(format_bytes(size) for size in check["rank_resident"])
    beside = f"the ranks' processes held {resident} beyond an empty one, with what the allocator keeps"
    return align([(head, "predicted", "measured", "error"), *cells], left={0}) + f"\n{beside}"
