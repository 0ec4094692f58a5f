"""What a page shows, as plain data: the same object for the report on disk and for the live page.

Everything that the page needs is computed here, so that the page only draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from vpipe.observe.console import unit
from vpipe.observe.diagnosis import verdict
from vpipe.observe.measured import Measured, join
from vpipe.observe.memory import memory_table
from vpipe.observe.playground_look import look
from vpipe.observe.timelines import timelines
from vpipe.observe.trend import thinned, trend
from vpipe.rundir.facts import RunFacts
from vpipe.rundir.reader import MAX_BYTES, RunDirectory
from vpipe.rundir.story import story

MAX_POINTS = 1500
"""Of a curve; a longer run is thinned out."""
FACTS = (
    "vpipe", "torch", "started", "schedule", "synchronous", "num_ranks", "num_stages", "num_microbatches", "partition",
    "placement", "model", "stages", "hosts", "command", "iterations", "directory",
)  # fmt: skip


def payload(
    run: RunDirectory,
    steps: Sequence[Measured],
    *,
    advice: Mapping[str, Any] | None = None,
    most_bytes: int = MAX_BYTES,
) -> dict[str, Any]:
    """Everything about a run; ``steps`` are those of ``recorded``.

    A live page gives an ``advice`` of a moment ago, which is dear, and reads at most ``most_bytes`` of each file of
    short lines.
    """
    lines = run.metrics()
    found: dict[str, Any] = {
        "format": 1,
        "title": run.path.resolve().name,
        "state": story(run.path),
        "facts": {key: told for key, told in asdict(run.facts).items() if key in FACTS and told is not None},
        "metrics": curves(lines),
        "layouts": layouts(lines),
        "recoveries": recoveries(lines),
        "summary": run.summary(),
        "config": run.config_text(),
        "plan": run.plan(),
    } | look()
    found |= timelines(steps)
    if (prediction := found["prediction"]) is not None:
        prediction["iteration_seconds"] = _iteration_seconds(lines, prediction.pop("iterations"))
    found["trend"] = trend(run, most_bytes)
    found["verdict"] = advice or verdict(run, steps)
    found["memory"] = memory_table(run, steps)
    notes = list(run.notes)
    if not steps:
        off = run.facts.trace is False
        notes.append(
            "observe.trace is off: no step is recorded" if off else "no step has been recorded by all ranks yet"
        )
    found["notes"] = notes
    return found


def unstarted(path: Path) -> dict[str, Any]:
    """The page of a run that has not said what it runs: its state, why, and its config."""
    bare = RunDirectory(path, RunFacts())
    return {
        "format": 1,
        "title": path.resolve().name,
        "state": story(path),
        "facts": {},
        "metrics": curves([]),
        "config": bare.config_text(),
        "steps": [],
        "programs": {},
        "notes": list(bare.notes),
    }


def recorded(run: RunDirectory, last: int | None = None) -> list[Measured]:
    """The steps that all ranks have written down, or only the last of them."""
    return [join(run.program, ranks) for ranks in run.common_steps(last)]


TESTED = ("iteration", "loss", "examples", "targets")


def curves(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Loss, throughput and the rest as columns, thinned out to what a screen can show."""
    train = [line for line in lines if line.get("kind") == "train"]
    evaluations = [line for line in lines if line.get("kind") == "evaluation"]
    names = ("iteration", "epoch", "loss", "learning_rate", "tokens_per_second", "seconds", "gradient_norm", "time")
    thin, tested = thinned(train, MAX_POINTS), thinned(evaluations, MAX_POINTS)
    return {
        "count": len(train),
        "train": {name: [_number(line.get(name)) for line in thin] for name in names},
        "evaluation": {name: [_number(line.get(name)) for line in tested] for name in TESTED},
        "norms": {
            "iteration": [line["iteration"] for line in thin if "gradient_norms" in line],
            "of": [line["gradient_norms"] for line in thin if "gradient_norms" in line],
        },
        "unit": unit(train[-1]) if train else "tokens",
        "skipped": max((int(line.get("skipped") or 0) for line in train), default=0),
    }


def _iteration_seconds(lines: Sequence[Mapping[str, Any]], iterations: Sequence[int]) -> float | None:
    """Of the iterations whose steps stand for the run."""
    seconds = {line.get("iteration"): line.get("seconds") for line in lines if line.get("kind") == "train"}
    known = [told for each in iterations if isinstance(told := seconds.get(each), int | float)]
    return median(known) if known else None


def layouts(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The latest decisions of ``parallel.adapt``: the layout over time, and why."""
    told = [line for line in lines if line.get("kind") == "adapt"]
    names = ("iteration", "action", "partition", "reason")
    return [{name: line.get(name) for name in names} | {"ranks": _ranks(line)} for line in told[-100:]]


def _ranks(line: Mapping[str, Any]) -> list[list[int]]:
    """The ranks of each stage after a move; empty where nothing moved."""
    holders = (line.get("layout") or {}).get("holders") or []
    return [[holder["rank"] for holder in stage] for stage in holders]


def recoveries(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The latest losses of ranks of an elastic run, and what the time until the first new step went to."""
    told = [line for line in lines if line.get("kind") == "recovery"]
    return [
        {name: line.get(name) for name in ("iteration", "ranks", "lost", "losses", "seconds")} for line in told[-100:]
    ]


def _number(value: object) -> float | int | None:
    """Six digits are more than a curve shows; what is not finite is a gap."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return None
    return value if isinstance(value, int) or value > 1e8 else float(f"{value:.6g}")
