"""What a pipeline is told beside its model: plain keywords of ``Pipeline``, each with its type and default.

Which layers are kept, recomputed or swapped: the convention for ratios is ``recomputed_and_swapped``, here and nowhere
else:

    stage of n layers   kept … kept | swapped: int(swap · n) | recomputed: int(recompute · n)

VPipe recomputes the last ``int(r · n)`` layers of a stage; what is swapped lies before them. A set of layer indices
says the same for any layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypedDict

from torch import nn
from torch.optim import Optimizer

from vpipe.errors import UserError, nearest
from vpipe.registry import FORM_REGISTRY
from vpipe.runtime.updates.update import LossScale
from vpipe.schedule.catalog import ScheduleSpec
from vpipe.schedule.program import Program

Chosen = float | Sequence[float] | Collection[int]
"""A ratio for all stages, one for each stage, or a set of layers."""
Bounds = Sequence[tuple[int, int]]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


EngineMaker = Callable[..., Any]
"""Called as ``Engine`` is."""


@dataclass(frozen=True)
class Memory:
    """What a stage does not keep between forward and backward.

    ``recompute`` is the part of each stage's layers that is computed again (the last ones), one number or one a stage,
    or a set of layer indices; ``swap`` is the part (those before) whose saved tensors wait in a file instead of memory,
    in a temporary directory (``TMPDIR``).
    """

    recompute: Chosen = 0.0
    swap: Chosen = 0.0


class PlainKeywords(TypedDict, total=False):
    """The types of ``Pipeline``'s keywords; ``PipelineOptions`` has their defaults and meanings."""

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
    loss_scale: LossScale | None
    autocast: Callable[[], AbstractContextManager[Any]]
    num_ranks: int | None
    replicas: int | Sequence[int]
    transport: str
    device: str
    device_messages: bool
    timeout: float


@dataclass(frozen=True)
class PipelineOptions:
    """All that a pipeline is told beside its model.

    **Schedule.** ``schedule`` is one of the catalogue (``vpipe schedules``), a ``Program``, or a CSV file with one,
    torch's dumps included; or a ``ScheduleSpec``, which has its own numbers, options and replicas, and a program that
    is not built again. ``num_microbatches`` is the number of units of one ``train_step``: 4, or what the program has.
    ``partition`` is the number of layers of each stage; even if not given. ``executor``: "plain" (a rank's actions one
    after the other), "threaded" (a worker thread per microbatch, which take turns by ``priority``: none, first-hp, fifo
    or critical-path), or "auto" (threaded for the schedule ``async_threaded``).

    **Memory.** ``recompute`` and ``swap`` are those of ``Memory``.

    **Ranks.** Without a launcher, ``num_ranks`` ranks run as threads of this process. ``transport`` between processes:
    "shm" (shared memory where ranks are on one machine), "distributed" (TCP and gloo for all), or "auto" (shm if all
    ranks are on one machine). ``device`` is where the ranks compute: "cpu", an accelerator's type ("cuda": a device for
    every rank of a machine), one device for all of them ("cuda:0"), or "auto" (the accelerator where there is one).
    Between processes, tensors go by the device's own backend, or with ``device_messages=False`` through main memory.
    """

    schedule: str | Program | ScheduleSpec = "1f1b"
    seed: int = 0
    num_microbatches: int | None = None
    stages_per_rank: int | None = None
    partition: Sequence[int] | None = None
    schedule_options: Mapping[str, Any] | None = None
    executor: str = "auto"
    priority: str = "none"
    blocking: bool = False
    recompute: Chosen = 0.0
    swap: Chosen = 0.0
    optimizer: OptimizerFactory | None = None
    clip_norm: float | None = None
    skip_nonfinite: bool = True
    exact_reduction: bool = True
    loss_scale: LossScale | None = None
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    num_ranks: int | None = None
    replicas: int | Sequence[int] = 1
    transport: str = "auto"
    device: str = "cpu"
    device_messages: bool = True
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UserError(f"clip_norm is {self.clip_norm}; give a number above 0, or None, which clips nothing")

    @classmethod
    def of(cls, schedule: str | Program | ScheduleSpec, seed: int, plain: PlainKeywords) -> PipelineOptions:
        """From the keywords of ``Pipeline``."""
        known = PlainKeywords.__annotations__
        for name in plain:
            if name not in known:
                raise TypeError(f"Pipeline() got an unexpected keyword argument {name!r}{nearest(name, known)}")
        return cls(schedule, seed, **plain)

    @property
    def memory(self) -> Memory:
        """What is recomputed and swapped."""
        return Memory(self.recompute, self.swap)

    def workers(self, wants_threads: bool) -> EngineMaker | None:
        """What makes engines with worker threads, or ``None`` where a rank runs its actions one after the other."""
        if self.executor not in ("auto", "plain", "threaded"):
            raise UserError(f"there is no executor {self.executor!r}; give one of auto, plain, threaded")
        threaded = self.executor == "threaded" or (self.executor == "auto" and wants_threads)
        if not threaded and self.priority == "none":
            return None
        maker: EngineMaker = FORM_REGISTRY.create("worker threads", self.priority)
        if not threaded:
            raise UserError(
                f"priority {self.priority!r} orders worker threads, but the executor is plain; give "
                "executor='threaded', or priority='none'"
            )
        return maker


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
