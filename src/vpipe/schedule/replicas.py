"""Data parallelism around a pipeline: the same program several times side by side, with one update for all.

    replicate(1f1b on ranks 0 1 2, m = 4, d = 2)     rank 0   F0 F2 F4 B0 F6 …     pipeline 0: the even units
                                                     rank 1   F0 F2 …
                                                     rank 2   F0 B0 …
                                                     rank 3   F1 F3 F5 B1 F7 …     pipeline 1: the odd units
                                                     …

Rank r of pipeline i becomes rank i·p + r. Unit k runs in pipeline k mod d, as ``Placement.rank`` has it, so m
microbatches per pipeline become m·d units, and every stage has d times as many replicas.
"""

from __future__ import annotations

from dataclasses import replace

from vpipe.errors import UserError
from vpipe.schedule.action import Action
from vpipe.schedule.authors.authoring import STEP, check_counts
from vpipe.schedule.placement import Placement
from vpipe.schedule.program import Program, Versions


def replicate(program: Program, num_pipelines: int) -> Program:
    """``num_pipelines`` copies of a synchronous program side by side; a copy's unit j is unit j·d + i of the whole."""
    check_counts(num_pipelines=num_pipelines)
    _check_synchronous(program)
    d, p = num_pipelines, program.num_ranks
    ranks_of = tuple(
        tuple(pipeline * p + rank for rank in ranks for pipeline in range(d)) for ranks in program.placement.ranks_of
    )
    rows = tuple(
        tuple(Action(s, kind, k * d + pipeline if k >= 0 else k) for s, kind, k in row)
        for pipeline in range(d)
        for row in program.rows
    )
    return replace(program, rows=rows, placement=Placement(ranks_of), num_microbatches=program.num_microbatches * d)


def _check_synchronous(program: Program) -> None:
    """One update per stage, after everything else of that stage on its rank."""
    for rank, row in enumerate(program.rows):
        updated: set[int] = set()
        for action in row:
            if action.stage in updated or program.versions is not Versions.NEWEST:
                raise UserError(
                    f"only a synchronous schedule can be replicated, and rank {rank} goes on with stage {action.stage} "
                    f"after its update; give an asynchronous one its replicas per stage instead"
                )
            if action.kind is STEP:
                updated.add(action.stage)
