"""A plan as a person reads it: what runs where, what it takes, how good it provably is, and why it is not better."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING

from vpipe.plan.costs import align
from vpipe.plan.memory import Choice
from vpipe.plan.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from vpipe.plan.answer import Plan

SHOWN = 12
"""Lines of a ranking."""


def table(plan: Plan) -> str:
    """The whole plan."""
    lines = [_head(plan), _stages(plan)]
    if plan.stages_per_rank > 1:
        lines.append(_ranks(plan))
    lines += [_step(plan), _proof(plan), f"limited by {plan.limit}"]
    if plan.ranking:
        lines += ["", ranking(plan)]
    return "\n".join(lines)


def _head(plan: Plan) -> str:
    parts = [f"{plan.num_ranks} ranks"]
    if plan.replicas:
        same = len(set(plan.replicas)) == 1
        copies = f"{plan.replicas[0]} replicas of each" if same else f"{_list(plan.replicas)} replicas"
        noun = "stages" if plan.asynchronous else "ranks"
        parts = [f"{plan.num_ranks} {noun}, {copies}, {plan.total_ranks} ranks in all"]
    parts.append(f"{plan.num_microbatches} microbatches of {plan.microbatch_rows} rows")
    if plan.order:
        parts.append(f"ranks in the order {_list(plan.order)}")
    mark = " (asynchronous: units read weights that are some updates old)" if plan.asynchronous else ""
    return f"{plan.schedule}{mark}: {', '.join(parts)}"


def _list(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def _stages(plan: Plan) -> str:
    """One row a stage. The memory of a stage stands against its rank's cap where it has the rank for itself."""
    slowest = max(plan.prediction.stage_times) or 1.0
    caps = (float("inf"),) * plan.layout.num_stages
    if plan.stages_per_rank == 1:
        caps = plan.stage_caps
    head = ("stage", "layers", "keep", "recompute", "swap", "time", "of slowest", "memory")
    rows = []
    for stage, choices in enumerate(plan.layout.choices):
        time, size = plan.prediction.stage_times[stage], plan.prediction.stage_memory[stage].total
        rows.append(
            (
                str(stage),
                f"{plan.layout.cuts[stage]}-{plan.layout.cuts[stage + 1] - 1}",
                *(str(choices.count(choice) or "-") for choice in Choice),
                format_seconds(time),
                f"{time / slowest:.0%}",
                _of_cap(size, caps[stage]),
            )
        )
    return align([head, *rows], left={7})


def _ranks(plan: Plan) -> str:
    """Several stages share a rank: what they need together."""
    parts = (
        f"rank {rank} {_of_cap(size, cap)}"
        for rank, (size, cap) in enumerate(zip(plan.prediction.rank_memory, plan.memory, strict=True))
    )
    return f"memory of ranks: {'; '.join(parts)}"


def _of_cap(size: float, cap: float) -> str:
    if not isfinite(cap):
        return format_bytes(size)
    return f"{format_bytes(size)} of {format_bytes(cap)} ({size / cap:.0%})"


def _step(plan: Plan) -> str:
    speed = f", {plan.rows / plan.step_time:.3g} rows/s" if plan.step_time else ""
    return f"predicted step {format_seconds(plan.step_time)}{speed}, bubble {plan.prediction.bubble:.1%}"


def _proof(plan: Plan) -> str:
    """How far the step is above what no plan of this schedule goes below."""
    if plan.exact:
        return f"lower bound {format_seconds(plan.lower_bound)}: no other partition or choice is quicker (exact)"
    return f"lower bound {format_seconds(plan.lower_bound)}: gap {plan.gap:.2%}"


def ranking(plan: Plan) -> str:
    """Every way that fits, best first, by the time of a row."""
    best = plan.ranking[0][1]
    rows = [
        (name, format_seconds(time), "" if not number else f"{time / best - 1:+.1%}")
        for number, (name, time) in enumerate(plan.ranking[:SHOWN])
    ]
    if len(plan.ranking) > SHOWN:
        rows.append((f"and {len(plan.ranking) - SHOWN} more", "", ""))
    return "what fits, best first:\n" + "\n".join(f"  {line}" for line in align(rows, left={0}).splitlines())
