"""What a layout will do under a schedule: time by simulation, memory by counting.

The step that is predicted here is the number that a plan minimises, bounds and prints: the simulated makespan of the
lowered program with the profile's costs. It also answers for layouts that nobody planned: equal layer counts, or a
partition file from elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vpipe.errors import UserError
from vpipe.plan.costs import Profile
from vpipe.plan.layout import PlannedLayout
from vpipe.plan.machine import Machine
from vpipe.plan.memory import Choice, MemoryTerms, StageFacts, num_actions, rank_bytes, stage_memory, stage_time
from vpipe.plan.pipe import Pipe, stage_facts
from vpipe.schedule.costs import Costs, StageCosts
from vpipe.schedule.lower import lower
from vpipe.schedule.program import Program
from vpipe.schedule.simulate import bubble, simulate

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
    profile = pipe.charged(profile)
    facts = stage_facts(pipe.program, machine)
    last = layout.num_stages - 1
    times, terms = [], []
    for s in range(layout.num_stages):
        args = (profile, layout.cuts[s], layout.cuts[s + 1], layout.choices[s], facts[s])
        times.append(stage_time(*args, first=s == 0, last=s == last))
        terms.append(stage_memory(*args, first=s == 0, last=s == last))
    costs = stage_costs(profile, layout, pipe, machine, facts)
    step, idle = _step(layout, pipe, costs, busiest(costs, pipe))
    return Prediction(step, idle, tuple(times), tuple(terms), rank_memory(pipe, facts, terms))


def busiest(costs: Costs, pipe: Pipe) -> float:
    """What the busiest rank computes in a step, updates aside."""
    work = [
        units * (cost.forward + cost.input_grad + cost.weight_grad + cost.recompute)
        for units, cost in zip(pipe.units, costs.stages, strict=True)
    ]
    return max(sum(work[stage] for stage in stages) for stages in pipe.program.placement.stages_of)


def _step(layout: PlannedLayout, pipe: Pipe, costs: Costs, busy: float) -> tuple[float, float]:
    """The time of a step, and the idle share over all ranks in it."""
    stages = range(layout.num_stages)
    again = [s for s in stages if Choice.RECOMPUTE in layout.choices[s]]
    swapped = [s for s in stages if Choice.SWAP in layout.choices[s]]

    def simulated(program: Program) -> tuple[float, float]:
        lowered = lower(program, recompute_stages=again, swap_stages=swapped)
        found = simulate(lowered, costs, blocking=pipe.entry.blocking)
        return found.makespan, sum(found.busy)

    time, work = simulated(pipe.program)
    if pipe.asynchronous:  # between two drains the pipe stays full: what one batch more takes is the step
        longer, more = simulated(pipe.batches(pipe.num_batches + 1))
        time, work = max(longer - time, busy), more - work
    return time, bubble(work, pipe.program.num_ranks, time)


def stage_costs(
    profile: Profile, layout: PlannedLayout, pipe: Pipe, machine: Machine, facts: Sequence[StageFacts] | None = None
) -> Costs:
    """What the simulator is told of every stage."""
    facts = facts or stage_facts(pipe.program, machine)
    ranks = pipe.program.placement.ranks_of
    last = layout.num_stages - 1
    found = []
    for s, fact in enumerate(facts):
        layers = profile.layers[layout.cuts[s] : layout.cuts[s + 1]]
        overhead = profile.action_overhead * num_actions(first=s == 0, last=s == last) / 2
        again = sum(x.forward for x, c in zip(layers, layout.choices[s], strict=True) if c is Choice.RECOMPUTE)
        swapped = sum(x.saved_bytes for x, c in zip(layers, layout.choices[s], strict=True) if c is Choice.SWAP)
        ahead = (ranks[s], ranks[min(s + 1, last)])
        back = (ranks[s], ranks[max(s - 1, 0)])
        cut = profile.cut_bytes
        found.append(
            StageCosts(
                forward=sum(x.forward for x in layers) / fact.speed + overhead,
                input_grad=sum(x.input_grad for x in layers) / fact.speed + overhead,
                weight_grad=sum(x.weight_grad for x in layers) / fact.speed,
                recompute=again / fact.speed,
                swap=swapped / profile.swap_bandwidth if swapped and profile.swap_bandwidth else 0.0,
                reduce=machine.reduce_time(profile, ranks[s], sum(x.parameter_bytes for x in layers)),
                step=sum(x.update for x in layers) / fact.speed,
                transfer=cut[layout.cuts[s + 1]] * machine.seconds_per_byte(profile, *ahead),
                transfer_back=cut[layout.cuts[s]] * machine.seconds_per_byte(profile, *back),
                latency=machine.lag(profile, *ahead),
                latency_back=machine.lag(profile, *back),
            )
        )
    return Costs(tuple(found), latency=profile.link_latency)


def rank_memory(pipe: Pipe, facts: Sequence[StageFacts], terms: Sequence[MemoryTerms]) -> tuple[int, ...]:
    """The peak of each rank."""
    ranks = zip(pipe.program.placement.stages_of, pipe.peaks, strict=True)
    return tuple(rank_bytes({s: terms[s] for s in stages}, facts, peaks) for stages, peaks in ranks)
