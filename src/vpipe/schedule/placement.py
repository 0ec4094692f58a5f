"""Where stages live.

A placement says, for each stage, which ranks hold it. A rank may hold several stages (loop, V or zig-zag placement); a
stage may be held by several ranks (its replicas), which then take the units in turn: unit ``k`` goes to replica ``k mod
r``.

    two_ways(4)   rank 0: 0 (even units) 3 (odd units)   rank 1: 1 2   rank 2: 2 1   rank 3: 3 0

    loop(2, 2)    rank 0: 0 2     V: vee(2)   rank 0: 0 3     zig-zag: zigzag(2, 2)   rank 0: 0 3 4 7
                  rank 1: 1 3                 rank 1: 1 2                             rank 1: 1 2 5 6
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import lcm


@dataclass(frozen=True)
class Placement:
    """``ranks_of[stage]`` lists the ranks that hold the stage, replica 0 first."""

    ranks_of: tuple[tuple[int, ...], ...]
    num_stages: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_stages", len(self.ranks_of))
        held = {rank for ranks in self.ranks_of for rank in ranks}
        if not self.ranks_of or held != set(range(len(held))):
            raise ValueError(f"the ranks of a placement must be 0..P-1 without a gap, not {sorted(held)}")

    @cached_property
    def num_ranks(self) -> int:
        return 1 + max(max(ranks) for ranks in self.ranks_of)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """``stages_of[rank]`` lists the stages that the rank holds, in order."""
        held: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, ranks in enumerate(self.ranks_of):
            for rank in ranks:
                held[rank].append(stage)
        return tuple(tuple(stages) for stages in held)

    @cached_property
    def period(self) -> int:
        """After how many units the placement repeats: 1 without replicas."""
        return lcm(*map(len, self.ranks_of))

    @property
    def has_replicas(self) -> bool:
        return any(len(ranks) > 1 for ranks in self.ranks_of)

    def num_replicas(self, stage: int) -> int:
        return len(self.ranks_of[stage])

    def rank(self, stage: int, microbatch: int) -> int:
        """The rank that runs this unit at this stage."""
        ranks = self.ranks_of[stage]
        return ranks[microbatch % len(ranks)]

    def num_directions(self, rank: int) -> int:
        """In how many pipelines the rank stands: 2 where it takes even units of one stage and odd ones of another.

        A rank of two pipelines has a whole share of each.
        """
        return len({self.ranks_of[stage].index(rank) for stage in self.stages_of[rank]})

    def units(self, stage: int, rank: int, num_microbatches: int) -> range:
        """The units that ``rank`` runs at ``stage``."""
        ranks = self.ranks_of[stage]
        return range(ranks.index(rank), num_microbatches, len(ranks))


def loop(num_ranks: int, stages_per_rank: int = 1) -> Placement:
    """Stage ``s`` on rank ``s mod p``: one stage a rank, or Megatron's interleaving."""
    return Placement(tuple((stage % num_ranks,) for stage in range(num_ranks * stages_per_rank)))


def zigzag(num_ranks: int, num_waves: int) -> Placement:
    """Down the ranks and up again, ``num_waves`` times: neighbours at each turn are on one rank."""
    wave = [*range(num_ranks), *reversed(range(num_ranks))]
    return Placement(tuple((rank,) for rank in wave * num_waves))


def vee(num_ranks: int) -> Placement:
    """One wave: the first and the last stage are on rank 0."""
    return zigzag(num_ranks, 1)


def two_ways(num_ranks: int) -> Placement:
    """Two pipelines in opposite directions: stage ``s`` on rank ``s`` for even units, on rank ``p-1-s`` for odd ones.
    With an odd number of ranks the stage in the middle has one home for both."""
    ends = ((stage, num_ranks - 1 - stage) for stage in range(num_ranks))
    return Placement(tuple((down,) if down == up else (down, up) for down, up in ends))


def replicated(num_replicas: Sequence[int]) -> Placement:
    """One stage after the other, stage ``s`` on the next ``num_replicas[s]`` ranks."""
    ends = list(accumulate(num_replicas))
    return Placement(tuple(tuple(range(end - r, end)) for r, end in zip(num_replicas, ends, strict=True)))
