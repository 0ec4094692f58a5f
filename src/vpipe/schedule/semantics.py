"""What every action means: the only place where the rules of a pipeline are stated.

``verify``, ``simulate``, ``lower`` and the runtime all ask here what an action waits for, which lane it occupies, what
it allocates and frees, and which weights it reads. A rule that is stated twice is a rule that will one day disagree
with itself.

    F(s,k)       needs  the forwards of the stages it reads
    B(s,k)       needs  F(s,k) and the backwards of the stages that read it; by law B = I, then W
    R, OUT, IN   stand between F and its backward and are needed by it where the program has them
    SEND, RECV   carry a result to another rank; on one rank stages hand results over directly
    REDUCE       needs  every replica of the stage to come to it: round n of one is round n of all
    AGREE        needs  every rank to come to it; gradients are complete before it, updates come after it

Who meets follows from the placement: the replicas of a stage, or all ranks. Three
exchanges of a training step have no action, because each stands at one place in the order of meetings whatever the
schedule is, the same on every rank, and no author could put it elsewhere:

    sums of tied weights   inside AGREE, before its norms, which count them: tie by tie, in the order of the model,
                           among the ranks that hold an owner. (Asynchronous schedules refuse tied weights.)
    buffers of replicas    after the last action of a step, stage by stage: replica 0 sends its own to the others, who
                           need them for the forwards of the next step and for nothing in this one
    losses                 with the norms inside AGREE; where there is none (asynchronous schedules, evaluation, steps
                           that only accumulate), or where it exchanges no norms, after the buffers, among all ranks

Words: docs/glossary.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from vpipe.schedule.action import Action, Kind
from vpipe.schedule.program import Program, Row, Versions


class Lane(Enum):
    """What an action occupies while it runs. A rank has one compute lane; transfers and swaps pass beside it."""

    COMPUTE = "compute"
    LINK = "link"
    SWAP = "swap"


INPUT_GRADIENT = (Kind.B, Kind.I)
"""Kinds that yield the gradient of a stage's input."""
WEIGHT_GRADIENT = (Kind.B, Kind.W)
"""Kinds that complete the gradient of a stage's weights, and free what the unit's forward saved."""
SEND_OF = {Kind.RECV_F: Kind.SEND_F, Kind.RECV_B: Kind.SEND_B}


class Where(Enum):
    """The stage of a needed action, seen from the action that needs it."""

    HERE = "here"
    WRITERS = "writers"
    """The stages whose tensors this stage reads."""
    READERS = "readers"
    """The stages that read this stage's tensors."""
    MEMBERS = "members"
    """The ranks that meet here (``members``), each at its own action, round by round."""


class Need(NamedTuple):
    """One requirement: any of ``kinds`` at ``where``, for the same microbatch.

    A need at ``WRITERS`` or ``READERS`` is met directly on the same rank, and by ``received_by`` at this stage where
    the other stage lives elsewhere. A need at ``MEMBERS`` is met when they come. An ``optional`` need counts only where
    the program has such an action.
    """

    kinds: tuple[Kind, ...]
    where: Where = Where.HERE
    received_by: Kind | None = None
    optional: bool = False


_BACKWARD = (
    Need((Kind.F,)),
    Need(INPUT_GRADIENT, Where.READERS, Kind.RECV_B),
    Need((Kind.R,), optional=True),
    Need((Kind.IN,), optional=True),
)


class Trait(NamedTuple):
    """All that a reader of programs wants to know of a kind."""

    name: str
    """In words; empty for what only posts a message and is not drawn."""
    needs: tuple[Need, ...] = ()
    lane: Lane = Lane.COMPUTE
    price: tuple[str, ...] = ()
    """The times of a stage (``timeline.StageCosts``) that it takes; SEND and RECV only post."""
    colour: int = 47
    """Background on a terminal."""
    fills: tuple[str, str] = ("#d0d3d8", "#6a717c")
    """On a light page, on a dark page."""
    texture: str = ""
    """Lines of a square of 6 that is laid over its boxes."""


TRAITS: dict[Kind, Trait] = {
    Kind.F: Trait(
        "forward",
        (Need((Kind.F,), Where.WRITERS, Kind.RECV_F),),
        price=("forward",),
        colour=44,
        fills=("#a9cdf5", "#2c66ad"),
    ),
    Kind.B: Trait(
        "backward",
        _BACKWARD,
        price=("input_grad", "weight_grad"),
        colour=42,
        fills=("#8ccfa0", "#24764a"),
        texture="M0 6L6 0M-1 1L1 -1M5 7L7 5",
    ),
    Kind.I: Trait(
        "input gradient",
        _BACKWARD,
        price=("input_grad",),
        colour=46,
        fills=("#f4bd84", "#a8601c"),
        texture="M1.5 0V6M4.5 0V6",
    ),
    Kind.W: Trait(
        "weight gradient",
        (Need((Kind.I,)),),
        price=("weight_grad",),
        colour=43,
        fills=("#f3e39b", "#85731a"),
        texture="M0 3H6",
    ),
    Kind.R: Trait(
        "recompute",
        (Need((Kind.F,)), Need((Kind.IN,), optional=True)),
        price=("recompute",),
        colour=45,
        fills=("#d5b6ea", "#74479a"),
        texture="M0 0L6 6M-1 5L1 7M5 -1L7 1",
    ),
    Kind.REDUCE: Trait("reduce", (Need((Kind.REDUCE,), Where.MEMBERS),), price=("reduce",)),
    Kind.AGREE: Trait("agree", (Need((Kind.AGREE,), Where.MEMBERS),)),
    Kind.STEP: Trait("update", price=("step",)),
    Kind.OUT: Trait(
        "swap out", (Need((Kind.F,)),), Lane.SWAP, ("swap",), fills=("#f0b6ae", "#9b4a40"), texture="M0 0L6 6M0 6L6 0"
    ),
    Kind.IN: Trait(
        "swap in", (Need((Kind.OUT,)),), Lane.SWAP, ("swap",), fills=("#eab4d2", "#944a74"), texture="M3 0V6M0 3H6"
    ),
    Kind.SEND_F: Trait("", (Need((Kind.F,)),), Lane.LINK),
    Kind.SEND_B: Trait("", (Need(INPUT_GRADIENT),), Lane.LINK),
    Kind.RECV_F: Trait("", (), Lane.LINK),
    Kind.RECV_B: Trait("", (), Lane.LINK),
}
"""One row a kind, in the order of a legend. ``REDUCE``, ``AGREE`` and ``STEP`` act on whatever gradients the rank has
gathered: their place in the row is their meaning, and ``updates`` has the rules of it."""

NEEDS = {kind: trait.needs for kind, trait in TRAITS.items()}
LANE = {kind: trait.lane for kind, trait in TRAITS.items()}
PRICE = {kind: trait.price for kind, trait in TRAITS.items()}
DRAWN = {kind: trait for kind, trait in TRAITS.items() if trait.name}
NAMES = {kind: trait.name for kind, trait in DRAWN.items()}

COMMUNICATION = frozenset(kind for kind, lane in LANE.items() if lane is Lane.LINK)
MEETINGS = frozenset(kind for kind, needs in NEEDS.items() if any(need.where is Where.MEMBERS for need in needs))
"""Kinds at which ranks wait for one another."""


def members(program: Program, action: Action) -> tuple[int, ...]:
    """The ranks that meet at an action: a stage's replicas at REDUCE, all at AGREE."""
    everyone = tuple(range(program.num_ranks))
    return everyone if action.kind is Kind.AGREE else program.placement.ranks_of[action.stage]


class Round(NamedTuple):
    """One meeting: which, and the how manieth of its kind. Its members come to it as to one action."""

    kind: Kind
    stage: int
    """-1 where a meeting is of no stage."""
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.number} of stage {self.stage}" if self.stage >= 0 else f"{self.kind} {self.number}"


def rounds(program: Program) -> dict[Round, dict[int, int]]:
    """Every meeting → its members that come to it, and the places of their actions in their rows."""
    found: dict[Round, dict[int, int]] = defaultdict(dict)
    for rank, row in enumerate(program.rows):
        been: dict[tuple[Kind, int], int] = defaultdict(int)
        for index, (stage, kind, _) in enumerate(row):
            if kind in MEETINGS:
                place = (kind, stage if kind is Kind.REDUCE else -1)
                found[Round(*place, been[place])][rank] = index
                been[place] += 1
    return found


def peers(program: Program, action: Action) -> tuple[int, ...]:
    """The stages that a SEND or RECV exchanges with: only those that live on another rank."""
    forward = action.kind in (Kind.SEND_F, Kind.RECV_B)
    stages = (program.readers if forward else program.writers)[action.stage]
    here = program.placement.rank(action.stage, action.microbatch)
    return tuple(stage for stage in stages if program.placement.rank(stage, action.microbatch) != here)


def channel(program: Program, writer: int, reader: int, source: int) -> int:
    """A number for the queue in which a message from ``source`` rank to the reader's rank keeps its order.

    The chain shares one queue between two ranks: NCCL matches by order alone. A skip is a queue of its own (a tag, or a
    communicator), because a RECV that takes from several stages of one rank cannot be in the order of all their sends.
    """
    edge = 0 if abs(writer - reader) == 1 else 1 + writer * program.num_stages + reader
    return edge * program.num_ranks + source


VersionTable = dict[tuple[int, int], int]
"""(stage, microbatch) → how many updates the stage had made when it wrote the weights that the unit reads."""


def update_groups(program: Program) -> list[list[list[int]]]:
    """``groups[stage][n]``: the units whose gradients the stage's update ``n`` consumes, in the order of the program.

    That is the order in which they are added: floating-point sums depend on it, and it is the author's. With replicas,
    update ``n`` of a stage is the round of all its replicas' updates ``n``, replica 0 first: each adds its own units,
    then the replicas' sums are added. Gradients after the last ``STEP`` form a last, open group; a program without
    ``STEP`` has one such group.
    """
    groups: list[dict[int, list[int]]] = [defaultdict(list) for _ in range(program.num_stages)]
    for stage, rank in program.placement.homes:
        update = 0
        for other, kind, microbatch in program.rows[rank]:
            if other == stage and kind is Kind.STEP:
                update += 1
            elif other == stage and kind in WEIGHT_GRADIENT:
                groups[stage][update].append(microbatch)
    return [[of_stage[number] for number in sorted(of_stage)] for of_stage in groups]


def forward_orders(program: Program) -> list[list[int]]:
    """``orders[stage]``: the units in the order of their forwards, replica by replica: what advances its buffers."""
    orders: list[list[int]] = [[] for _ in range(program.num_stages)]
    for stage, rank in program.placement.homes:
        orders[stage] += [k for other, kind, k in program.rows[rank] if other == stage and kind is Kind.F]
    return orders


def version_table(program: Program) -> VersionTable:
    """Which weights every unit reads at every stage, counted from the last drain."""
    if program.versions is Versions.DELAYED:
        return {
            (stage, microbatch): max(0, update - 1)
            for stage, groups in enumerate(update_groups(program))
            for update, units in enumerate(groups)
            for microbatch in units
        }
    table: VersionTable = {}
    for row in program.rows:
        made: dict[int, int] = defaultdict(int)
        for stage, kind, microbatch in row:
            if kind is Kind.STEP:
                made[stage] += 1
            elif kind is Kind.F:
                table[stage, microbatch] = made[stage]
    if program.versions is Versions.VERTICAL:
        return {place: table.get((0, place[1]), version) for place, version in table.items()}
    return table


def num_uses(row: Sequence[Action], stages: Iterable[int], versions: VersionTable) -> dict[int, list[int]]:
    """Stage of a rank → how many of its row's units read each version there, of those that the row makes."""
    uses: dict[int, list[int]] = {stage: [0] for stage in stages}
    for stage, kind, _ in row:
        if kind is Kind.STEP:
            uses[stage].append(0)
    for stage, kind, microbatch in row:
        if kind in WEIGHT_GRADIENT:
            uses[stage][versions[stage, microbatch]] += 1
    return uses


def updates_once(program: Program) -> bool:
    """Whether every stage updates at most once, after all its work: then one version is all there is."""
    flat = program.flat
    work, updates = flat.of((Kind.F, *WEIGHT_GRADIENT)), flat.of((Kind.STEP,))
    for number in updates.nonzero()[0].tolist():
        after = slice(number + 1, int(flat.row_start[flat.rank[number] + 1]))
        if (work[after] & (flat.stage[after] == flat.stage[number])).any():
            return False
    return True


def staleness(program: Program) -> list[int]:
    """Per stage, the most updates between the weights that a unit read and those its gradient is applied to."""
    worst = [0] * program.num_stages
    if updates_once(program):
        return worst
    table = version_table(program)
    for stage, groups in enumerate(update_groups(program)):
        for update, units in enumerate(groups):
            for microbatch in units:
                worst[stage] = max(worst[stage], update - table.get((stage, microbatch), update))
    return worst


def live_versions(program: Program) -> list[int]:
    """Per stage, the most weight versions that one of its ranks holds at once: W_s + 1 for PipeDream, never more."""
    worst = [1] * program.num_stages
    if updates_once(program):
        return worst
    table = version_table(program)
    for row in program.rows:
        for stage, held in _held_versions(row, table):
            worst[stage] = max(worst[stage], held)
    return worst


def _held_versions(row: Row, table: VersionTable) -> Iterator[tuple[int, int]]:
    """For every STEP of a row: its stage, and how many versions that holds from then on. A version is dropped at the
    first STEP after its last use; the newest stays."""
    last_use: dict[tuple[int, int], int] = {}
    for index, (stage, kind, microbatch) in enumerate(row):
        if kind in WEIGHT_GRADIENT and (stage, microbatch) in table:
            last_use[stage, table[stage, microbatch]] = index
    held: dict[int, set[int]] = defaultdict(lambda: {0})
    for index, (stage, kind, _) in enumerate(row):
        if kind is Kind.STEP:
            newest = max(held[stage]) + 1
            held[stage] = {v for v in held[stage] if last_use.get((stage, v), -1) > index} | {newest}
            yield stage, len(held[stage])


def most_open(program: Program, opens: Collection[Kind], closes: Collection[Kind]) -> list[int]:
    """Per stage, the most units of one of its ranks that are between an action that opens and one that closes."""
    most = [0] * program.num_stages
    for row in program.rows:
        open_units = [0] * program.num_stages
        for stage, kind, _ in row:
            if kind in opens:
                open_units[stage] += 1
                most[stage] = max(most[stage], open_units[stage])
            elif kind in closes:
                open_units[stage] -= 1
    return most


def units_in_flight(program: Program) -> list[int]:
    """Per stage, the most units whose activations one of its ranks holds at once."""
    return most_open(program, (Kind.F,), WEIGHT_GRADIENT)
