"""The rules of weights: in which order gradients are gathered, what an update takes, which version a unit reads.

A program that breaks them runs to its end and trains something else. ``verify`` asks here.

    order      the author's: a stage's gradients are added, and its buffers advance, as the program has it; where a
               stage updates several times, in increasing microbatch, because versions and updates count units
    updates    every gradient is applied once, with those of the replicas; all stages update in step
    versions   the version that unit k reads is max(0, k - W) // u, for one W of the stage and u units per update
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from vpipe.schedule.action import Action, Kind
from vpipe.schedule.program import Program, Versions
from vpipe.schedule.semantics import WEIGHT_GRADIENT, version_table
from vpipe.schedule.violation import Violation


def violations(program: Program, lowered: bool) -> Iterator[Violation]:
    """Every broken rule. Where the program is not ``lowered``, REDUCE need not be there yet."""
    several = _updates_again(program)
    if several:
        yield from _disorder(program)
    if Kind.STEP in program.flat.kinds:
        broken = [*_lost_gradients(program), *_lonely_replicas(program, lowered)]
        broken += _uneven(program) if several else ()
        if Kind.AGREE in program.flat.kinds:
            broken += _hasty(program, several)
        yield from broken
        if not broken:
            yield from _unborn(program)
            yield from _irregular(program) if several else ()


def _disorder(program: Program) -> Iterator[Violation]:
    """Of a program with several updates of a stage: F, and B or W, each in increasing microbatch. I is free."""
    for rank, row in enumerate(program.rows):
        last: dict[tuple[int, bool], Action] = {}
        for index, action in enumerate(row):
            stage, kind, microbatch = action
            if kind is Kind.F or kind in WEIGHT_GRADIENT:
                before = last.get((stage, kind is Kind.F))
                if before is not None and before.microbatch > microbatch:
                    yield Violation(
                        rank,
                        index,
                        str(action),
                        f"runs after {before}, but where stages update several times microbatches go in increasing "
                        "order: updates count them",
                    )
                last[stage, kind is Kind.F] = action


def _updates_again(program: Program) -> bool:
    """Whether a stage updates more than once on a rank."""
    flat = program.flat
    updates = np.flatnonzero(flat.of([Kind.STEP]))
    places = Counter(zip(flat.rank[updates].tolist(), flat.stage[updates].tolist(), strict=True))
    return max(places.values(), default=0) > 1


def _turning_points(program: Program) -> Iterator[tuple[int, int, Action]]:
    """(rank, index, action) of every update, and of the last gradient of a stage before something else happens."""
    flat = program.flat
    gradient = flat.of(WEIGHT_GRADIENT)
    relevant = np.flatnonzero(gradient | flat.of([Kind.STEP]))
    place = flat.rank[relevant] * program.num_stages + flat.stage[relevant]
    followed = np.zeros(len(relevant), np.bool_)
    followed[:-1] = gradient[relevant[:-1]] & gradient[relevant[1:]] & (place[:-1] == place[1:])
    for number in relevant[~followed].tolist():
        yield int(flat.rank[number]), flat.index(number), flat.action(number)


def _lost_gradients(program: Program) -> Iterator[Violation]:
    """No update is empty, and no gradient is left over. A replica that has no unit is given the others' gradient."""
    gathered: dict[tuple[int, int], Action] = {}
    for rank, index, action in _turning_points(program):
        place = (rank, action.stage)
        if action.kind in WEIGHT_GRADIENT:
            gathered[place] = action
        elif gathered.pop(place, None) is None and _has_units(program, action.stage, rank):
            yield Violation(rank, index, str(action), f"stage {action.stage} has no new gradient to apply")
    for (rank, stage), left in gathered.items():
        yield Violation(rank, -1, "", f"no {stage}STEP follows {left}: its gradient is never applied")


def _has_units(program: Program, stage: int, rank: int) -> bool:
    return bool(program.placement.units(stage, rank, program.num_microbatches))


def _lonely_replicas(program: Program, lowered: bool) -> Iterator[Violation]:
    """The replicas of a stage reduce and update equally often, and reduce all of a gradient before they apply it."""
    for stage, ranks in enumerate(program.placement.ranks_of):
        if len(ranks) == 1:
            continue
        for counted in (Kind.STEP,) if lowered else (Kind.STEP, Kind.REDUCE):
            counts = {rank: program.rows[rank].count(Action(stage, counted)) for rank in ranks}
            if len(set(counts.values())) > 1:
                often = " and ".join(f"{count} times on rank {rank}" for rank, count in counts.items())
                yield Violation(ranks[0], -1, f"{stage}{counted}", f"runs {often}: the replicas would differ")
        reduces = lowered or any(Action(stage, Kind.REDUCE) in program.rows[rank] for rank in ranks)
        for rank in ranks if reduces else ():
            yield from _unreduced(program, stage, rank)


def _unreduced(program: Program, stage: int, rank: int) -> Iterator[Violation]:
    reduced = False
    for index, action in enumerate(program.rows[rank]):
        if action.stage != stage:
            continue
        if action.kind is Kind.REDUCE and reduced:
            yield Violation(rank, index, str(action), "reduces what is reduced already")
        if action.kind is Kind.STEP and not reduced:
            yield Violation(
                rank, index, str(action), f"applies a gradient that the other replicas of stage {stage} have not shared"
            )
        if action.kind is Kind.REDUCE or action.kind in WEIGHT_GRADIENT or action.kind is Kind.STEP:
            reduced = action.kind is Kind.REDUCE


def _hasty(program: Program, several: bool) -> Iterator[Violation]:
    """Ranks agree on the norm of all gradients once: after the last of them, before the first update."""
    for rank, row in enumerate(program.rows):
        agreed = updated = False
        for index, action in enumerate(row):
            if action.kind is Kind.AGREE:
                if several:
                    reason = "agrees for all stages at once, but they update several times, each on its own"
                elif agreed:
                    reason = "agrees on what is agreed already"
                elif updated:
                    reason = "comes after an update: all ranks agree before the first of them updates"
                else:
                    agreed = True
                    continue
            elif agreed and (action.kind in WEIGHT_GRADIENT or action.kind is Kind.REDUCE):
                reason = "changes a gradient that the ranks have agreed on"
            else:
                updated |= action.kind is Kind.STEP
                continue
            yield Violation(rank, index, str(action), reason)


def _uneven(program: Program) -> Iterator[Violation]:
    """Each of several updates takes equally many units (the last may take fewer), and the same on every stage.

    Stages with different numbers of replicas agree on the units per update, or on the units per update of a replica.
    """
    sizes = {(stage, rank): _group_sizes(program, stage, rank) for stage, rank in program.placement.homes}
    for (stage, rank), groups in sizes.items():
        if any(size != groups[0] for size in groups[:-1]) or (groups and groups[-1] > groups[0]):
            yield Violation(
                rank, -1, f"{stage}STEP", f"the updates of stage {stage} take {_list(groups)} units, not equally many"
            )
    for (stage, rank), (other, other_rank) in pairwise(sizes):
        mine, theirs = sizes[stage, rank], sizes[other, other_rank]
        replicas, others = program.placement.num_replicas(stage), program.placement.num_replicas(other)
        alike = mine == theirs if replicas == others else _agree(mine, theirs, replicas, others)
        if not alike:
            reason = f"the updates of stage {stage} take {_list(mine)} units, those of stage {other} {_list(theirs)}"
            yield Violation(other_rank, -1, f"{other}STEP", reason)


def _agree(mine: list[int], theirs: list[int], replicas: int, others: int) -> bool:
    return mine[:1] == theirs[:1] or [size * replicas for size in mine[:1]] == [size * others for size in theirs[:1]]


def _group_sizes(program: Program, stage: int, rank: int) -> list[int]:
    """How many units each update of a stage takes on a rank."""
    sizes, gathered = [], 0
    for other, kind, _ in program.rows[rank]:
        if other == stage:
            gathered += kind in WEIGHT_GRADIENT
            if kind is Kind.STEP:
                sizes.append(gathered)
                gathered = 0
    return sizes


def _list(numbers: list[int]) -> str:
    shown = list(map(str, numbers[:8])) + ["…"] * (len(numbers) > 8)
    return ", ".join(shown) or "no"


def _unborn(program: Program) -> Iterator[Violation]:
    """No unit reads weights that its stage has not made yet."""
    if program.versions is Versions.NEWEST:
        return
    table = version_table(program)
    for rank, row in enumerate(program.rows):
        made: dict[int, int] = Counter()
        for index, action in enumerate(row):
            stage, kind, microbatch = action
            made[stage] += kind is Kind.STEP
            wanted = table.get((stage, microbatch), 0)
            if kind is Kind.F and wanted > made[stage]:
                reason = f"reads weight version {wanted}, but stage {stage} has made {made[stage]} updates"
                yield Violation(rank, index, str(action), reason)


def _irregular(program: Program) -> Iterator[Violation]:
    """Version of the i-th unit of a rank = max(0, i - W) // u for one W: one unit may not read older or newer weights.

    Under vertical sync stage 0 decides for all; in a delayed program the groups decide, and ``_uneven`` has seen them.
    """
    if program.versions is Versions.DELAYED:
        return
    for stage, rank in program.placement.homes:
        if program.versions is Versions.VERTICAL and stage:
            return
        interval = _group_sizes(program, stage, rank)[0]
        least, most = 0, len(program.rows[rank])  # bounds on W
        made = begun = 0
        for index, action in enumerate(program.rows[rank]):
            if action.stage != stage:
                continue
            if action.kind is Kind.STEP:
                made += 1
            elif action.kind is Kind.F:
                least = max(least, begun - (made + 1) * interval + 1)
                most = min(most, begun - made * interval) if made else most
                if least > most:
                    reason = f"reads weight version {made}, out of step with the units before it"
                    yield Violation(rank, index, str(action), reason)
                    break
                begun += 1
