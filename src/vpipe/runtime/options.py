"""What a pipeline is told, in four values: its schedule, its memory, its updates, its ranks.

    Pipeline(layers, loss, schedule=Schedule("zb-h1", num_microbatches=8), ranks=Ranks(2, transport="shm"))
    Pipeline(layers, loss, schedule="zb-h1", num_microbatches=8, num_ranks=2, transport="shm")     the same

Every field is also a plain keyword of ``Pipeline``; ``PlainKeywords`` says which, with their types. A keyword belongs
to the one value that has a field of its name; said in both, it is refused.

Which layers are kept, recomputed or swapped: the convention for ratios is ``recomputed_and_swapped``, here and nowhere
else:

    stage of n layers   kept … kept | swapped: int(swap · n) | recomputed: int(recompute · n)

VPipe recomputes the last ``int(r · n)`` layers of a stage; what is swapped lies before them. A set of layer indices
says the same for any layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict, TypeVar

from torch import nn
from torch.optim import Optimizer

from vpipe.errors import UserError, nearest
from vpipe.runtime.priorities.order import Policy, policy
from vpipe.runtime.updates.update import LossScale
from vpipe.schedule.catalog import ScheduleSpec
from vpipe.schedule.program import Program

Chosen = float | Sequence[float] | Collection[int]
"""A ratio for all stages, one for each stage, or a set of layers."""
Bounds = Sequence[tuple[int, int]]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Schedule:
    """Which program runs, and how a rank goes through it.

    ``name`` is one of the catalogue (``vpipe schedules``), a ``Program``, or a CSV file with one, torch's dumps
    included; or a ``ScheduleSpec``, which has its own numbers, options and replicas, and a program that is not built
    again. ``num_microbatches`` is the number of units of one ``train_step``: 4, or what the program has.
    ``partition`` is the number of layers of each stage; even if not given. ``executor``: "plain" (a rank's actions one
    after the other), "threaded" (a worker thread per microbatch, which take turns by ``priority``: none, first-hp, fifo
    or critical-path), or "auto" (threaded for the schedule ``async_threaded``).
    """

    name: str | Program | ScheduleSpec = "1f1b"
    num_microbatches: int | None = None
    stages_per_rank: int | None = None
    partition: Sequence[int] | None = None
    schedule_options: Mapping[str, Any] | None = None
    executor: str = "auto"
    priority: str = "none"
    blocking: bool = False

    def policy(self, wants_threads: bool) -> Policy | None:
        """Who goes first among worker threads, or ``None`` where a rank runs its actions one after the other."""
        if self.executor not in ("auto", "plain", "threaded"):
            raise UserError(f"there is no executor {self.executor!r}; give one of auto, plain, threaded")
        threaded = self.executor == "threaded" or (self.executor == "auto" and wants_threads)
        chosen = policy(self.priority) if threaded or self.priority != "none" else None
        if chosen is not None and not threaded:
            raise UserError(
                f"priority {self.priority!r} orders worker threads, but the executor is plain; give "
                "executor='threaded', or priority='none'"
            )
        return chosen


@dataclass(frozen=True)
class Memory:
    """What a stage does not keep between forward and backward.

    ``recompute`` is the part of each stage's layers that is computed again (the last ones), one number or one a stage,
    or a set of layer indices; ``swap`` is the part (those before) whose saved tensors wait in a file instead of memory,
    in a temporary directory (``TMPDIR``).
    """

    recompute: Chosen = 0.0
    swap: Chosen = 0.0


@dataclass(frozen=True)
class Update:
    """From losses to the next weights.

    With ``early_reduction`` a stage's gradients leave for its replicas as soon as they are complete, while the rank
    computes the backwards of its other stages: of use where a rank holds several. Results are the same to the bit.
    """

    optimizer: OptimizerFactory | None = None
    clip_norm: float | None = None
    skip_nonfinite: bool = True
    exact_reduction: bool = True
    early_reduction: bool = False
    fused_weight_grad: bool = False
    loss_scale: LossScale | None = None
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Ranks:
    """Who computes, where, and what carries messages between them.

    Without a launcher, ``num_ranks`` ranks run as threads of this process. ``transport`` between processes: "shm"
    (shared memory where ranks are on one machine), "distributed" (TCP and gloo for all), or "auto" (shm if all ranks
    are on one machine). ``device`` is where the ranks compute: "cpu", an accelerator's type ("cuda": a device for every
    rank of a machine), one device for all of them ("cuda:0"), or "auto" (the accelerator where there is one). Between
    processes, tensors go by the device's own backend, or with ``device_messages=False`` through main memory.
    """

    num_ranks: int | None = None
    replicas: int | Sequence[int] = 1
    transport: str = "auto"
    device: str = "cpu"
    device_messages: bool = True
    timeout: float = 1800.0


class PlainKeywords(TypedDict, total=False):
    """The fields of the four values as keywords of ``Pipeline``."""

    num_microbatches: int | None
    stages_per_rank: int | None
    partition: Sequence[int] | None
    schedule_options: Mapping[str, Any] | None
    executor: str
    priority: str
    blocking: bool
    recompute: Chosen
    swap: Chosen
    optimizer: OptimizerFactory | None
    clip_norm: float | None
    skip_nonfinite: bool
    exact_reduction: bool
    early_reduction: bool
    fused_weight_grad: bool
    loss_scale: LossScale | None
    autocast: Callable[[], AbstractContextManager[Any]]
    num_ranks: int | None
    replicas: int | Sequence[int]
    transport: str
    device: str
    device_messages: bool
    timeout: float


Group = TypeVar("Group", Schedule, Memory, Update, Ranks)


@dataclass(frozen=True)
class PipelineOptions:
    """All that a pipeline is told beside its model."""

    schedule: Schedule = field(default_factory=Schedule)
    memory: Memory = field(default_factory=Memory)
    update: Update = field(default_factory=Update)
    ranks: Ranks = field(default_factory=Ranks)
    seed: int = 0

    @classmethod
    def of(
        cls,
        schedule: str | Program | ScheduleSpec | Schedule,
        memory: Memory | None,
        update: Update | None,
        ranks: Ranks | None,
        seed: int,
        plain: Mapping[str, Any],
    ) -> PipelineOptions:
        """Grouped values and plain keywords as one."""
        own = schedule if isinstance(schedule, Schedule) else None
        known = [each.name for group in (Schedule, Memory, Update, Ranks) for each in fields(group)]
        for name in plain:
            if name not in known or name == "name":
                raise TypeError(f"Pipeline() got an unexpected keyword argument {name!r}{nearest(name, known)}")
        rest = dict(plain) if own is not None else {"name": schedule, **plain}
        return cls(
            _joined("schedule", own, Schedule, rest),
            _joined("memory", memory, Memory, plain),
            _joined("update", update, Update, plain),
            _joined("ranks", ranks, Ranks, plain),
            seed,
        )


def _joined(what: str, given: Group | None, kind: type[Group], plain: Mapping[str, Any]) -> Group:
    mine = {each.name: plain[each.name] for each in fields(kind) if each.name in plain}
    if given is not None and mine:
        name = next(iter(mine))
        raise UserError(
            f"{name} is given as a keyword, and {what} as a value that says {name}={getattr(given, name)!r}; "
            "say it in one of them"
        )
    return given if given is not None else replace(kind(), **mine)


def recomputed_and_swapped(recompute: Chosen, swap: Chosen, bounds: Bounds) -> tuple[frozenset[int], frozenset[int]]:
    """The layers that are recomputed, and those that are swapped."""
    again = _chosen("recompute", recompute, bounds, [end for _, end in bounds])
    kept = [end - sum(layer in again for layer in range(begin, end)) for begin, end in bounds]
    out = _chosen("swap", swap, bounds, kept)
    if both := sorted(again & out):
        raise UserError(f"layer {both[0]} is both recomputed and swapped; choose one")
    return again, out


def _chosen(name: str, chosen: Chosen, bounds: Bounds, ends: Sequence[int]) -> frozenset[int]:
    """The layers of a set, or of each stage ``int(ratio * n)`` layers that end where ``ends`` says."""
    if isinstance(chosen, set | frozenset):
        return frozenset(int(layer) for layer in chosen)
    ratios = [float(chosen)] * len(bounds) if isinstance(chosen, int | float) else [float(ratio) for ratio in chosen]
    if len(ratios) != len(bounds):
        raise UserError(
            f"{name} has {len(ratios)} ratios, but there are {len(bounds)} stages; give one number, or one a stage"
        )
    found: set[int] = set()
    for stage, (ratio, (begin, end), last) in enumerate(zip(ratios, bounds, ends, strict=True)):
        if not 0 <= ratio <= 1:
            raise UserError(f"the {name} ratio of stage {stage} is {ratio}; it must lie between 0 and 1")
        count = int(ratio * (end - begin))
        if count > last - begin:
            raise UserError(
                f"stage {stage} has {end - begin} layers, of which {end - last} are recomputed and {count} swapped; "
                "the two ratios must not add up to more than 1"
            )
        found |= set(range(last - count, last))
    return frozenset(found)


def stages_with(layers: Collection[int], bounds: Bounds) -> frozenset[int]:
    """The stages that hold any of the layers."""
    return frozenset(stage for stage, (begin, end) in enumerate(bounds) if any(begin <= l < end for l in layers))
