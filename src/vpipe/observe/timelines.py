"""The recorded steps, the simulations that they calibrate, and what both say about idle time, as the page draws them.

Times travel as whole tenths of a microsecond, as differences, and the actions of a program only once: that is what
keeps a page of twenty steps with thousands of actions each well below its limit.

Steps need not execute the same program: an asynchronous run chains as many iterations between two drains as fit, and
the first and the last chain differ from the others. A measured step is therefore laid beside the simulation of its own
program, and figures that stand for the run are those of the program that most of its steps executed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from statistics import median
from typing import Any, NamedTuple

from vpipe.errors import UserError
from vpipe.observe.bubbles import CAUSES, Bubbles, attribute, medians
from vpipe.observe.calibrate import calibrate
from vpipe.observe.measured import Measured, from_simulation
from vpipe.rundir.reader import Event
from vpipe.schedule.program import Program
from vpipe.schedule.simulate import Simulation, simulate
from vpipe.schedule.verify import verify

TICK = 100
"""Nanoseconds of the page's unit of time."""
MAX_TIMES = 1_000_000
"""Characters of recorded steps in a page; older steps are left out."""
MAX_PROGRAMS = 3
"""Programs that are simulated: those of most steps."""


class Typical(NamedTuple):
    """What stands for the run: steps of one program, and its simulation with the measured medians as costs."""

    steps: list[Measured]
    simulation: Simulation | None
    simulations: dict[str, Simulation]
    """Of the most common programs, by their keys."""
    problem: str
    """Why there is none, where there is none."""


def timelines(steps: Sequence[Measured]) -> dict[str, Any]:
    """Everything that the page draws and tells of recorded steps."""
    if not steps:
        return {"steps": [], "programs": {}, "prediction": None, "verified": None}
    chosen = typical(steps)
    programs: dict[str, dict[str, Any]] = {}
    for step in reversed(steps):
        if step.key not in programs:
            programs[step.key] = {"rows": actions(step), "units": step.program.num_microbatches, "simulated": None}
    for name, simulation in chosen.simulations.items():
        drawn = from_simulation(simulation)
        programs[name]["simulated"] = timeline(drawn, attribute(drawn)) | {"rows": actions(drawn)}
    kept = _within_budget(steps, len(json.dumps(programs)))
    used = {step["program"] for step in kept} | {_most_common(steps)}
    found: dict[str, Any] = {
        "steps": kept,
        "programs": {name: told for name, told in programs.items() if name in used},
        "prediction": _prediction(chosen),
        "verified": [str(each) for each in _violations(steps[-1].program)],
    }
    return found | ({"simulation_problem": chosen.problem} if chosen.problem else {})


def typical(steps: Sequence[Measured]) -> Typical:
    """The program that most steps executed; its first step is left out where there are others."""
    programs = {step.key: step.program for step in steps}
    common = Counter(step.key for step in steps).most_common(MAX_PROGRAMS)
    simulations: dict[str, Simulation] = {}
    problem = ""
    try:
        costs = calibrate(steps)
        simulations = {name: simulate(programs[name], costs) for name, _ in common}
    except UserError as error:
        problem = str(error)
    name = _most_common(steps)
    members = [step for step in steps if step.key == name]
    return Typical(members[1:] if len(members) > 2 else members, simulations.get(name), simulations, problem)


def _most_common(steps: Sequence[Measured]) -> str:
    """The program of most steps; of several, the latest."""
    counts = Counter(step.key for step in steps)
    return max(enumerate(steps), key=lambda each: (counts[each[1].key], each[0]))[1].key


def _prediction(of: Typical) -> dict[str, Any]:
    bubbles = [attribute(step) for step in of.steps]
    seconds = median(step.took for step in of.steps) * 1e-9
    found: dict[str, Any] = {
        "steps": len(of.steps),
        "iterations": [step.iteration for step in of.steps],
        "shares": medians(bubbles),
        "units": of.steps[-1].program.num_microbatches,
        "measured_seconds": seconds,
        "window_seconds": median(each.window for each in bubbles) * 1e-9,
        "measured_bubble": median(each.fraction for each in bubbles),
        "simulated_seconds": None,
        "error": None,
    }
    simulation = of.simulation
    if simulation is None:
        return found
    return found | {
        "simulated_seconds": simulation.makespan,
        "error": simulation.makespan / seconds - 1 if seconds else None,
        "simulated_bubble": attribute(from_simulation(simulation)).fraction,
        "latency": simulation.costs.latency,
        "overhead": simulation.costs.overhead,
        "peak_activations": simulation.peak_activations,
        "weight_versions": simulation.weight_versions,
        "staleness": simulation.staleness,
    }


@lru_cache(maxsize=8)
def _violations(program: Program) -> list[Any]:
    return verify(program)[:5]


def actions(step: Measured) -> list[list[list[Any]]]:
    """Per rank, [kind, stage, microbatch] of every action."""
    return [[[e.action.kind.value, e.action.stage, e.action.microbatch] for e in row] for row in step.ranks]


def timeline(step: Measured, bubbles: Bubbles) -> dict[str, Any]:
    """A step as the page draws it: per rank (gap before, waited, worked) of every action, in ticks."""
    ranks = []
    for row in step.ranks:
        times: list[int] = []
        at = 0
        for event in row:
            begin, ready, end = event.begin // TICK, event.ready // TICK, event.end // TICK
            times += [begin - at, ready - begin, end - ready]
            at = end
        ranks.append(times)
    found: dict[str, Any] = {
        "step": step.step,
        "iteration": step.iteration,
        "time": step.time,
        "program": step.key,
        "span": step.span // TICK,
        "took": step.took // TICK,
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


def _within_budget(steps: Sequence[Measured], size: int) -> list[dict[str, Any]]:
    """As many of the latest steps as fit, oldest first."""
    found: list[dict[str, Any]] = []
    for step in reversed(steps):
        drawn = timeline(step, attribute(step))
        size += len(json.dumps(drawn))
        if found and size > MAX_TIMES:
            break
        found.append(drawn)
    return found[::-1]
