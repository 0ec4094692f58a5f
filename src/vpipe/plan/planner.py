"""The plan: which layers where, what to recompute, what to swap, under which schedule, and how good that provably is.

    plan(profile, 4, memory="4GiB", num_microbatches=8)                      the best partition for 1f1b
    plan(profile, 4, memory="4GiB", num_microbatches=8, schedule="auto")     and the best schedule

One number is minimised, bounded and printed: the simulated step of the lowered program (``predict``). Candidates come
from ``starts``, the search over cuts and choices from ``search``, the bound from ``floor``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from vpipe.errors import UserError
from vpipe.plan import show
from vpipe.plan.advice import Misfit, explain_limit
from vpipe.plan.bounds import Options
from vpipe.plan.costs import Profile, write_text
from vpipe.plan.floor import lower_bound
from vpipe.plan.judge import Judge
from vpipe.plan.layout import Layout
from vpipe.plan.packing import Packer
from vpipe.plan.predict import Machine, Pipe, Prediction, predict
from vpipe.plan.search import Limits, Search
from vpipe.plan.starts import starts
from vpipe.plan.units import parse_bytes
from vpipe.schedule.catalog import entries

_NOT_FOR_AUTO = ("naive", "zb-auto")
"""``naive`` is for debugging, ``zb-auto`` plans on its own and is slow."""

Memory = str | float | Sequence[str | float] | None


@dataclass(frozen=True)
class Plan:
    """A layout under a schedule, what it is predicted to do, and the proof."""

    layout: Layout
    schedule: str
    num_ranks: int
    stages_per_rank: int
    num_microbatches: int
    microbatch_rows: int
    memory: tuple[float, ...]
    prediction: Prediction
    lower_bound: float
    """No plan under this schedule and memory has a shorter step."""
    limit: str
    """What keeps it from being faster, in words."""
    ranking: tuple[tuple[str, float], ...] = ()
    """Where several schedules or numbers of microbatches were tried: each that fits with its step time, best first."""

    @property
    def step_time(self) -> float:
        return self.prediction.step_time

    @property
    def objective(self) -> float:
        """What was minimised: the step."""
        return self.step_time

    @property
    def gap(self) -> float:
        """By how much the step is above the bound."""
        return max(0.0, self.step_time / self.lower_bound - 1) if self.lower_bound > 0 else 0.0

    @property
    def exact(self) -> bool:
        return self.gap <= 2e-9

    def to_json(self) -> dict[str, Any]:
        p = self.prediction
        return {
            "format": "vpipe-plan",
            "version": 1,
            "schedule": self.schedule,
            "num_ranks": self.num_ranks,
            "stages_per_rank": self.stages_per_rank,
            "num_microbatches": self.num_microbatches,
            "microbatch_rows": self.microbatch_rows,
            **self.layout.to_json(),
            "step_time": p.step_time,
            "bubble": p.bubble,
            "stage_times": list(p.stage_times),
            "stage_memory": [terms.to_json() for terms in p.stage_memory],
            "rank_memory": list(p.rank_memory),
            "memory": [None if cap == float("inf") else cap for cap in self.memory],
            "objective": self.objective,
            "lower_bound": self.lower_bound,
            "gap": self.gap,
            "exact": self.exact,
            "limit": self.limit,
            "ranking": [{"schedule": name, "step_time": time} for name, time in self.ranking],
        }

    def save(self, path: str | Path) -> None:
        write_text(path, json.dumps(self.to_json(), indent=1) + "\n")

    def table(self) -> str:
        """The plan as a person reads it."""
        return show.table(self)


def plan(
    profile: Profile,
    num_ranks: int,
    *,
    num_microbatches: int | Iterable[int],
    memory: Memory = None,
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    speed: float | Sequence[float] = 1.0,
    recompute: bool = True,
    swap: bool = True,
    batch_rows: int | None = None,
    modes: Sequence[str] = ("bsp",),
    effort: float = 1.0,
    time_limit: float | None = None,
    tell: Callable[[str], None] = lambda words: None,
) -> Plan:
    """The best plan for ``num_ranks`` ranks.

    ``memory`` is a cap for every rank or one for each. ``schedule="auto"`` tries the catalogue (of the given
    ``modes``). Several ``num_microbatches`` are compared by time per row; with ``batch_rows`` they are ways to cut the
    same batch, and each microbatch has ``batch_rows / m`` rows. What fits nowhere is a ``UserError`` that says what is
    missing.
    """
    machine = Machine.of(num_ranks, _caps(memory), speed)
    options = Options(recompute, swap and profile.swap_bandwidth is not None)
    counts = [num_microbatches] if isinstance(num_microbatches, int) else list(num_microbatches)
    if num_ranks < 1 or not counts or min(counts) < 1:
        raise UserError(f"a plan needs at least one rank and one microbatch, not {num_ranks} and {counts}")
    limits = Limits(effort, inf if time_limit is None else monotonic() + time_limit, tell)
    found: list[Plan] = []
    misfits: list[Misfit] = []
    refusals: list[UserError] = []
    for count in counts:
        scaled = profile if batch_rows is None else profile.scaled(_rows(batch_rows, count))
        for name in _candidates(schedule, modes):
            try:
                pipe = Pipe.of(name, num_ranks, count, stages_per_rank if schedule != "auto" else None)
                found.append(_plan(scaled, pipe, machine, options, limits))
            except Misfit as misfit:
                misfits.append(misfit)
            except UserError as error:
                refusals.append(error)
    if not found and misfits:
        raise min(misfits, key=lambda misfit: misfit.missing).explained()
    if not found:
        raise refusals[0]
    found.sort(key=lambda each: each.step_time / (each.num_microbatches * each.microbatch_rows))
    names = [each.schedule if len(counts) == 1 else f"{each.schedule} m={each.num_microbatches}" for each in found]
    ranking = tuple((name, each.step_time) for name, each in zip(names, found, strict=True))
    return replace(found[0], ranking=ranking if len(found) > 1 else ())


def _plan(profile: Profile, pipe: Pipe, machine: Machine, options: Options, limits: Limits) -> Plan:
    if pipe.num_stages > profile.num_layers:
        raise UserError(
            f"{pipe.entry.name} on {pipe.num_ranks} ranks has {pipe.num_stages} stages, but the model has only "
            f"{profile.num_layers} layers; use fewer ranks"
        )
    judge = Judge(profile, pipe, machine)
    packer = Packer(judge, options)
    found = Search(judge, packer, limits).run(starts(judge, packer, options))
    if found is None:
        raise Misfit(profile, pipe, machine, options)
    prediction = predict(profile, found.layout, pipe, machine)
    return Plan(
        layout=found.layout,
        schedule=pipe.entry.name,
        num_ranks=pipe.num_ranks,
        stages_per_rank=pipe.stages_per_rank,
        num_microbatches=pipe.num_microbatches,
        microbatch_rows=profile.microbatch_rows,
        memory=machine.memory,
        prediction=prediction,
        lower_bound=prediction.step_time if found.proven else lower_bound(judge, options),
        limit=explain_limit(profile, found.layout, prediction),
    )


def _candidates(schedule: str, modes: Sequence[str]) -> list[str]:
    if schedule != "auto":
        return [schedule]
    return [entry.name for entry in entries() if entry.mode in modes and entry.name not in _NOT_FOR_AUTO]


def _caps(memory: Memory) -> float | Sequence[float] | None:
    if memory is None or isinstance(memory, str | int | float):
        return None if memory is None else float(parse_bytes(memory))
    return [float(parse_bytes(each)) for each in memory]


def _rows(batch_rows: int, num_microbatches: int) -> int:
    if batch_rows % num_microbatches:
        raise UserError(f"a batch of {batch_rows} rows cannot be cut into {num_microbatches} equal microbatches")
    return batch_rows // num_microbatches
