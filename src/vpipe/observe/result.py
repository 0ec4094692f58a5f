"""One run of a comparison as figures: what goes into its JSON, its row of the CSV, its line on the page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vpipe.errors import UserError
from vpipe.observe.console import duration
from vpipe.observe.memory import tensor_bytes
from vpipe.observe.payload import recorded
from vpipe.observe.timelines import timelines
from vpipe.observe.trend import thinned
from vpipe.rundir.reader import RunDirectory, open_run

KEYS = (
    "time_per_iteration_seconds",
    "throughput_tokens_per_second",
    "samples_per_second",
    "mfu",
    "effective_iterations",
    "warmup_iterations",
    "total_tokens",
    "device_name",
    "dtype",
)
"""Taken from summary.json as they are: warm-up and profiled iterations are already left out of them."""


def measured(directory: Path) -> dict[str, Any]:
    """The figures of a finished run."""
    run = open_run(directory)
    summary = run.summary()
    if summary is None:
        raise UserError(f"{directory} has no summary.json: the run ended without one")
    lines = run.metrics()
    train = [line for line in lines if line.get("kind") == "train"]
    tested = [line for line in lines if line.get("kind") == "evaluation"]
    program = run.program
    found = {key: summary.get(key) for key in KEYS}
    found |= {
        "directory": str(directory),
        "num_ranks": program.num_ranks,
        "num_stages": program.num_stages,
        "partition": run.facts.partition,
        "model_name": run.facts.model.name,
        "iterations": train[-1].get("iteration") if train else 0,
        "updates": train[-1].get("update") if train else 0,
        "final_loss": train[-1].get("loss") if train else None,
        "evaluation_loss": tested[-1].get("loss") if tested else None,
        "losses": [[line.get("iteration"), line.get("loss")] for line in train],
        "curve": _curve(train),
        "evaluations": [[line.get("iteration"), line.get("loss")] for line in tested],
    }
    return found | _traced(run)


def _curve(train: list[dict[str, Any]]) -> list[list[Any]]:
    """[seconds of training so far, loss], thinned out for the page."""
    spent, points = 0.0, []
    previous = 0
    for line in train:
        number = int(line.get("iteration") or 0)
        spent += float(line.get("seconds") or 0.0) * max(1, number - previous)
        previous = number
        points.append({"at": round(spent, 6), "iteration": number, "loss": line.get("loss")})
    return [[point["at"], point["iteration"], point["loss"]] for point in thinned(points, 400)]


def _traced(run: RunDirectory) -> dict[str, Any]:
    """What the recorded steps tell: bubble, simulation, versions, memory."""
    steps = recorded(run)
    if not steps:
        return {"bubble": None}
    told = timelines(steps)
    prediction = told["prediction"]
    held = [max(memory.get(key, 0) for key in ("peak", "rss", "allocated")) for step in steps for memory in step.memory]
    tensors = [size for step in steps for memory in step.memory if (size := tensor_bytes(memory)) is not None]
    return {
        "bubble": prediction.get("measured_bubble"),
        "idle_by_cause": prediction["shares"][-1][1:],
        "step_seconds": prediction.get("measured_seconds"),
        "simulation_error": prediction.get("error"),
        "peak_activations": prediction.get("peak_activations"),
        "weight_versions": prediction.get("weight_versions"),
        "staleness": prediction.get("staleness"),
        "peak_memory": max(held, default=None),
        "tensor_memory": max(tensors, default=None),
        "executed_verifies": not told["verified"],
    }


def outcome(result: Mapping[str, Any]) -> str:
    """One line about a run."""
    if result.get("status") != "done":
        return f"failed: {result.get('reason')}"
    rate, loss = result.get("throughput_tokens_per_second"), result.get("final_loss")
    parts = [f"{rate:,.0f} tokens/s" if isinstance(rate, int | float) else "no throughput"]
    if isinstance(bubble := result.get("bubble"), int | float):
        parts.append(f"bubble {bubble:.1%}")
    if isinstance(loss, int | float):
        parts.append(f"loss {loss:.4f}")
    parts.append(f"in {duration(float(result.get('wall_seconds') or 0))}")
    return ", ".join(parts)
