"""zb-auto: the zero-bubble order that suits *these* stages and *this* memory.

The orders of ``zero_bubble.py`` are made for stages that cost the same. Real stages do not, and memory is what it is.
Here a clock with the stages' own times lets each rank choose: I first, since another rank waits for it; then F, as far
ahead as allowed; W in the holes. How far ahead and how patient pays best depends on the times, so several choices are
tried and the shortest within the memory wins. 1f1b, zb-h1 and zb-h2 are among them: zb-auto is never behind them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite

from vpipe.errors import UserError
from vpipe.schedule.action import Action
from vpipe.schedule.authors.authoring import F, I, W, batch
from vpipe.schedule.authors.list_scheduler import Chooser, Preference, greedy
from vpipe.schedule.authors.one_f_one_b import one_f_one_b
from vpipe.schedule.authors.zero_bubble import lagging, zb_h1, zb_h2
from vpipe.schedule.placement import loop
from vpipe.schedule.program import Program
from vpipe.schedule.timeline import Costs, StageCosts

Times = tuple[float, float, float]
"""F, I and W of one stage."""


def zb_auto(
    num_ranks: int,
    num_microbatches: int,
    *,
    costs: Sequence[Times] | None = None,
    memory_limit: float | None = None,
    latency: float = 0.0,
) -> Program:
    """The shortest found for stages of ``costs`` (F, I, W each; default all 1) on links of ``latency``.

    No rank holds more than ``memory_limit`` microbatches (default: any number).
    """
    times = [(1.0, 1.0, 1.0)] * num_ranks if costs is None else _checked(costs, num_ranks)
    limit = num_microbatches if memory_limit is None else memory_limit
    if not limit >= 1:
        raise UserError(f"zb-auto needs memory for at least 1 microbatch on each rank, not {memory_limit}")
    if not (isfinite(latency) and latency >= 0):
        raise UserError(f"latency must be a finite time of at least 0, not {latency}")
    model = Costs(tuple(StageCosts(*each) for each in times), latency)
    return min(
        _candidates(num_ranks, num_microbatches, times, limit),
        key=lambda program: _length(program, model, limit),
    )


def _length(program: Program, costs: Costs, limit: float) -> tuple[bool, float]:
    """Too much memory is worse than any time."""
    from vpipe.schedule.simulate import simulate  # asked for here only: it needs numpy, which authors do without

    result = simulate(program, costs)
    return max(result.peak_activations) > limit, result.makespan


def _candidates(p: int, m: int, times: Sequence[Times], limit: float) -> Iterator[Program]:
    yield from (one_f_one_b(p, m), zb_h1(p, m), zb_h2(p, m))
    memory = min(m, int(limit))
    yield from (lagging(p, m, memory, per_rank_behind) for per_rank_behind in (1, 2))
    placement = loop(p)
    durations = [dict(zip((F, I, W), each, strict=True)) for each in times]
    for factor in (1, 2, 3):
        for patient in (False, True):
            rows = greedy(placement, m, durations, _prefer(times, factor, limit, patient))
            yield batch(placement, m, rows)


def _prefer(times: Sequence[Times], factor: int, limit: float, patient: bool) -> Preference:
    """I first; then F, ``factor`` ahead for each rank behind; then W, for the patient only where it delays nothing."""

    def prefer(chooser: Chooser, action: Action) -> tuple[float, ...] | None:
        stage, kind, _ = action
        if kind is I:
            return (0,)
        if kind is F:
            behind = len(times) - 1 - stage
            return (1,) if chooser.held + 1 <= limit and chooser.ahead <= factor * behind else None
        delays = chooser.now + times[stage][2] > chooser.next_arrival
        return None if patient and delays else (2,)

    return prefer


def _checked(costs: Sequence[Times], num_ranks: int) -> list[Times]:
    if len(costs) != num_ranks:
        raise UserError(f"costs has {len(costs)} entries, but zb-auto on {num_ranks} ranks has {num_ranks} stages")
    for stage, each in enumerate(costs):
        if len(each) != 3 or not all(isfinite(time) and time >= 0 for time in each):
            raise UserError(f"costs[{stage}] must be three finite times F, I, W of at least 0, not {tuple(each)}")
    return [(float(f), float(i), float(w)) for f, i, w in costs]
