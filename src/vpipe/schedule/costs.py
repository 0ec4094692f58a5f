"""What actions cost: the numbers that turn an order into a timeline.

Times of a stage are its own. ``uniform`` takes the numbers that papers use, the time of one rank's whole share of a
microbatch, and divides them by the number of stages a rank holds for one direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from vpipe.errors import UserError
from vpipe.schedule.placement import Placement


@dataclass(frozen=True)
class StageCosts:
    """Time and memory of one stage for one unit."""

    forward: float
    input_grad: float
    weight_grad: float
    recompute: float = 0.0
    swap: float = 0.0
    """One way: the time that an OUT or an IN occupies the swap lane."""
    reduce: float = 0.0
    step: float = 0.0
    activations: float = 1.0
    """What a unit's forward saves until its backward."""
    kept: float = 0.0
    """What remains of it between F and R, or OUT and IN, where the program has them."""
    transfer: float = 0.0
    """The time a message that leaves the stage occupies its link."""
    transfer_back: float | None = None
    """The same for a gradient, which leaves over the link before the stage; ``None``: as ``transfer``."""
    latency: float | None = None
    """Of the link behind the stage, where links differ; ``None``: ``Costs.latency``."""
    latency_back: float | None = None
    """Of the link before the stage."""
    weights: float = 0.0
    """One version of the stage's weights."""


@dataclass(frozen=True)
class Costs:
    """Costs of every stage, and what a message or an action costs beside."""

    stages: tuple[StageCosts, ...]
    latency: float = 0.0
    """From the end of a send's transfer to the arrival: it delays and occupies nothing."""
    overhead: float = 0.0
    """Added to every compute action: what the runtime itself takes."""


def uniform(
    placement: Placement,
    *,
    forward: float = 1.0,
    input_grad: float = 1.0,
    weight_grad: float = 1.0,
    latency: float = 0.0,
    transfer: float = 0.0,
    overhead: float = 0.0,
    scale: Sequence[float] | None = None,
) -> Costs:
    """Every rank's share costs the same; its stages cost equal parts of it, times their factors in ``scale``."""
    given = locals()
    for name in ("forward", "input_grad", "weight_grad", "latency", "transfer", "overhead"):
        if not isfinite(given[name]) or given[name] < 0:
            raise UserError(f"--{name.replace('_', '-')} is {given[name]}, but a time is a finite number of at least 0")
    scale = [1.0] * placement.num_stages if scale is None else scale
    if len(scale) != placement.num_stages:
        raise UserError(f"--scale has {len(scale)} factors, but the program has {placement.num_stages} stages")
    for stage, factor in enumerate(scale):
        if not isfinite(factor) or factor < 0:
            raise UserError(f"--scale is {factor} for stage {stage}, but a factor is a finite number of at least 0")
    stages = []
    for stage in range(placement.num_stages):
        share = 1 / max(len(placement.stages_of[r]) / placement.num_directions(r) for r in placement.ranks_of[stage])
        stages.append(
            StageCosts(
                forward * share * scale[stage],
                input_grad * share * scale[stage],
                weight_grad * share * scale[stage],
                recompute=forward * share * scale[stage],
                activations=share,
                transfer=transfer,
                weights=share,
            )
        )
    return Costs(tuple(stages), latency, overhead)
