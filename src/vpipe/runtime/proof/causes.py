"""What the first difference between a step and one process most likely means."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from vpipe.runtime.buffers import generators_of
from vpipe.runtime.proof.watch import Fact

if TYPE_CHECKING:
    from vpipe.runtime.pipeline import Pipeline


def likely(pipeline: Pipeline, fact: Fact, module: nn.Module | None, near: bool) -> str:
    """Why a fact differs, if nothing before it does; ``near``: in last bits."""
    parts = [part for part in module.modules() if fact.kind != "loss"] if module is not None else []
    if generators_of(parts) and fact.kind != "takes":
        return "it draws from a generator of its own"
    if fact.kind == "takes":
        stage = next(s for s, (begin, end) in enumerate(pipeline.flow.bounds) if begin <= fact.layer < end)
        return (
            f"stage {stage} begins here, so the value has changed on its way from another stage"
            if fact.layer == pipeline.flow.bounds[stage][0]
            else "it has changed between two layers of a stage: in place, or where recomputation or swapping begins"
        )
    if fact.kind == "gives":
        with_buffers = any(True for part in parts for _ in part.named_buffers(recurse=False))
        return (
            "its forward reads a buffer as another unit has left it" if with_buffers else
            "its weights are of another version, or it keeps something between units that is no buffer"
        )  # fmt: skip
    if fact.kind == "again":
        return "its forward reads what recomputation does not bring back; leave it out of `recompute`"
    if fact.kind == "loss":
        return "the layers give the same, so the loss function keeps something, or units are weighed in another way"
    if fact.kind == "gradient":
        return _of_gradient(pipeline, fact, near)
    return "its gradients are equal, so it is the update" if fact.kind == "weight" else "its forward ran too often"


def _of_gradient(pipeline: Pipeline, fact: Fact, near: bool) -> str:
    told = pipeline.builder.options
    names = {f"{layer}.{name}" for tie in pipeline.builder.parts.tied for layer, name in tie.owners}
    stage = next(
        (s for s, (_, end) in enumerate(pipeline.flow.bounds) if fact.layer < end), len(pipeline.partition) - 1
    )
    if not told.exact_reduction and near:
        return "exact_reduction is off, so replicas are summed in another order"
    if f"{fact.layer}.{fact.name}" in names:
        return "the weight is tied, and the sum over its owners differs"
    if near:
        return "its terms are added in another order: a value with several readers, or several threads"
    if stage in pipeline.programs.splits:
        return "the schedule splits its backward into I and W"
    return "its backward reads what a later unit has changed, or a contribution is missing"
