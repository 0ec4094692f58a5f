"""Who holds what: stages on ranks (``Placement``), and layers on stages, machines and devices (``Layout``).

A placement says, for each stage, which ranks run its units. A rank may hold several stages (loop, V or zig-zag
placement); a stage may be on several ranks (its replicas), which then take the units in turn: unit ``k`` goes to
replica ``k mod r``. Programs, and all that reads them, know no more of ranks than that.

    two_ways(4)   rank 0: 0 (even units) 3 (odd units)   rank 1: 1 2   rank 2: 2 1   rank 3: 3 0

    loop(2, 2)    rank 0: 0 2     V: vee(2)   rank 0: 0 3     zig-zag: zigzag(2, 2)   rank 0: 0 3 4 7
                  rank 1: 1 3                 rank 1: 1 2                             rank 1: 1 2 5 6

A layout is one value for layers, stages, ranks, machines and devices.

    layer ──▶ stage ──▶ its members: ranks, each with its number in every role ──▶ host and device

    stage  layers  ranks       a layout prints as this table, and equals another that says the same
    0      0-2     0, 1
    1      3-4     2

What a rank is of a stage, with whom it shares what, and which row of a program it runs, the runtime asks the layout
(``member``, ``fellows``, ``leader``, ``row``). A further role is a line of ``Role``, a number in ``StageMember``, and
what ``Layout.of``, ``row`` and ``opposite`` make of it.

A pipeline is built from its layout. Moving layers, shrinking, growing and resuming elsewhere are one thing: the
difference of two layouts, which is data (``difference``) and is carried out by ``runtime.moves.moving``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, pairwise
from math import lcm
from typing import Any

from vpipe.errors import UserError


@dataclass(frozen=True)
class Placement:
    """``ranks_of[stage]`` lists the ranks that hold the stage, replica 0 first."""

    ranks_of: tuple[tuple[int, ...], ...]
    num_stages: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        held = {rank for ranks in self.ranks_of for rank in ranks}
        object.__setattr__(self, "num_stages", len(self.ranks_of))
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

    @cached_property
    def homes(self) -> tuple[tuple[int, int], ...]:
        """Every (stage, rank that runs it), replica 0 of each stage first."""
        return tuple((stage, rank) for stage, ranks in enumerate(self.ranks_of) for rank in ranks)

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
        return len({self.turn(stage, rank) for stage in self.stages_of[rank]})

    def turn(self, stage: int, rank: int) -> int:
        """The first unit that ``rank`` runs at ``stage``: its number among the replicas."""
        return self.ranks_of[stage].index(rank)

    def units(self, stage: int, rank: int, num_microbatches: int) -> range:
        """The units that ``rank`` runs at ``stage``."""
        return range(self.turn(stage, rank), num_microbatches, self.num_replicas(stage))


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


class Role(StrEnum):
    """In what the ranks that hold one stage differ."""

    REPLICA = "replica"
    """In their units: each has all of the stage, they take the units in turn and add up their gradients."""


@dataclass(frozen=True)
class StageMember:
    """A rank as one of those that hold a stage, with its number in each role."""

    rank: int
    replica: int = 0

    def number(self, role: Role) -> int:
        """Its number in a role, from 0."""
        return int(getattr(self, role))

    def differs_in(self, other: StageMember) -> set[Role]:
        """The roles in which two members of a stage are not the same."""
        return {role for role in Role if self.number(role) != other.number(role)}


@dataclass(frozen=True)
class Seat:
    """Where a rank computes."""

    host: str = ""
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.host} {self.device}".strip()


@dataclass(frozen=True)
class Layout:
    """``counts[stage]`` layers in each stage, ``members[stage]`` the ranks that hold it, ``seats[rank]`` where.

    Words: docs/glossary.md.
    """

    counts: tuple[int, ...]
    members: tuple[tuple[StageMember, ...], ...]
    seats: tuple[Seat, ...]
    placement: Placement = field(init=False, compare=False, repr=False)
    """Stage → ranks, as programs know it."""
    bounds: tuple[tuple[int, int], ...] = field(init=False, compare=False, repr=False)
    """Per stage, its layers as a half-open interval."""
    stages: tuple[int, ...] = field(init=False, compare=False, repr=False)
    """The stage of each layer."""
    num_layers: int = field(init=False, compare=False, repr=False)
    num_stages: int = field(init=False, compare=False, repr=False)
    num_ranks: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        derived = {
            "placement": Placement(tuple(tuple(member.rank for member in stage) for stage in self.members)),
            "bounds": tuple(pairwise((0, *accumulate(self.counts)))),
            "stages": tuple(stage for stage, count in enumerate(self.counts) for _ in range(count)),
            "num_layers": sum(self.counts),
            "num_stages": len(self.counts),
            "num_ranks": len(self.seats),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        if any(count < 1 for count in self.counts):
            raise UserError(
                f"the partition {list(self.counts)} has an empty stage; every stage needs at least one layer"
            )
        if len(self.counts) != len(self.members):
            raise UserError(
                f"the partition {list(self.counts)} has {len(self.counts)} stages, but ranks are given for "
                f"{len(self.members)}; give both for every stage"
            )
        if self.placement.num_ranks != self.num_ranks:
            raise UserError(f"a layout of {self.placement.num_ranks} ranks has {self.num_ranks} seats; give one a rank")

    @classmethod
    def of(cls, counts: Sequence[int], placement: Placement, seats: Sequence[Seat] = ()) -> Layout:
        """Stages of so many layers, each whole on all ranks of its placement."""
        stages = (enumerate(ranks) for ranks in placement.ranks_of)
        members = tuple(tuple(StageMember(rank, turn) for turn, rank in ranks) for ranks in stages)
        return cls(tuple(counts), members, tuple(seats) or (Seat(),) * placement.num_ranks)

    @classmethod
    def chain(cls, counts: Sequence[int]) -> Layout:
        """Stage ``s`` on rank ``s``."""
        return cls.of(counts, loop(len(counts)))

    def row(self, rank: int) -> int:
        """The row of a program that a rank runs: its own."""
        return rank

    def opposite(self, rank: int, row: int) -> int:
        """The rank with which ``rank`` exchanges what a program sends between their rows."""
        return row

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of which a rank is a member, in order."""
        return self.placement.stages_of[self.row(rank)]

    def member(self, stage: int, rank: int) -> StageMember:
        """What a rank is of a stage that it holds."""
        return next(member for member in self.members[stage] if member.rank == rank)

    def leader(self, stage: int) -> int:
        """The member that speaks for a stage: the others start with its weights, and count by it."""
        return self.members[stage][0].rank

    def fellows(self, stage: int, rank: int, role: Role = Role.REPLICA) -> tuple[int, ...]:
        """The members of a stage that differ from ``rank`` in this role alone, and itself, by their numbers in it."""
        mine = self.member(stage, rank)
        alike = [member for member in self.members[stage] if mine.differs_in(member) <= {role}]
        return tuple(member.rank for member in sorted(alike, key=lambda member: member.number(role)))

    def circles(self) -> list[tuple[int, ...]]:
        """Every set of several ranks that are fellows at a stage, in one order on all ranks."""
        everywhere = ((stage, member.rank) for stage, members in enumerate(self.members) for member in members)
        found = {self.fellows(stage, rank, role): None for stage, rank in everywhere for role in Role}
        return [ranks for ranks in found if len(ranks) > 1]

    def stage_of(self, layer: int) -> int:
        """The stage that holds a layer; what comes after the last layer (the loss) is with it."""
        return self.stages[min(layer, self.num_layers - 1)]

    def ranks_of(self, layer: int) -> tuple[int, ...]:
        """The ranks that hold a layer, the leader of its stage first."""
        return tuple(member.rank for member in self.members[self.stage_of(layer)])

    def ranks_of_all(self, layers: Iterable[int]) -> list[int]:
        """The ranks that hold any of these layers."""
        return sorted({rank for layer in layers for rank in self.ranks_of(layer)})

    def with_counts(self, counts: Sequence[int]) -> Layout:
        """The same ranks with other partition."""
        if sum(counts) != self.num_layers:
            raise UserError(
                f"the partition {list(counts)} covers {sum(counts)} layers, but the layout has {self.num_layers}; "
                f"make the sum {self.num_layers}"
            )
        return replace(self, counts=tuple(counts))

    def with_ranks(self, ranks: Sequence[int]) -> Layout:
        """The same stages where ``ranks[r]`` takes over what rank ``r`` holds."""
        if sorted(ranks) != list(range(self.num_ranks)):
            raise UserError(f"{list(ranks)} is no order of the ranks 0..{self.num_ranks - 1}; name each once")
        return replace(
            self, members=tuple(tuple(replace(m, rank=ranks[m.rank]) for m in stage) for stage in self.members)
        )

    def __str__(self) -> str:
        rows = [("stage", "layers", "ranks", "where")]
        for stage, (begin, end) in enumerate(self.bounds):
            ranks = [member.rank for member in self.members[stage]]
            seats = [self.seats[rank] for rank in ranks]
            where = dict.fromkeys([*(seat.host for seat in seats if seat.host), *(seat.device for seat in seats)])
            layers = f"{begin}" if end == begin + 1 else f"{begin}-{end - 1}"
            rows.append((str(stage), layers, ", ".join(map(str, ranks)), " ".join(where)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def as_document(self) -> dict[str, Any]:
        """The value as JSON holds it."""
        return {
            "partition": list(self.counts),
            "holders": [[asdict(member) for member in stage] for stage in self.members],
            "ranks": [{"host": seat.host, "device": seat.device} for seat in self.seats],
        }


@dataclass(frozen=True)
class LayerTransfer:
    """A layer that ranks must get from others."""

    layer: int
    sources: tuple[int, ...]
    """Those that have it now, replica 0 first."""
    targets: tuple[int, ...]
    """Those that do not have it yet."""


@dataclass(frozen=True)
class Drop:
    """A layer that ranks need no longer hold, once all others have what they need."""

    layer: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Reseated:
    """A rank that sits on another machine or device."""

    rank: int
    before: Seat
    after: Seat


@dataclass(frozen=True)
class Difference:
    """What leads from one layout to another: layer by layer, and the ranks that change their place."""

    transfers: tuple[LayerTransfer, ...]
    drops: tuple[Drop, ...]
    reseated: tuple[Reseated, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.transfers or self.drops or self.reseated)

    def __str__(self) -> str:
        moves = [f"layer {t.layer}: {_ranks(t.sources)} → {_ranks(t.targets)}" for t in self.transfers]
        moves += [f"layer {d.layer}: dropped by {_ranks(d.ranks)}" for d in self.drops]
        moves += [f"rank {r.rank}: {r.before} → {r.after}" for r in self.reseated]
        return "\n".join(moves) or "nothing moves"


def difference(old: Layout, new: Layout) -> Difference:
    """What must go where so that ``old`` becomes ``new``. Both are of one model; ranks may come and go."""
    if old.num_layers != new.num_layers:
        raise UserError(f"a layout of {old.num_layers} layers cannot become one of {new.num_layers}: another model")
    transfers, drops = [], []
    for layer in range(old.num_layers):
        before, after = old.ranks_of(layer), new.ranks_of(layer)
        if targets := tuple(rank for rank in after if rank not in before):
            transfers.append(LayerTransfer(layer, before, targets))
        if gone := tuple(rank for rank in before if rank not in after):
            drops.append(Drop(layer, gone))
    both = enumerate(zip(old.seats, new.seats, strict=False))
    reseated = tuple(Reseated(rank, before, after) for rank, (before, after) in both if before != after)
    return Difference(tuple(transfers), tuple(drops), reseated)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
