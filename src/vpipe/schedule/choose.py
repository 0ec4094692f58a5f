"""Which schedule suits these costs: the whole catalogue, simulated and ranked.

Schedules that flush compare by the makespan of a batch. Asynchronous ones never flush, so their makespan says nothing;
they compare by their steady state: the time that m more units take, far from both ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vpipe.errors import UserError
from vpipe.schedule.authors.authoring import Chain
from vpipe.schedule.catalog import Entry, entries
from vpipe.schedule.program import Program
from vpipe.schedule.simulate import Simulation, bubble, simulate
from vpipe.schedule.timeline import uniform

FREE_STAGES_PER_RANK = (2, 4)
"""Tried where a schedule lets the user choose v."""


@dataclass(frozen=True)
class RankedSchedule:
    """One schedule under the given costs. ``refused`` says why there are no figures."""

    name: str
    stages_per_rank: int
    asynchronous: bool
    time: float = float("inf")
    """Of m microbatches: the makespan, or the steady state of an asynchronous schedule."""
    bubble: float = 0.0
    """The idle share over all ranks in that time."""
    peak_activations: float = 0.0
    weight_versions: int = 1
    staleness: int = 0
    fits: bool = True
    refused: str = ""


def rank(
    num_ranks: int,
    num_microbatches: int,
    times: Mapping[str, Any] | None = None,
    *,
    stages_per_rank: int | None = None,
    memory: float | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[RankedSchedule]:
    """Every schedule of the catalogue, the quickest that fit into ``memory`` microbatches first, refusals last."""
    wanted = [(entry, v) for entry in entries() for v in _stages_per_rank(entry, stages_per_rank)]
    found = []
    for done, (entry, v) in enumerate(wanted):
        progress(done, len(wanted))
        found.append(_choice(entry, num_ranks, num_microbatches, v, dict(times or {}), memory))
    return sorted(found, key=lambda each: (bool(each.refused), not each.fits, each.time, each.peak_activations))


def _stages_per_rank(entry: Entry, wanted: int | None) -> Iterator[int]:
    if not entry.any_stages_per_rank:
        yield entry.stages_per_rank
    elif wanted is None:
        yield from FREE_STAGES_PER_RANK
    else:
        yield wanted


def _choice(entry: Entry, p: int, m: int, v: int, times: dict[str, Any], memory: float | None) -> RankedSchedule:
    asynchronous = entry.asynchronous
    name = f"{entry.name} v={v}" if entry.any_stages_per_rank else entry.name

    def run(num_microbatches: int, **options: Any) -> Simulation:
        program: Program = entry.build(p, num_microbatches, v, **options, **entry.options_for(p, times, memory))
        return simulate(program, uniform(program.placement, **times), blocking=entry.blocking)

    try:
        found, time, work = _steady(entry, p, m, run) if asynchronous else _batch(m, run)
    except UserError as error:
        return RankedSchedule(name, v, asynchronous, refused=str(error))
    peak = max(found.peak_activations)
    return RankedSchedule(
        name,
        v,
        asynchronous,
        time,
        bubble(work, p, time),
        peak,
        max(found.weight_versions),
        max(found.staleness),
        fits=memory is None or peak <= memory + 1e-9,
    )


def _batch(m: int, run: Any) -> tuple[Simulation, float, float]:
    found: Simulation = run(m)
    return found, found.makespan, sum(found.busy)


def _steady(entry: Entry, p: int, m: int, run: Any) -> tuple[Simulation, float, float]:
    """Two runs, both long enough to fill the pipe; the longer has its further units in addition."""
    if entry.chains is Chain.BATCHES:
        batches = 2 + -(-2 * p // m)
        short, long = run(m, num_batches=batches), run(m, num_batches=batches + 1)
    else:
        short, long = run(2 * p + m), run(2 * p + 2 * m)
    return long, long.makespan - short.makespan, sum(long.busy) - sum(short.busy)
