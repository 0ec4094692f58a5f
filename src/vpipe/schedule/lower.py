"""From what an author writes to what a rank executes: a visible list of pure passes.

    recompute   R before the backward of every unit of the given stages
    swap        OUT after the forward, IN before the backward, of every unit of the given stages
    reduce      REDUCE before the STEP of every stage that has replicas
    communicate SEND after the result, RECV some actions ahead of its use
    agree       AGREE before the updates, which go to the end: only for a runtime that updates by the norm of all

Each pass takes a program and returns another; every result verifies.

Words: docs/glossary.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from itertools import groupby

from vpipe.schedule.action import Action, Kind
from vpipe.schedule.communication import POST_AHEAD, communicate
from vpipe.schedule.program import Program, Row
from vpipe.schedule.semantics import COMMUNICATION, INPUT_GRADIENT, WEIGHT_GRADIENT

__all__ = [
    "POST_AHEAD",
    "SWAP_AHEAD",
    "agree",
    "communicate",
    "is_lowered",
    "lower",
    "recompute",
    "reduce",
    "swap",
]

SWAP_AHEAD = 1
"""How many compute actions before its use a swapped unit is fetched. One unit is then in use and one on its way; with 2
a third would be there, which only pays where a swap takes longer than a forward."""


def lower(
    program: Program,
    *,
    recompute_stages: Collection[int] = (),
    swap_stages: Collection[int] = (),
    post_ahead: int = POST_AHEAD,
    agrees: bool = False,
    receives_block: bool = False,
) -> Program:
    """The executable program; where ``agrees``, that of a synchronous one: a prediction of a step times what ranks
    run, agreement and all."""
    program = recompute(program, recompute_stages)
    program = swap(program, swap_stages)
    program = reduce(program)
    program = communicate(program, post_ahead, receives_block=receives_block)
    return agree(program) if agrees else program


def is_lowered(program: Program) -> bool:
    """Whether the program says how results travel (or none need to)."""
    return bool(program.flat.kinds & COMMUNICATION)


def recompute(program: Program, stages: Collection[int]) -> Program:
    """``R`` directly before the backward of every unit of ``stages``."""
    chosen = frozenset(stages)

    def row(actions: Row) -> Iterator[Action]:
        for action in actions:
            if action.kind in INPUT_GRADIENT and action.stage in chosen:
                yield Action(action.stage, Kind.R, action.microbatch)
            yield action

    return program.with_rows(map(row, program.rows)) if chosen else program


def swap(program: Program, stages: Collection[int]) -> Program:
    """``OUT`` after each forward of ``stages``, ``IN`` shortly before its backward; nothing where they would touch."""
    chosen = frozenset(stages)

    def row(actions: Row) -> Iterator[Action]:
        forward = {(a.stage, a.microbatch): i for i, a in enumerate(actions) if a.kind is Kind.F}
        before: dict[int, list[Action]] = defaultdict(list)
        gone: set[tuple[int, int]] = set()
        for index, (stage, kind, microbatch) in enumerate(actions):
            if kind in INPUT_GRADIENT and stage in chosen:
                recomputed = index > 0 and actions[index - 1] == Action(stage, Kind.R, microbatch)
                fetch = index - recomputed - SWAP_AHEAD
                if fetch > forward[stage, microbatch] + 1:
                    gone.add((stage, microbatch))
                    before[fetch].append(Action(stage, Kind.IN, microbatch))
        for index, action in enumerate(actions):
            yield from before[index]
            yield action
            if action.kind is Kind.F and (action.stage, action.microbatch) in gone:
                yield Action(action.stage, Kind.OUT, action.microbatch)

    return program.with_rows(map(row, program.rows)) if chosen else program


def reduce(program: Program) -> Program:
    """``REDUCE`` before every ``STEP`` of a stage that has replicas, where it is not there already.

    Updates that follow each other are reduced before the first of them, in the order of stages: ranks that hold the
    same stages meet in the same order, in whatever order their updates are written.
    """

    def row(actions: Row) -> Iterator[Action]:
        reduced: set[int] = set()
        for updates, group in groupby(actions, lambda action: action.kind is Kind.STEP):
            block = list(group)
            if updates:
                owed = {stage for stage, _, _ in block if program.placement.num_replicas(stage) > 1} - reduced
                yield from (Action(stage, Kind.REDUCE) for stage in sorted(owed))
                reduced -= {stage for stage, _, _ in block}
            for stage, kind, _ in () if updates else block:
                if kind is Kind.REDUCE:
                    reduced.add(stage)
                elif kind in WEIGHT_GRADIENT:
                    reduced.discard(stage)
            yield from block

    return program.with_rows(map(row, program.rows)) if program.placement.has_replicas else program


def agree(program: Program) -> Program:
    """Every ``STEP`` at the end of its row, behind one ``AGREE``: all ranks know the norm of all gradients before the
    first of them updates. A program that has its own stays as it is."""
    kinds = {action.kind for _, action in program.actions()}
    if Kind.AGREE in kinds or Kind.STEP not in kinds:
        return program

    def row(actions: Row) -> Iterator[Action]:
        updates = [action for action in actions if action.kind is Kind.STEP]
        yield from (action for action in actions if action.kind is not Kind.STEP)
        if updates:
            yield Action(min(stage for stage, _, _ in updates), Kind.AGREE)
        yield from updates

    return program.with_rows(map(row, program.rows))
