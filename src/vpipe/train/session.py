"""A config made real: its data, its model, how that is cut, its pipeline.

Every rank builds the same session; what a rank does not hold it does not build.

Which layers each stage holds, and what it recomputes or swaps, the config says, or the plan that it names. A plan is
for one schedule, one number of ranks and one number of microbatches: its memory was counted and its time predicted for
them. A config that names a plan and says something else is refused. What every layer weighs and works, the model's
skeleton says.

Words: docs/glossary.md.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vpipe.config import PipelineConfig
from vpipe.config.pipeline import OLDER_KEYS
from vpipe.data import dataset
from vpipe.data.dataset import DataSet
from vpipe.errors import UserError
from vpipe.interfaces import ModelInterface, registered_dataset, registered_model, stage_sizes
from vpipe.layer import balanced
from vpipe.models import model as models
from vpipe.models.model import Model, Skeleton
from vpipe.plan.layout import layout_from_json
from vpipe.plan.memory import Choice
from vpipe.process import under_launcher
from vpipe.registry import DATASET_REGISTRY, MODEL_REGISTRY, load_plugins
from vpipe.runtime.device import chosen as chosen_devices
from vpipe.runtime.device import is_host
from vpipe.runtime.options import Chosen, Memory, Ranks, Schedule, Update
from vpipe.runtime.pipeline import Pipeline
from vpipe.runtime.priorities.order import Backend
from vpipe.runtime.priorities.turns import take_turns
from vpipe.schedule import catalog
from vpipe.schedule.authors.authoring import BATCHES, REPLICAS, Chain
from vpipe.schedule.catalog import ScheduleSpec
from vpipe.train.feed import Feed, Position, Units
from vpipe.train.optimizers import autocast, compiled, loss_scale, optimizer


@dataclass
class Session:
    """What a run works with."""

    config: PipelineConfig
    data: DataSet
    model: Model
    skeleton: Skeleton
    pipeline: Pipeline
    feed: Feed
    device: Backend | None = None
    """Who orders the work on a device that ranks share."""
    epoch: int = 0
    """Of an elastic run: how often its ranks have met."""

    @property
    def reads_data(self) -> bool:
        """Whether this process holds an end of the pipeline."""
        return self.pipeline.is_first or self.pipeline.is_last

    @property
    def num_replicas(self) -> int:
        return num_replicas(self.config)

    def prepare(self, num_iterations: int = 1) -> int:
        """Make the pipeline ready for that many iterations at once; what ``train_step`` must be told as its number of
        microbatches: a synchronous schedule counts the units of one replica, an asynchronous one all, and 2BW those of
        one of its batches."""
        own = self.config.training.num_microbatches
        chains = self.pipeline.spec.chains
        if chains is Chain.BATCHES:
            self.pipeline.chain(num_iterations)
            return own
        return own * num_iterations * self.num_replicas if chains is Chain.UNITS else own

    def read(self, positions: Sequence[Position]) -> Units:
        """The units of these iterations; of a synchronous schedule each is an update of its own."""
        units = self.feed.read(positions)
        return replace(units, num_updates=len(positions)) if self.pipeline.synchronous else units

    def close(self) -> None:
        self.feed.close()
        if self.device is not None:
            self.device.close()


def num_replicas(config: PipelineConfig) -> int:
    """Replicas that read a batch each: where stages have different numbers of replicas, they share one batch."""
    replicas = config.parallel.replicas
    if replicas is None:
        return config.parallel.data_parallel_size
    return replicas[0] if len(set(replicas)) == 1 else 1


def load_data(config: PipelineConfig) -> DataSet:
    """The data set of a config: built in, or registered by the user."""
    section, length = config.dataset, config.model.sequence_length
    load_plugins(config.plugins)
    if DATASET_REGISTRY.is_own(section.name):
        return registered_dataset(section, length, config.training.seed)
    extra = dict(section.extra)
    if "test_size" in dataset.options(section.name):
        extra.setdefault("test_size", section.test_size)
    return dataset.load(section.name, path=section.path, sequence_length=length, seed=config.training.seed, extra=extra)


def load_model(config: PipelineConfig, vocab_size: int | None) -> Model:
    """The model of a config: built in, or registered by the user."""
    section, seed = config.model, config.training.seed
    load_plugins(config.plugins)
    if MODEL_REGISTRY.is_own(section.name):
        return registered_model(section, vocab_size, seed)
    known = inspect.signature(models.builder(section.name)).parameters
    return models.build(section.name, models.model_options(section, known), vocab_size=vocab_size, seed=seed)


def refuse(config: PipelineConfig) -> None:
    """Raise where the config asks for what this version cannot do: an option that is accepted and does nothing would be
    worse."""
    parallel = config.parallel
    entry = schedule_of(config).entry
    if parallel.backend == "nccl":
        _need_accelerator(parallel.device)
    if entry.chains is Chain.UNITS and config.training.gradient_accumulation != 1:
        raise UserError(
            f"training.gradient_accumulation is {config.training.gradient_accumulation}, but scheduler {entry.name} "
            "counts units: give parallel.schedule_options: {update_interval: N} instead"
        )
    alone = parallel.transport != "inprocess" and not parallel.use_orion_scheduler
    if parallel.priority != "none" and alone and not entry.runs_threads:
        raise UserError(
            f"parallel.priority {parallel.priority} orders work that shares a device, but here every rank is a process "
            "of its own; set parallel.transport: inprocess, or parallel.priority: none"
        )


def _need_accelerator(device: str) -> None:
    if is_host(chosen_devices(device, 1, 0)[0]):
        raise UserError(
            f"parallel.backend is nccl, but parallel.device {device} means the CPU here; run where torch finds an "
            "accelerator, or set parallel.backend: auto (--set parallel.backend=auto)"
        )


@dataclass(frozen=True)
class Materials:
    """What a session is made of: everything that a config says, but the pipeline."""

    data: DataSet
    model: Model
    skeleton: Skeleton
    spec: ScheduleSpec
    cut: Cut
    feed: Feed


def gather(config: PipelineConfig, data: DataSet | None = None) -> Materials:
    """All of it, or what is wrong first; ``data`` where it is loaded already."""
    load_plugins(config.plugins)
    refuse(config)
    data = data or load_data(config)
    model = load_model(config, data.vocab_size)
    _check_vocabulary(config, model, data)
    skeleton = Skeleton.of(config.model.name, model)
    spec = schedule_of(config)
    return Materials(
        data, model, skeleton, spec, cut(config, skeleton, spec.placement.num_stages), feed_of(config, data)
    )


def open_session(config: PipelineConfig, materials: Materials | None = None) -> Session:
    """Build everything that this rank needs; of ``materials`` where somebody has gathered them already."""
    made = materials or gather(config)
    parallel, training = config.parallel, config.training
    model, spec, chosen = made.model, made.spec, made.cut
    pipeline = Pipeline(
        compiled(model.layers, spec) if config.model.compile else model.layers,
        model.loss,
        schedule=Schedule(spec, partition=chosen.partition),
        memory=Memory(chosen.recompute, chosen.swap),
        update=Update(
            optimizer(training),
            clip_norm=training.gradient_clipping or None,
            exact_reduction=parallel.exact_reduction,
            early_reduction=parallel.early_reduction,
            loss_scale=loss_scale(training),
            autocast=autocast(training, parallel.device),
        ),
        ranks=Ranks(
            config.num_ranks,
            parallel.replicas or parallel.data_parallel_size,
            transport=parallel.transport if under_launcher() else "auto",
            device=parallel.device,
            device_messages=parallel.backend != "gloo",
            timeout=parallel.timeout,
        ),
        tied=model.tied,
        seed=training.seed,
    )
    device = None
    if parallel.priority != "none" or parallel.use_orion_scheduler:
        device = take_turns(
            pipeline.each_engine,
            parallel.priority,
            use_orion=parallel.use_orion_scheduler,
            num_microbatches=training.num_microbatches,
        )
    return Session(config, made.data, model, made.skeleton, pipeline, made.feed, device)


def _check_vocabulary(config: PipelineConfig, model: Model, data: DataSet) -> None:
    if 0 < model.vocab_size < data.vocab_size:
        raise UserError(
            f"model.vocab_size is {model.vocab_size}, but the data set {config.dataset.name} has {data.vocab_size} "
            "token ids; set model.vocab_size: -1 to ask the data set"
        )


def schedule_of(config: PipelineConfig) -> ScheduleSpec:
    """The schedule that the config's pipeline runs, with the options that ``parallel.schedule_options`` and older keys
    give: its entry says which it has, and its author what they may be. Nothing here knows an option's meaning."""
    parallel, num_readers = config.parallel, num_replicas(config)
    older = {each.option: each.value(config) for each in OLDER_KEYS}
    options = {name: value for name, value in older.items() if value is not None} | parallel.schedule_options
    for own in (BATCHES, REPLICAS):
        if own in options:
            raise UserError(
                f"parallel.schedule_options has {own}, which a run chooses itself (iterations between two drains, "
                "parallel.replicas); remove it"
            )
    return ScheduleSpec.of_run(
        parallel.scheduler,
        config.num_ranks,
        config.training.num_microbatches,
        parallel.stages_per_rank,
        parallel.replicas or parallel.data_parallel_size,
        options,
        num_readers,
    )


def feed_of(config: PipelineConfig, data: DataSet) -> Feed:
    """The units of the config's iterations."""
    return Feed(
        data,
        num_microbatches=config.training.num_microbatches,
        num_replicas=num_replicas(config),
        batch_size=config.dataset.batch_size,
        max_tokens=config.dataset.max_tokens,
        seed=config.training.seed,
        num_workers=config.dataset.num_workers,
    )


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
        sizes = _registered_cut(config, num_stages) or balanced(skeleton.work, num_stages)
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


def _registered_cut(config: PipelineConfig, num_stages: int) -> list[int] | None:
    """What ``get_stage_partition`` of a registered model says, where its author wrote one."""
    if not MODEL_REGISTRY.is_own(config.model.name):
        return None
    found = MODEL_REGISTRY.get(config.model.name)
    if not (isinstance(found, type) and issubclass(found, ModelInterface)):
        return None
    if found.get_stage_partition is ModelInterface.get_stage_partition:
        return None
    return stage_sizes(found(config.model), num_stages)


def read_plan(path: Path) -> dict[str, Any]:
    """The JSON of a plan."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"the plan {path} cannot be read: {error.strerror}; make it with 'vpipe plan'") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no plan, since it is not JSON ({error}); make it with 'vpipe plan'") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} is no plan, since it holds no object; make it with 'vpipe plan'")
    return found


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
