"""What a layout will do under a schedule: time by simulation, memory by counting.

The planner minimises a closed form; this module asks the schedule itself. It also answers for layouts that nobody
planned: equal layer counts, or a partition file from elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from vpipe.errors import UserError
from vpipe.plan.costs import Profile
from vpipe.plan.layout import Layout
from vpipe.plan.memory import Choice, MemoryTerms, StageFacts, num_actions, stage_memory, stage_time
from vpipe.schedule.action import Kind
from vpipe.schedule.catalog import get
from vpipe.schedule.costs import Costs, StageCosts
from vpipe.schedule.entry import Entry
from vpipe.schedule.lower import lower
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import WEIGHT_GRADIENT, live_versions, most_open, units_in_flight
from vpipe.schedule.simulate import simulate


@dataclass(frozen=True)
class Machine:
    """The ranks: memory cap in bytes and relative speed of each."""

    memory: tuple[float, ...]
    speed: tuple[float, ...]

    @classmethod
    def of(
        cls, num_ranks: int, memory: float | Sequence[float] | None, speed: float | Sequence[float] = 1.0
    ) -> Machine:
        """One number for all ranks, or one for each."""
        return cls(
            _per_rank("memory", float("inf") if memory is None else memory, num_ranks),
            _per_rank("speed", speed, num_ranks),
        )


@dataclass(frozen=True)
class Pipe:
    """A schedule with its numbers."""

    entry: Entry
    num_ranks: int
    num_microbatches: int
    stages_per_rank: int

    @classmethod
    def of(cls, schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None) -> Pipe:
        entry = get(schedule)
        return cls(entry, num_ranks, num_microbatches, stages_per_rank or entry.stages_per_rank)

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.stages_per_rank

    @property
    def asynchronous(self) -> bool:
        return self.entry.mode != "bsp"

    def charged(self, profile: Profile) -> Profile:
        """The profile as this schedule pays for it: one that updates after every unit has the update in each unit's
        work, where the search for a partition sees it."""
        if not self.asynchronous or "num_batches" in self.entry.options:
            return profile
        layers = (replace(x, weight_grad=x.weight_grad + x.update, update=0.0) for x in profile.layers)
        return replace(profile, layers=tuple(layers))

    def batches(self, count: int) -> Program:
        """The program of ``count`` batches without a drain; a synchronous schedule drains after each, so has one."""
        if not self.asynchronous:
            return self.entry.build(self.num_ranks, self.num_microbatches, self.stages_per_rank)
        if "num_batches" in self.entry.options:
            return self.entry.build(self.num_ranks, self.num_microbatches, num_batches=count)
        return self.entry.build(self.num_ranks, self.num_microbatches * count)

    @cached_property
    def num_batches(self) -> int:
        """So many that an asynchronous pipe is in its steady state."""
        return 1 + math.ceil(2 * self.num_ranks / self.num_microbatches) if self.asynchronous else 1

    @cached_property
    def program(self) -> Program:
        return self.batches(self.num_batches)


@dataclass(frozen=True)
class Prediction:
    """``step_time`` is the simulated time of a batch; of an asynchronous schedule, of a batch in its steady state."""

    step_time: float
    bubble: float
    stage_times: tuple[float, ...]
    stage_memory: tuple[MemoryTerms, ...]
    rank_memory: tuple[int, ...]


def units_waiting(program: Program) -> list[int]:
    """Per stage, the most units between the start of their backward and the end of their weight gradient."""
    return [max(1, most) for most in most_open(program, (Kind.I,), (Kind.W,))]


def stage_facts(program: Program, machine: Machine, share: float = 1.0) -> list[StageFacts]:
    """What the schedule and the ranks say about each stage; a stage may use ``share`` of its rank's memory."""
    facts = []
    versions = live_versions(program)
    waiting = units_waiting(program)
    for stage, units in enumerate(units_in_flight(program)):
        ranks = program.placement.ranks_of[stage]
        memory = min(machine.memory[rank] for rank in ranks) * share
        speed = min(machine.speed[rank] for rank in ranks)
        facts.append(StageFacts(units, versions[stage], memory, speed, waiting[stage]))
    return facts


def predict(profile: Profile, layout: Layout, pipe: Pipe, machine: Machine) -> Prediction:
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
    step = _step_time(profile, layout, pipe, facts)
    busy = max(sum(times[s] for s in stages) for stages in pipe.program.placement.stages_of) * pipe.num_microbatches
    ranks = _rank_memory(pipe.program, facts, terms)
    return Prediction(step, max(0.0, 1 - busy / step) if step else 0.0, tuple(times), tuple(terms), ranks)


def _step_time(profile: Profile, layout: Layout, pipe: Pipe, facts: Sequence[StageFacts]) -> float:
    costs = _costs(profile, layout, facts)
    stages = range(layout.num_stages)
    again = [s for s in stages if Choice.RECOMPUTE in layout.choices[s]]
    swapped = [s for s in stages if Choice.SWAP in layout.choices[s]]

    def makespan(program: Program) -> float:
        lowered = lower(program, recompute_stages=again, swap_stages=swapped)
        return simulate(lowered, costs, blocking=pipe.entry.blocking).makespan

    whole = makespan(pipe.program)
    # Between two drains an asynchronous pipe stays full: what one batch more takes is the step.
    return makespan(pipe.batches(pipe.num_batches + 1)) - whole if pipe.asynchronous else whole


def _costs(profile: Profile, layout: Layout, facts: Sequence[StageFacts]) -> Costs:
    last = layout.num_stages - 1
    found = []
    for s, fact in enumerate(facts):
        layers = profile.layers[layout.cuts[s] : layout.cuts[s + 1]]
        overhead = profile.action_overhead * num_actions(first=s == 0, last=s == last) / 2
        again = sum(x.forward for x, c in zip(layers, layout.choices[s], strict=True) if c is Choice.RECOMPUTE)
        swapped = sum(x.saved_bytes for x, c in zip(layers, layout.choices[s], strict=True) if c is Choice.SWAP)
        sides = [profile.link_time(layout.cuts[i]) for i in (s, s + 1) if 0 < i <= last]
        found.append(
            StageCosts(
                forward=sum(x.forward for x in layers) / fact.speed + overhead,
                input_grad=sum(x.input_grad for x in layers) / fact.speed + overhead,
                weight_grad=sum(x.weight_grad for x in layers) / fact.speed,
                recompute=again / fact.speed,
                swap=swapped / profile.swap_bandwidth if swapped and profile.swap_bandwidth else 0.0,
                step=sum(x.update for x in layers) / fact.speed,
                transfer=sum(sides) / len(sides) if sides else 0.0,
            )
        )
    return Costs(tuple(found), latency=profile.link_latency)


def _rank_memory(program: Program, facts: Sequence[StageFacts], terms: Sequence[MemoryTerms]) -> tuple[int, ...]:
    """The peak of each rank: its stages together, unit by unit, along its row."""
    peaks = []
    for rank, row in enumerate(program.rows):
        mine = program.placement.stages_of[rank]
        fixed = sum(terms[s].weights + terms[s].gradients + terms[s].optimizer + terms[s].buffers for s in mine)
        fixed += max((terms[s].recomputed for s in mine), default=0)
        held = dict.fromkeys(mine, 0)
        peak = 0
        for action in row:
            if action.kind is Kind.F:
                held[action.stage] += 1
                now = sum(_held(terms[s], facts[s], n) for s, n in held.items())
                peak = max(peak, now)
            elif action.kind in WEIGHT_GRADIENT:
                held[action.stage] -= 1
        peaks.append(fixed + peak)
    return tuple(peaks)


def _held(terms: MemoryTerms, facts: StageFacts, units: int) -> int:
    """What ``units`` units hold, where as many as are in flight at the peak hold what the terms say."""
    each = (terms.kept + terms.segment_inputs) // facts.units
    return units * each + min(units, facts.resident) * (terms.swapped // facts.resident)


def _per_rank(name: str, value: float | Sequence[float], num_ranks: int) -> tuple[float, ...]:
    values = tuple(float(v) for v in value) if isinstance(value, Sequence) else (float(value),) * num_ranks
    if len(values) != num_ranks:
        raise UserError(f"{name} is given for {len(values)} ranks, but there are {num_ranks}")
    if any(not v > 0 for v in values):
        raise UserError(f"{name} must be more than zero on every rank, not {min(values)}")
    return values
