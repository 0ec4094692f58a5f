"""Memory per stage: what was predicted beside what was measured.

The prediction is the plan's where the run follows one. Else it is what the program alone tells: the weights of a stage,
as many versions of them as it keeps alive, and how many microbatches its activations wait for (in microbatches, since
only a profile knows their bytes). What was measured is what each rank wrote down with its steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vpipe.observe.measured import Measured
from vpipe.observe.rundir import RunDirectory
from vpipe.schedule.semantics import live_versions, units_in_flight


def memory_table(run: RunDirectory, steps: Sequence[Measured]) -> dict[str, Any]:
    """Rows for the page: one per stage (predicted), one per rank (measured)."""
    program = steps[-1].program if steps else run.facts.program
    versions, held = live_versions(program), units_in_flight(program)
    planned = _planned(run)
    stages = []
    for stage, facts in enumerate(run.facts.stages):
        size = facts.get("weight_bytes")
        weights = int(size) if isinstance(size, int | float) else None
        stages.append(
            {
                "stage": stage,
                "ranks": list(program.placement.ranks_of[stage]) if stage < program.num_stages else [],
                "weights": weights,
                "versions": versions[stage],
                "version_bytes": weights * (versions[stage] - 1) if weights is not None else None,
                "in_flight": held[stage],
                "planned": planned[stage] if stage < len(planned) else None,
            }
        )
    ranks = []
    for rank in range(program.num_ranks):
        seen: dict[str, int] = {}
        for step in steps:
            for key, value in (step.memory[rank] if rank < len(step.memory) else {}).items():
                seen[key] = max(value, seen.get(key, 0))
        ranks.append(seen)
    return {"stages": stages, "ranks": ranks}


def _planned(run: RunDirectory) -> list[Mapping[str, Any]]:
    """The plan's bytes per stage, by what they are for."""
    rows = (run.plan() or {}).get("stage_memory")
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []
