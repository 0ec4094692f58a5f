"""Memory: what the executed order needs, beside what was measured.

A prediction is of what was executed: weights of a stage in as many versions as the executed program keeps alive, and as
many microbatches as it holds. How many bytes a microbatch leaves at a stage only a profile knows; where the run follows
a plan, its terms are taken per microbatch and counted again for the executed order, which need not be the plan's.

What was measured are tensors: weights in all their versions, optimizer states, and what a step makes. The process holds
the interpreter and torch as well; that is a figure of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vpipe.errors import UserError
from vpipe.observe.measured import Measured
from vpipe.plan.machine import Machine
from vpipe.plan.memory import StageFacts
from vpipe.plan.pipe import stage_facts
from vpipe.rundir.reader import RunDirectory
from vpipe.schedule import catalog
from vpipe.schedule.program import Program


def counts(program: Program) -> list[StageFacts]:
    """Per stage, what the order of a program says of it."""
    return stage_facts(program, Machine.of(program.num_ranks, None))


def memory_table(run: RunDirectory, steps: Sequence[Measured]) -> dict[str, Any]:
    """Rows for the page: one per stage (predicted), one per rank (measured)."""
    program = steps[-1].program if steps else run.program
    executed = counts(program)
    planned = _planned(run, executed)
    stages = []
    for stage, facts in enumerate(run.stages):
        weights = facts.weight_bytes
        stages.append(
            {
                "stage": stage,
                "ranks": list(program.placement.ranks_of[stage]) if stage < program.num_stages else [],
                "weights": weights,
                "versions": executed[stage].versions,
                "version_bytes": weights * (executed[stage].versions - 1) if weights is not None else None,
                "in_flight": executed[stage].units,
                "predicted": planned[stage] if stage < len(planned) else None,
            }
        )
    ranks = [
        _most([step.memory[rank] for step in steps if rank < len(step.memory)]) for rank in range(len(program.rows))
    ]
    for held in ranks:
        if (tensors := tensor_bytes(held)) is not None:
            held["tensors"] = tensors
    return {"stages": stages, "ranks": ranks}


def tensor_bytes(held: Mapping[str, int]) -> int | None:
    """Weights in all versions, optimizer states and what a step made; ``None`` where no step was counted."""
    if "in_step" not in held:
        return None
    return held.get("weights", 0) * max(1, held.get("versions", 1)) + held.get("optimizer", 0) + held["in_step"]


def _most(rows: Sequence[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        for key, value in row.items():
            found[key] = max(value, found.get(key, 0))
    return found


def _planned(run: RunDirectory, executed: Sequence[StageFacts]) -> list[dict[str, int]]:
    """Per stage, the plan's bytes by what they are for, counted again for what was executed."""
    plan = run.plan() or {}
    rows = plan.get("stage_memory")
    if not isinstance(rows, list) or len(rows) != len(executed):
        return []
    try:
        entry = catalog.get(str(plan["schedule"]))
        ranks, units, each = (int(plan[key]) for key in ("num_ranks", "num_microbatches", "stages_per_rank"))
        before = counts(entry.build(ranks, units, each if entry.any_stages_per_rank else None))
        terms = [{str(key): int(value) for key, value in row.items() if key != "total"} for row in rows]
    except (UserError, KeyError, TypeError, ValueError, AttributeError) as error:
        run.note(f"the memory of plan.json cannot be read ({error}); it is left out")
        return []
    if len(before) != len(executed):
        run.note(f"plan.json has {len(before)} stages, the run {len(executed)}; its memory is left out")
        return []
    found = []
    for row, then, now in zip(terms, before, executed, strict=True):
        was, times = then.times, now.times
        counted = {term: size // max(1, was.get(term, 1)) * times.get(term, 1) for term, size in row.items()}
        found.append(counted | {"total": sum(counted.values())})
    return found
