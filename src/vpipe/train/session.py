"""A config made real: its data, its model, its pipeline.

Every rank builds the same session; what a rank does not hold it does not build.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vpipe.config import PipelineConfig
from vpipe.data import catalog as data_catalog
from vpipe.data.dataset import DataSet
from vpipe.errors import UserError
from vpipe.interfaces import registered_dataset, registered_model
from vpipe.models import catalog as model_catalog
from vpipe.models.model import Model
from vpipe.registry import DATASET_REGISTRY, MODEL_REGISTRY
from vpipe.runtime import assembly
from vpipe.runtime.pipeline import Pipeline
from vpipe.schedule import catalog as schedule_catalog
from vpipe.train.balance import balanced, estimated_work
from vpipe.train.feed import Feed
from vpipe.train.optimizers import optimizer
from vpipe.train.precision import autocast, loss_scale


@dataclass
class Session:
    """What a run works with."""

    config: PipelineConfig
    data: DataSet
    model: Model
    pipeline: Pipeline
    feed: Feed

    @property
    def fingerprint(self) -> str:
        """What a checkpoint must share with the run that reads it: the model, not how it is spread."""
        section = {"model": self.config.model.model_dump(mode="json"), "vocab_size": self.model.vocab_size}
        text = json.dumps(section, sort_keys=True)
        return f"{self.config.model.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def load_data(config: PipelineConfig) -> DataSet:
    """The data set of a config: built in, or registered by the user."""
    section, length = config.dataset, config.model.sequence_length
    if section.name in DATASET_REGISTRY:
        return registered_dataset(section, length, config.training.seed)
    extra = dict(section.extra)
    if "test_size" in data_catalog.options(section.name):
        extra.setdefault("test_size", section.test_size)
    return data_catalog.load(
        section.name, path=section.path, sequence_length=length, seed=config.training.seed, extra=extra
    )


def load_model(config: PipelineConfig, vocab_size: int | None) -> Model:
    """The model of a config: built in, or registered by the user."""
    section, seed = config.model, config.training.seed
    if section.name in MODEL_REGISTRY:
        return registered_model(section, vocab_size, seed)
    known = inspect.signature(model_catalog.builder(section.name)).parameters
    return model_catalog.build(section.name, section.options(known), vocab_size=vocab_size, seed=seed)


def schedule_options(config: PipelineConfig) -> dict[str, Any]:
    """The options of the config that its schedule takes."""
    parallel, entry = config.parallel, schedule_catalog.get(config.parallel.scheduler)
    wanted: dict[str, Any] = {
        "num_waves": parallel.waves if parallel.waves != 1 else None,
        "vertical_sync": parallel.vertical_sync or None,
        "update_interval": config.training.update_interval if config.training.update_interval != 1 else None,
        "depths": parallel.depths,
    }
    chosen = {name: value for name, value in wanted.items() if value is not None}
    for name in chosen:
        if name not in entry.options:
            raise UserError(
                f"the schedule {entry.name} has no option {name}; remove it from the config, or choose another schedule"
            )
    return chosen


def layers_and_partition(
    config: PipelineConfig, model: Model, num_stages: int
) -> tuple[list[int], float | list[float] | set[int]]:
    """How many layers each stage holds, and what is recomputed."""
    parallel = config.parallel
    recompute: float | list[float] | set[int]
    recompute = parallel.recompute if isinstance(parallel.recompute, float | int) else list(parallel.recompute)
    if parallel.partition == "auto":
        return balanced(estimated_work(model), num_stages), recompute
    if isinstance(parallel.partition, str):
        plan = _read_plan(Path(parallel.partition))
        return list(plan["partition"]), set(plan["recompute"]) if "recompute" in plan else recompute
    return list(parallel.partition), recompute


def _read_plan(path: Path) -> Mapping[str, Any]:
    """A plan of ``vpipe plan``: its partition, and which layers it recomputes."""
    try:
        found = json.loads(path.read_text())
        choices = [choice for stage in found["stages"] for choice in stage["choices"]]
        return {
            "partition": [len(stage["choices"]) for stage in found["stages"]],
            "recompute": [layer for layer, choice in enumerate(choices) if choice == "recompute"],
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no plan of 'vpipe plan' ({type(error).__name__}: {error}); make it again") from None


def open_session(config: PipelineConfig, *, in_process: bool = False) -> Session:
    """Build everything that this rank needs."""
    data = load_data(config)
    model = load_model(config, data.vocab_size)
    parallel, training = config.parallel, config.training
    replicas: int | tuple[int, ...] = (
        parallel.replicas if parallel.replicas is not None else parallel.data_parallel_size
    )
    entry = schedule_catalog.get(parallel.scheduler)
    stages_per_rank = parallel.stages_per_rank
    num_stages = _num_stages(config)
    partition, recompute = layers_and_partition(config, model, num_stages)
    pipeline = Pipeline(
        model.layers,
        model.loss,
        schedule=parallel.scheduler,
        num_microbatches=training.num_microbatches,
        optimizer=optimizer(training),
        num_ranks=config.num_ranks,
        partition=partition,
        stages_per_rank=stages_per_rank,
        replicas=replicas,
        recompute=recompute,
        tied=model.tied,
        seed=training.seed,
        clip_norm=training.gradient_clipping or None,
        exact_reduction=parallel.exact_reduction,
        loss_scale=loss_scale(training),
        autocast=autocast(training),
        blocking=entry.blocking,
        transport=parallel.transport if assembly.under_launcher() else "auto",
        timeout=parallel.timeout,
        schedule_options=schedule_options(config),
    )
    del in_process
    num_replicas = replicas if isinstance(replicas, int) else 1
    feed = Feed(
        data,
        num_microbatches=training.num_microbatches,
        num_replicas=num_replicas,
        batch_size=config.dataset.batch_size,
        max_tokens=config.dataset.max_tokens,
        seed=training.seed,
        num_workers=config.dataset.num_workers,
    )
    return Session(config, data, model, pipeline, feed)


def _num_stages(config: PipelineConfig) -> int:
    """Ask the schedule itself, on a small program."""
    parallel = config.parallel
    replicas = {"replicas": parallel.replicas} if parallel.replicas is not None else {}
    program = schedule_catalog.build(
        parallel.scheduler,
        parallel.model_parallel_size,
        config.training.num_microbatches,
        parallel.stages_per_rank,
        **replicas,
        **schedule_options(config),
    )
    return program.num_stages
