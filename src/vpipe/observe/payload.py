"""What a page shows, as plain data: the same object for the report on disk and for the live page.

Everything that the page needs is computed here, so that the page only draws. Times travel as whole tenths of a
microsecond, as differences, and the actions of a step only once: that is what keeps a page of twenty steps with
thousands of actions each well below its limit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import median
from typing import Any

from vpipe.errors import UserError
from vpipe.observe.bubbles import CAUSES, NAMES, Bubbles, attribute
from vpipe.observe.calibrate import calibrate
from vpipe.observe.measured import Measured, from_simulation, join
from vpipe.observe.memory import memory_table
from vpipe.observe.rundir import Event, RunDirectory
from vpipe.observe.waits import meetings
from vpipe.schedule import draw, svg
from vpipe.schedule.simulate import Simulation, simulate
from vpipe.schedule.verify import verify

TICK = 100
"""Nanoseconds of the page's unit of time."""
MAX_POINTS = 1500
"""Of a curve; a longer run is thinned out."""
MAX_TIMES = 1_000_000
"""Characters of recorded steps in a page; older steps are left out."""
FACTS = (
    "vpipe", "torch", "started", "schedule", "synchronous", "num_ranks", "num_stages", "num_microbatches", "partition",
    "placement", "model", "stages", "hosts", "command", "iterations", "directory",
)  # fmt: skip


def payload(run: RunDirectory, steps: Sequence[Measured]) -> dict[str, Any]:
    """Everything about a run; ``steps`` are those of ``recorded``."""
    found = {
        "format": 1,
        "title": run.path.resolve().name,
        "state": "finished" if run.finished else "running",
        "facts": {key: run.facts.raw[key] for key in FACTS if key in run.facts.raw},
        "kinds": {kind.value: name for kind, name in draw.NAMES.items()},
        "colours": {kind.value: fills for kind, fills in svg.FILLS.items()},
        "causes": [[cause, NAMES[cause]] for cause in CAUSES],
        "metrics": curves(run.metrics()),
        "summary": run.summary(),
        "config": run.config_text(),
        "plan": run.plan(),
    }
    found |= timelines(steps)
    found["memory"] = memory_table(run, steps)
    notes = list(run.notes)
    if not steps:
        off = run.facts.raw.get("trace") is False
        notes.append(
            "observe.trace is off: no step is recorded" if off else "no step has been recorded by all ranks yet"
        )
    found["notes"] = notes
    return found


def recorded(run: RunDirectory, last: int | None = None) -> list[Measured]:
    """The steps that all ranks have written down, or only the last of them."""
    return [join(run.facts.program, ranks) for ranks in run.common_steps(last)]


def timelines(steps: Sequence[Measured]) -> dict[str, Any]:
    """The recorded steps, the simulation that they calibrate, and what both say about idle time."""
    if not steps:
        return {"steps": [], "rows": [], "simulated": None, "prediction": None, "verified": None}
    last = steps[-1]
    rows = actions(last)
    bubbles = [attribute(step) for step in steps]
    simulation, problem = simulated(steps)
    found: dict[str, Any] = {
        "rows": rows,
        "steps": _within_budget(steps, bubbles, rows),
        "simulated": None,
        "prediction": None,
        "verified": [str(each) for each in verify(last.program)][:5],
    }
    if simulation is None:
        found["simulation_problem"] = problem
        return found
    drawn = from_simulation(simulation)
    expected = attribute(drawn)
    found["simulated"] = timeline(drawn, expected) | {"rows": actions(drawn)}
    measured = [step.span for step in (steps[1:] if len(steps) > 2 else steps)]
    typical = median(measured) * 1e-9
    found["prediction"] = {
        "simulated_seconds": simulation.makespan,
        "measured_seconds": typical,
        "error": simulation.makespan / typical - 1 if typical else None,
        "simulated_bubble": expected.fraction,
        "measured_bubble": median(each.fraction for each in bubbles),
        "latency": simulation.costs.latency,
        "overhead": simulation.costs.overhead,
        "peak_activations": simulation.peak_activations,
        "weight_versions": simulation.weight_versions,
        "staleness": simulation.staleness,
    }
    return found


def simulated(steps: Sequence[Measured]) -> tuple[Simulation | None, str]:
    """The simulation with the measured medians as costs, or why there is none."""
    try:
        return simulate(steps[-1].program, calibrate(steps)), ""
    except UserError as error:
        return None, str(error)


def actions(step: Measured) -> list[list[list[Any]]]:
    """Per rank, [kind, stage, microbatch] of every action."""
    return [[[e.action.kind.value, e.action.stage, e.action.microbatch] for e in row] for row in step.ranks]


def timeline(step: Measured, bubbles: Bubbles) -> dict[str, Any]:
    """A step as the page draws it: per rank (gap before, waited, worked) of every action, in ticks."""
    met = meetings(step)
    ranks = []
    for rank, row in enumerate(step.ranks):
        times: list[int] = []
        at = 0
        for index, event in enumerate(row):
            ready = met.get((rank, index), (event.ready, rank))[0]
            begin, ready, end = event.begin // TICK, ready // TICK, event.end // TICK
            times += [begin - at, ready - begin, end - ready]
            at = end
        ranks.append(times)
    found: dict[str, Any] = {
        "step": step.step,
        "iteration": step.iteration,
        "time": step.time,
        "span": step.span // TICK,
        "lead": step.lead // TICK,
        "ranks": ranks,
        "bubbles": {
            "window": bubbles.window // TICK,
            "busy": [each // TICK for each in bubbles.busy],
            "parts": [[part[cause] // TICK for cause in CAUSES] for part in bubbles.parts],
        },
    }
    if any(step.swaps):
        found["swaps"] = [_swaps(lane) for lane in step.swaps]
    return found


def _swaps(lane: Sequence[Event]) -> list[list[Any]]:
    """[kind, stage, microbatch, gap before, took] of everything on a rank's swap lane."""
    found, at = [], 0
    for event in lane:
        begin, end = event.ready // TICK, event.end // TICK
        found.append([event.action.kind.value, event.action.stage, event.action.microbatch, begin - at, end - begin])
        at = end
    return found


def _within_budget(
    steps: Sequence[Measured], bubbles: Sequence[Bubbles], rows: list[list[list[Any]]]
) -> list[dict[str, Any]]:
    """As many of the latest steps as fit, oldest first; a step with actions of its own carries them."""
    found: list[dict[str, Any]] = []
    size = len(json.dumps(rows))
    for step, causes in zip(reversed(steps), reversed(bubbles), strict=True):
        drawn = timeline(step, causes)
        if (own := actions(step)) != rows:
            drawn["rows"] = own
        size += len(json.dumps(drawn))
        if found and size > MAX_TIMES:
            break
        found.append(drawn)
    return found[::-1]


def curves(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Loss, throughput and the rest as columns, thinned out to what a screen can show."""
    train = [line for line in lines if line.get("kind") == "train"]
    evaluations = [line for line in lines if line.get("kind") == "evaluation"]
    names = ("iteration", "epoch", "loss", "learning_rate", "tokens_per_second", "seconds", "gradient_norm", "time")
    thin, tested = thinned(train), thinned(evaluations)
    return {
        "count": len(train),
        "train": {name: [_number(line.get(name)) for line in thin] for name in names},
        "evaluation": {name: [_number(line.get(name)) for line in tested] for name in ("iteration", "loss")},
        "skipped": max((int(line.get("skipped") or 0) for line in train), default=0),
    }


def thinned(lines: Sequence[Mapping[str, Any]], most: int = MAX_POINTS) -> list[Mapping[str, Any]]:
    """Evenly chosen lines, the first and the last among them."""
    if len(lines) <= most:
        return list(lines)
    stride = (len(lines) - 1) / (most - 1)
    return [lines[round(index * stride)] for index in range(most)]


def _number(value: object) -> float | int | None:
    """Six digits are more than a curve shows; what is not finite is a gap."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return None
    return value if isinstance(value, int) or value > 1e8 else float(f"{value:.6g}")
