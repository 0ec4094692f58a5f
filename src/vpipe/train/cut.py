"""How a config's model is cut into stages.

Which layers each stage holds, and what it recomputes or swaps, the config says, or the plan that it names. A plan is
for one schedule, one number of ranks and one number of microbatches: its memory was counted and its time predicted for
them. A config that names a plan and says something else is refused. What every layer weighs and works, the model's
skeleton says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vpipe.config import PipelineConfig
from vpipe.config.load import read_plan
from vpipe.errors import UserError
from vpipe.interfaces import ModelInterface, stage_sizes
from vpipe.layer import balanced
from vpipe.models.model import Skeleton
from vpipe.plan.layout import layout_from_json
from vpipe.plan.memory import Choice
from vpipe.registry import MODEL_REGISTRY
from vpipe.runtime.options import Chosen
from vpipe.schedule import catalog


@dataclass(frozen=True)
class Cut:
    """How a model is cut; what is recomputed and what is swapped is a share of each stage's layers, or a set of
    layers."""

    partition: list[int]
    recompute: Chosen
    swap: Chosen


def cut(config: PipelineConfig, skeleton: Skeleton, num_stages: int) -> Cut:
    """``auto`` balances the work that the layers' weights suggest; a list and a plan are taken as they are."""
    parallel = config.parallel
    if parallel.partition == "auto":
        sizes = _registered_cut(config, num_stages) or by_work(skeleton.work, skeleton.num_shards, num_stages)
        return Cut(sizes, parallel.recompute, parallel.swap)
    if isinstance(parallel.partition, str):
        return _planned(config, Path(parallel.partition), len(skeleton.modules))
    found = list(parallel.partition)
    if sum(found) != len(skeleton.modules):
        raise UserError(
            f"parallel.partition {found} holds {sum(found)} layers, but the model {config.model.name} has "
            f"{len(skeleton.modules)}; change one of them, or use partition: auto"
        )
    return Cut(found, parallel.recompute, parallel.swap)


def by_work(work: Sequence[float], num_shards: int, num_stages: int) -> list[int]:
    """Stages that work alike. Where each rank has a shard of the head, the second of its two stages holds it, and the
    first stages work alike."""
    if num_shards and num_stages == 2 * num_shards:
        return [*balanced(work[: -num_shards - 1], num_shards), *[1] * (num_shards - 1), 2]
    return balanced(work, num_stages)


def _registered_cut(config: PipelineConfig, num_stages: int) -> list[int] | None:
    """What ``get_stage_partition`` of a registered model says, where its author wrote one."""
    found: Any = MODEL_REGISTRY.get(config.model.name) if MODEL_REGISTRY.is_own(config.model.name) else None
    own = isinstance(found, type) and issubclass(found, ModelInterface)
    says = own and found.get_stage_partition is not ModelInterface.get_stage_partition
    return stage_sizes(found(config.model), num_stages) if says else None


def _planned(config: PipelineConfig, path: Path, num_layers: int) -> Cut:
    plan = read_plan(path)
    layout = layout_from_json(plan, str(path), num_layers)
    _agree(config, path, plan)
    for name in ("recompute", "swap"):
        own = getattr(config.parallel, name)
        if own and any(own if isinstance(own, tuple) else (own,)):
            raise UserError(
                f"parallel.{name} is {own}, but the plan {path} says what is done with each layer; "
                f"remove parallel.{name}"
            )
    recompute, swap = (
        {layer for stage in range(layout.num_stages) for layer in layout.layers(stage, choice)}
        for choice in (Choice.RECOMPUTE, Choice.SWAP)
    )
    return Cut(list(layout.counts), recompute, swap)


def _agree(config: PipelineConfig, path: Path, plan: dict[str, Any]) -> None:
    """What the plan was made for must be what the config runs."""
    schedule = plan.get("schedule")
    own = {
        "parallel.scheduler": catalog.get(config.parallel.scheduler).name,
        "parallel.model_parallel_size": config.parallel.model_parallel_size,
        "training.num_microbatches": config.training.num_microbatches,
        "parallel.replicas": list(
            config.parallel.replicas or (config.parallel.data_parallel_size,) * config.parallel.model_parallel_size
        ),
    }
    planned = {
        "parallel.scheduler": catalog.get(schedule).name if isinstance(schedule, str) else None,
        "parallel.model_parallel_size": plan.get("num_ranks"),
        "training.num_microbatches": plan.get("num_microbatches"),
        "parallel.replicas": plan.get("replicas") or None,
    }
    for key, value in planned.items():
        if value is not None and value != own[key]:
            raise UserError(
                f"the plan {path} is for {key} {value}, but the config says {own[key]}; set {key}={value}, plan anew, "
                f"or give its partition as a list: parallel.partition={plan['partition']}"
            )
