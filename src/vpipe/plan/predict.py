"""What a layout will do under a schedule: time by simulation, memory by counting.

The step that is predicted here is the number that a plan minimises, bounds and prints: the simulated makespan of the
lowered program with the profile's costs. It also answers for layouts that were not planned: equal layer counts, or a
partition file from elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from vpipe.errors import UserError
from vpipe.plan.costs import Profile
from vpipe.plan.layout import PlannedLayout
from vpipe.plan.machine import Machine
from vpipe.plan.memory import Choice, MemoryTerms, StageFacts, rank_bytes
from vpipe.plan.pipe import Pipe, stage_facts
from vpipe.plan.sites import stage_sites, unit_time
from vpipe.schedule.program import Program
from vpipe.schedule.simulate import bubble, simulate
from vpipe.schedule.timeline import Costs

__all__ = ["Machine", "Pipe", "Prediction", "predict", "stage_facts"]


@dataclass(frozen=True)
class Prediction:
    """``step_time`` is the simulated time of a batch. Of an asynchronous schedule it is that of one batch more between
    two drains, and never less than the busiest rank works for a batch: no steady state is quicker."""

    step_time: float
    bubble: float
    stage_times: tuple[float, ...]
    stage_memory: tuple[MemoryTerms, ...]
    rank_memory: tuple[int, ...]


def predict(profile: Profile, layout: PlannedLayout, pipe: Pipe, machine: Machine) -> Prediction:
    """Times and bytes of a layout under a schedule."""
    if layout.num_stages != pipe.num_stages:
        raise UserError(f"the partition has {layout.num_stages} stages, but {pipe.entry.name} has {pipe.num_stages}")
    if layout.num_layers != profile.num_layers:
        raise UserError(f"the partition has {layout.num_layers} layers, but the profile has {profile.num_layers}")
    sites = stage_sites(profile, pipe, machine)
    held = [(*cell, kept) for cell, kept in zip(pairwise(layout.cuts), layout.choices, strict=True)]
    costs = [site.costs(*each) for site, each in zip(sites, held, strict=True)]
    terms = [site.memory(*each) for site, each in zip(sites, held, strict=True)]
    step, idle = _step(layout, pipe, Costs(tuple(costs), latency=profile.link_latency))
    memory = rank_memory(pipe, [site.facts for site in sites], terms)
    return Prediction(step, idle, tuple(map(unit_time, costs)), tuple(terms), memory)


def busiest(costs: Costs, pipe: Pipe) -> float:
    """What the busiest rank computes in a step, updates aside."""
    work = [
        units * (cost.forward + cost.input_grad + cost.weight_grad + cost.recompute)
        for units, cost in zip(pipe.units, costs.stages, strict=True)
    ]
    return max(sum(work[stage] for stage in stages) for stages in pipe.program.placement.stages_of)


def _step(layout: PlannedLayout, pipe: Pipe, costs: Costs) -> tuple[float, float]:
    """The time of a step, and the idle share over all ranks in it."""
    stages = range(layout.num_stages)
    again = [s for s in stages if Choice.RECOMPUTE in layout.choices[s]]
    swapped = [s for s in stages if Choice.SWAP in layout.choices[s]]

    def simulated(program: Program) -> tuple[float, float]:
        found = simulate(pipe.lowered(program, again, swapped), costs, blocking=pipe.entry.blocking)
        return found.makespan, sum(found.busy)

    time, work = simulated(pipe.program)
    if pipe.asynchronous:  # between two drains the pipe stays full: what one batch more takes is the step
        longer, more = simulated(pipe.batches(pipe.num_batches + 1))
        time, work = max(longer - time, busiest(costs, pipe)), more - work
    return time, bubble(work, pipe.program.num_ranks, time)


def rank_memory(pipe: Pipe, facts: Sequence[StageFacts], terms: Sequence[MemoryTerms]) -> tuple[int, ...]:
    """The peak of each rank."""
    ranks = zip(pipe.program.placement.stages_of, pipe.peaks, strict=True)
    return tuple(rank_bytes({s: terms[s] for s in stages}, facts, peaks) for stages, peaks in ranks)
