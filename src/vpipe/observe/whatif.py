"""What if: a schedule of the catalogue, simulated for the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vpipe.errors import UserError
from vpipe.observe import estimate
from vpipe.observe.bubbles import attribute
from vpipe.observe.measured import from_simulation
from vpipe.observe.timelines import actions, timeline, typical
from vpipe.observe.watcher import Watcher
from vpipe.schedule.authors.authoring import Entry
from vpipe.schedule.catalog import entries, get
from vpipe.schedule.simulate import Simulation, simulate
from vpipe.schedule.timeline import Costs, uniform

MAX_ACTIONS = 60_000
TIMES = {"forward": "1", "input_grad": "1", "weight_grad": "1", "latency": "0"}


def choices() -> list[dict[str, Any]]:
    """The schedules that may be chosen, with what a person should know of them."""
    return [
        {
            "name": each.name,
            "summary": each.summary,
            "needs": each.needs,
            "stages_per_rank": each.stages_per_rank,
            "any_stages_per_rank": each.any_stages_per_rank,
        }
        for each in entries()
    ]


def answer(question: Mapping[str, str], watcher: Watcher | None = None) -> dict[str, Any]:
    """The simulated timeline of ``schedule`` with these counts and times; ``UserError`` says what does not fit.

    ``costs=measured`` takes the costs that the run of ``watcher`` has measured, with the planner's best cut for the
    schedule; times are then seconds, and ``gain`` says how many times as fast as the run it would be.
    """
    entry, (ranks, microbatches, stages) = asked(question, MAX_ACTIONS)
    program = entry.build(ranks, microbatches, stages)
    title = f"{entry.name}, {ranks} ranks, {microbatches} microbatches"
    found: dict[str, Any] = {"unitless": True}
    if question.get("costs") == "measured" and watcher is not None:
        costs, cut, seconds = _measured(watcher, entry.name, ranks, microbatches, stages)
        simulation = simulate(program, costs, blocking=entry.blocking)
        title += f", layers {' '.join(map(str, cut))}"
        found = {"unitless": False, "gain": seconds / simulation.makespan if simulation.makespan else None}
    else:
        simulation = simulate(program, uniform(program.placement, **times_of(question)), blocking=entry.blocking)
    return found | drawn(simulation, title)


def asked(question: Mapping[str, str], most: int) -> tuple[Entry, tuple[int, int, int | None]]:
    """The schedule, and its ranks, microbatches and stages each; no more than ``most`` actions."""
    entry = get(question.get("schedule", ""))
    ranks, microbatches = count_of(question, "ranks"), count_of(question, "microbatches")
    stages = count_of(question, "stages_per_rank") if entry.any_stages_per_rank else None
    size = 3 * ranks * microbatches * (stages or entry.stages_per_rank)
    if size > most:
        raise UserError(f"that would be about {size} actions; the page draws at most {most}")
    return entry, (ranks, microbatches, stages)


def drawn(simulation: Simulation, title: str) -> dict[str, Any]:
    """What a page draws of a simulation whose times have no unit, and tells of it."""
    step = from_simulation(simulation, scale=1e9)
    shown = timeline(step, attribute(step)) | {"rows": actions(step)}
    return {"title": title, "summary": simulation.summary(), "simulated": shown}


def _measured(
    watcher: Watcher, schedule: str, ranks: int, microbatches: int, stages: int | None
) -> tuple[Costs, tuple[int, ...], float]:
    """Costs of the stages by this run's measurements, the cut, and how long the run's own step is simulated to take.

    The batch stays the same: with twice the microbatches each is half as long.
    """
    run, steps = watcher.measured()
    if not steps:
        raise UserError("no step has been recorded yet, so there are no measured costs")
    *_, now, _, problem = typical(steps)
    profile = estimate.profile_of(run, now.costs) if now is not None else None
    if now is None or profile is None:
        raise UserError(problem or "this run's stages have replicas or no named layers; choose costs of your own")
    rows = now.program.num_microbatches
    profile = replace(profile, microbatch_rows=microbatches).scaled(rows)
    plan = estimate.candidate(
        profile, run, schedule=schedule, num_ranks=ranks, num_microbatches=microbatches, stages_per_rank=stages
    )
    return estimate.stage_costs(profile, plan.layout, now.costs, ranks), plan.layout.counts, now.makespan


def count_of(question: Mapping[str, str], name: str) -> int:
    text = question.get(name, "1")
    if not text.isascii() or not text.isdigit() or not 1 <= len(text) <= 6:
        raise UserError(f"{name.replace('_', ' ')} is {text[:20]!r}, but it is a whole number of at least 1")
    return int(text)


def times_of(question: Mapping[str, str]) -> dict[str, Any]:
    """Those of ``TIMES``."""
    return {name: time_of(question, name) for name in TIMES}


def time_of(question: Mapping[str, str], name: str) -> float:
    text = question.get(name, TIMES.get(name, "0"))
    try:
        found = float(text)
    except ValueError:
        raise UserError(f"{name.replace('_', ' ')} is {text[:20]!r}, but it is a number") from None
    if not 0 <= found <= 1e6:
        raise UserError(f"{name.replace('_', ' ')} is {found:g}, but a time is between 0 and 1000000")
    return found
