"""What if: a schedule of the catalogue, simulated for the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vpipe.errors import UserError
from vpipe.observe.bubbles import attribute
from vpipe.observe.measured import from_simulation
from vpipe.observe.timelines import actions, timeline
from vpipe.schedule.catalog import entries, get
from vpipe.schedule.costs import uniform
from vpipe.schedule.simulate import simulate

MAX_ACTIONS = 40_000
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


def answer(question: Mapping[str, str]) -> dict[str, Any]:
    """The simulated timeline of ``schedule`` with these counts and times; ``UserError`` says what does not fit."""
    entry = get(question.get("schedule", ""))
    ranks, microbatches = _count(question, "ranks"), _count(question, "microbatches")
    stages = _count(question, "stages_per_rank") if entry.any_stages_per_rank else None
    size = 2 * ranks * microbatches * (stages or entry.stages_per_rank)
    if size > MAX_ACTIONS:
        raise UserError(f"that would be {size} actions; the page draws at most {MAX_ACTIONS}")
    program = entry.build(ranks, microbatches, stages)
    forward, input_grad, weight_grad, latency = (_time(question, name) for name in TIMES)
    costs = uniform(program.placement, forward=forward, input_grad=input_grad, weight_grad=weight_grad, latency=latency)
    simulation = simulate(program, costs)
    drawn = from_simulation(simulation, scale=1e9)
    return {
        "title": f"{entry.name}, {ranks} ranks, {microbatches} microbatches",
        "summary": simulation.summary(),
        "simulated": timeline(drawn, attribute(drawn)) | {"rows": actions(drawn)},
    }


def _count(question: Mapping[str, str], name: str) -> int:
    text = question.get(name, "1")
    if not text.isascii() or not text.isdigit() or not 1 <= len(text) <= 6:
        raise UserError(f"{name.replace('_', ' ')} is {text[:20]!r}, but it is a whole number of at least 1")
    return int(text)


def _time(question: Mapping[str, str], name: str) -> float:
    text = question.get(name, TIMES[name])
    try:
        found = float(text)
    except ValueError:
        raise UserError(f"{name.replace('_', ' ')} is {text[:20]!r}, but it is a number") from None
    if not 0 <= found <= 1e6:
        raise UserError(f"{name.replace('_', ' ')} is {found:g}, but a time is between 0 and 1000000")
    return found
