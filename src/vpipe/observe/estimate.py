"""What the planner makes of a run: its measured stage times, as a profile of its layers.

A run measures stages, a plan needs layers. Layers of one sort (names that differ in their number only) are taken to
cost the same wherever they stand; where the measured stages contradict that, or do not determine it, a stage's time is
spread evenly over its layers. Good enough to say what a better cut is worth; ``vpipe profile`` measures.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vpipe.plan.costs import LayerCost, Profile
from vpipe.plan.layout import PlannedLayout
from vpipe.plan.planner import Plan, plan
from vpipe.plan.predict import Machine, Pipe, Prediction, predict
from vpipe.rundir.reader import RunDirectory
from vpipe.schedule.timeline import Costs, StageCosts

TOLERANCE = 0.1
"""How far the stages may be from the sums of their sorts, as a share of the longest stage."""
EFFORT, PATIENCE = 0.3, 0.5
"""The planner's effort, and its seconds, while a page is waited for."""
KINDS = ("forward", "input_grad", "weight_grad", "step")

Array = npt.NDArray[np.float64]


def profile_of(run: RunDirectory, costs: Costs) -> Profile | None:
    """The layers of a run with the costs of ``calibrate``; ``None`` where run.json does not name them, or where stages
    have replicas, which the planner does not place."""
    names = [stage.layers for stage in run.stages]
    if not all(names) or run.program.placement.has_replicas:
        return None
    stages = np.array([[getattr(stage, kind) for kind in KINDS] for stage in costs.stages])
    layers = _layers(names, stages)
    sizes = [(stage.weight_bytes or 0) / len(held) for stage, held in zip(run.stages, names, strict=True)]
    found: list[LayerCost] = []
    for stage, held in enumerate(names):
        for name in held:
            forward, input_grad, weight_grad, update = (float(value) for value in layers[len(found)])
            size = round(sizes[stage])
            found.append(LayerCost(name, forward, input_grad, weight_grad, 0, 0, size, update=update))
    # An inner stage pays three of the planner's actions for each of its own: two of them are messages.
    return Profile(tuple(found), link_latency=costs.latency, action_overhead=costs.overhead / 3)


def _layers(names: Sequence[Sequence[str]], stages: Array) -> Array:
    """Per layer its costs: of its sort, or an even part of its stage."""
    sorts = sorted({_sort(name) for held in names for name in held})
    number = np.array([[sum(_sort(name) == sort for name in held) for sort in sorts] for held in names], float)
    if np.linalg.matrix_rank(number) == len(sorts):
        each = np.clip(np.linalg.lstsq(number, stages, rcond=None)[0], 0, None)
        off = np.abs(number @ each - stages).sum(axis=1)
        if off.max() <= TOLERANCE * stages.sum(axis=1).max():
            return np.array([each[sorts.index(_sort(name))] for held in names for name in held])
    return np.array([stages[stage] / len(held) for stage, held in enumerate(names) for _ in held])


def _sort(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def present(profile: Profile, run: RunDirectory) -> Prediction:
    """The run as it is, by the planner's own prediction: what candidates are compared with."""
    counts = [len(stage.layers) for stage in run.stages]
    pipe = Pipe.of(run.schedule, run.num_ranks, run.num_microbatches, _stages_per_rank(run))
    return predict(profile, PlannedLayout.of_counts(counts), pipe, Machine.of(run.num_ranks, None))


def candidate(profile: Profile, run: RunDirectory, **changes: Any) -> Plan:
    """The planner's best cut for this run with something changed: schedule, num_microbatches, stages_per_rank."""
    wanted: dict[str, Any] = {"schedule": run.schedule, "num_microbatches": run.num_microbatches} | changes
    if "schedule" not in changes:
        wanted.setdefault("stages_per_rank", _stages_per_rank(run))
    ranks = wanted.pop("num_ranks", run.num_ranks)
    return plan(profile, ranks, recompute=False, swap=False, effort=EFFORT, time_limit=PATIENCE, **wanted)


def stage_costs(profile: Profile, layout: PlannedLayout, costs: Costs, num_ranks: int) -> Costs:
    """What the stages of a layout cost in a simulation; activations in microbatches of a rank's share."""
    found = []
    for stage in range(layout.num_stages):
        layers = profile.layers[layout.cuts[stage] : layout.cuts[stage + 1]]
        forward, input_grad, weight_grad, step = (
            sum(getattr(layer, kind) for layer in layers) for kind in ("forward", "input_grad", "weight_grad", "update")
        )
        share = len(layers) * num_ranks / profile.num_layers
        found.append(StageCosts(forward, input_grad, weight_grad, recompute=forward, step=step, activations=share))
    return Costs(tuple(found), costs.latency, costs.overhead)


def _stages_per_rank(run: RunDirectory) -> int:
    return run.program.num_stages // run.num_ranks
