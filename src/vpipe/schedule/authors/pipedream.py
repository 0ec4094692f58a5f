"""PipeDream: no flush. Units flow on while weights change, and each unit keeps the weights it began with.

N ranks, S stages, stage s on r_s ranks (its replicas, which take the units in turn); m units between two drains.

    pipedream, N = S = 3: rank r runs ahead by W_s = (N - 1 - ranks before stage s) // r_s units, then 1F1B; u = STEP

        rank 0   F0 F1 F2 .  .  .  .  B0 B0 u F3 B1 B1 u F4 B2 B2 u …
        rank 1   .  F0 F1 .  .  B0 B0 u F2 B1 B1 u F3 B2 B2 u …
        rank 2   .  .  F0 B0 B0 u F1 B1 B1 u F2 B2 B2 u F3 …

Unit k reads version max(0, k - W_s) at stage s: stage 0 is the stalest, the last stage is never stale. With replicas
"unit" means the round of r_s consecutive units that one update of the stage takes together. ``pipedream-2bw`` updates
once per batch of m units and keeps two versions: batch t reads version max(0, t - 1) everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from vpipe.errors import UserError
from vpipe.schedule.action import Action
from vpipe.schedule.authors.authoring import STEP, B, F, check_counts, check_flags, one_forward_one_backward
from vpipe.schedule.placement import replicated
from vpipe.schedule.program import Program, Versions


def warm_up(num_replicas: Sequence[int]) -> list[int]:
    """W_s of every stage: (N - 1 - ranks before the stage) // its replicas."""
    before = accumulate(num_replicas, initial=0)
    num_ranks = sum(num_replicas)
    return [(num_ranks - 1 - earlier) // r for earlier, r in zip(before, num_replicas, strict=False)]


def pipedream(
    num_ranks: int,
    num_microbatches: int,
    *,
    vertical_sync: bool = False,
    update_interval: int = 1,
    replicas: Sequence[int] | None = None,
    depths: Sequence[int] | None = None,
) -> Program:
    """Asynchronous 1F1B with weight stashing; one update per unit, or per ``update_interval`` units of a replica.

    ``replicas[s]`` ranks hold stage s (default: one each); ``depths[s]`` replaces W_s (VPipe's ``stage_to_depth_map``);
    ``vertical_sync`` makes every stage read the version that stage 0 read.
    """
    check_counts(update_interval=update_interval)
    check_flags(vertical_sync=vertical_sync)
    replicas = [1] * num_ranks if replicas is None else _listed("replicas", replicas)
    _check_replicas(num_ranks, num_microbatches, replicas)
    depths = warm_up(replicas) if depths is None else _listed("depths", depths)
    _check_depths(depths, replicas)
    placement = replicated(replicas)
    rows = (
        tuple(_row(stage, placement.units(stage, rank, num_microbatches), depths[stage], update_interval))
        for stage, rank in placement.homes
    )
    versions = Versions.VERTICAL if vertical_sync else Versions.NEWEST
    return Program(tuple(rows), placement, num_microbatches, versions)


def pipedream_2bw(num_ranks: int, num_microbatches: int, *, num_batches: int = 2) -> Program:
    """1F1B over ``num_batches`` batches of m units without a flush between them, one update per batch, two versions."""
    check_counts(num_batches=num_batches)
    if num_microbatches < num_ranks - 1:
        raise UserError(
            f"pipedream-2bw keeps two weight versions, and {num_ranks} ranks then need at least {num_ranks - 1} "
            f"microbatches per batch, not {num_microbatches}"
        )
    units = range(num_microbatches * num_batches)
    rows = (tuple(_row(stage, units, num_ranks - 1 - stage, num_microbatches)) for stage in range(num_ranks))
    return Program(tuple(rows), replicated([1] * num_ranks), len(units), Versions.DELAYED)


def _row(stage: int, units: range, num_ahead: int, update_interval: int) -> Iterator[Action]:
    """1F1B with an update after every ``update_interval`` backwards, and after the last."""
    forwards = [Action(stage, F, microbatch) for microbatch in units]
    backwards = [Action(stage, B, microbatch) for microbatch in units]
    done = 0
    for action in one_forward_one_backward(forwards, backwards, num_ahead):
        yield action
        if action.kind is B:
            done += 1
            if done % update_interval == 0 or done == len(units):
                yield Action(stage, STEP)


def _listed(name: str, given: object) -> list[int]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UserError(f"{name} must be a list with one number per stage, not {given!r}")
    return list(given)


def _check_replicas(num_ranks: int, num_microbatches: int, replicas: Sequence[int]) -> None:
    for stage, count in enumerate(replicas):
        check_counts(**{f"replicas[{stage}]": count})
        if num_microbatches % count:
            raise UserError(
                f"pipedream needs whole rounds: {num_microbatches} units are not a multiple of the {count} replicas "
                f"of stage {stage}"
            )
    if sum(replicas) != num_ranks:
        raise UserError(f"replicas {list(replicas)} add up to {sum(replicas)} ranks, but there are {num_ranks}")


def _check_depths(depths: Sequence[int], replicas: Sequence[int]) -> None:
    """A stage must run ahead at least as far as the next one, or both wait for each other."""
    if len(depths) != len(replicas):
        raise UserError(f"depths has {len(depths)} entries, but there are {len(replicas)} stages")
    for stage, depth in enumerate(depths):
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
            raise UserError(f"depths[{stage}] must be a whole number of at least 0, not {depth!r}")
    reach = [depth * count for depth, count in zip(depths, replicas, strict=True)]
    for stage, (here, after) in enumerate(pairwise(reach)):
        if here < after:
            raise UserError(
                f"depths[{stage}] = {depths[stage]} is too small: stage {stage} would run {here} units ahead, but "
                f"stage {stage + 1} waits for {after}; the first stage is the deepest"
            )
