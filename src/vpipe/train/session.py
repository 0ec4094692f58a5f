"""A config made real: its data, its model, how that is cut, its pipeline.

Every rank builds the same session; what a rank does not hold it does not build.

Words: docs/glossary.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vpipe.config import PipelineConfig
from vpipe.data import dataset
from vpipe.data.dataset import DataSet
from vpipe.data.facts import OF_A_RANK, Facts, differences, facts_of
from vpipe.data.tokenizer import FILE_NAME
from vpipe.errors import UserError
from vpipe.interfaces import registered_dataset, registered_model
from vpipe.models.model import Model, Skeleton
from vpipe.models.split_head import split_head, why_not
from vpipe.process import under_launcher
from vpipe.registry import DATASET_REGISTRY, FORM_REGISTRY, OPTIMIZER_REGISTRY, load_plugins
from vpipe.runtime import assembly
from vpipe.runtime.device import chosen as chosen_devices
from vpipe.runtime.device import is_host
from vpipe.runtime.microbatches import Microbatches, UnitsDiffer
from vpipe.runtime.pipeline import Pipeline
from vpipe.schedule.authors.authoring import BATCHES, REPLICAS, Chain
from vpipe.schedule.catalog import ScheduleSpec
from vpipe.train.cut import Cut, by_work, cut
from vpipe.train.feed import Feed, Mine, Position
from vpipe.train.groups import check_groups, grouped
from vpipe.train.optimizers import autocast, compiled, loss_scale, optimizer
from vpipe.train.units import Units

ONE = ", or set dataset.read_by: one, so that one rank reads for all"


@dataclass
class Session:
    """What a run works with."""

    config: PipelineConfig
    data: DataSet
    model: Model
    skeleton: Skeleton
    pipeline: Pipeline
    feed: Feed
    device: Any = None
    """Who orders the work on a device that ranks share."""
    losses: int = 0
    """Ranks that this run has lost."""
    epoch: int = 0
    """Of an elastic run: how often its ranks have met."""

    @property
    def reads_data(self) -> bool:
        """Whether this process reads batches: it holds an end of the pipeline, or it leads, and tells how many tokens
        and targets there were. (Which stages the leader holds is the layout's choice.)"""
        return self.pipeline.is_first or self.pipeline.is_last or self.pipeline.is_leader

    def prepare(self, num_iterations: int = 1) -> int:
        """Make the pipeline ready for that many iterations at once; what ``train_step`` must be told as its number of
        microbatches: a synchronous schedule counts the units of one replica, an asynchronous one all, and 2BW those of
        one of its batches."""
        own = self.config.training.num_microbatches
        chains = self.pipeline.spec.chains
        if chains is Chain.BATCHES:
            self.pipeline.chain(num_iterations)
            return own
        return own * num_iterations * num_replicas(self.config) if chains is Chain.UNITS else own

    def units(self, feed: Feed, positions: Sequence[Position]) -> Units | None:
        """The units of these iterations, where this process needs them. Every rank calls this."""
        pipeline = self.pipeline
        if self.config.dataset.read_by == "one":
            read = feed.read(positions) if pipeline.is_leader else Units(())
            transport = None if pipeline.in_process else pipeline.transport
            return Units.of_message(assembly.told_by_leader(transport, read.message()))
        if mine := self._mine():
            read = feed.read(positions, mine)
            return read.completed(pipeline.gather_numbers([n for unit in read.batches for n in unit.counts]))
        return feed.read(positions) if self.reads_data else None

    def _mine(self) -> Mine:
        """Which units of an iteration this rank reads: those that it runs at an end. Empty where it reads all or none:
        without replicas, or where their turns do not end with an iteration."""
        pipeline, count = self.pipeline, self.config.training.num_microbatches * num_replicas(self.config)
        held = pipeline.layout.placement
        ends = (0, held.num_stages - 1)
        turns = {held.num_replicas(end) for end in ends}
        if pipeline.in_process or turns == {1} or any(count % each for each in turns):
            return ()
        return tuple(any(held.rank(end, microbatch) == pipeline.rank for end in ends) for microbatch in range(count))

    def read(self, positions: Sequence[Position]) -> Units | None:
        """The same of the training data; of a synchronous schedule each iteration is an update of its own."""
        units = self.units(self.feed, positions)
        if units is None or not self.pipeline.synchronous:
            return units and replace(units, alone=True)
        return replace(units, num_updates=len(positions))

    @cached_property
    def data_facts(self) -> Facts:
        """What tells the data from others, as far as this process reads them."""
        section = self.config.dataset
        own = DATASET_REGISTRY.is_own(section.name)  # which files it reads, it alone knows
        path = None if own else section.path or section.extra.get("path")
        sampled = section.read_by == "each" or self.pipeline.is_leader
        return facts_of(self.data, self.config.model.sequence_length, Path(path) if path else None, sampled)

    def check_data(self) -> None:
        """Refuse to begin where ranks have loaded other data. Every rank calls this."""
        told = [json.loads(each) for each in self.pipeline.gather(json.dumps(dict(self.data_facts)))]
        for rank, facts in enumerate(told):
            if found := differences(told[0], facts, OF_A_RANK):
                raise UserError(
                    f"ranks 0 and {rank} have loaded different data: {', '.join(found)}; {_why(self.config)}"
                )

    def train_step(self, units: Units | None, **options: Any) -> float:
        """``Pipeline.train_step`` on these units."""
        with self._same_units(units):
            return self.pipeline.train_step(*_ends(units), **options)

    def evaluate(self, units: Units | None) -> float:
        """``Pipeline.evaluate`` of these units."""
        with self._same_units(units):
            return self.pipeline.evaluate(*_ends(units))

    @contextmanager
    def _same_units(self, units: Units | None) -> Iterator[None]:
        """Around a step: where the ends of the pipeline have read different units, say what differs, and why."""
        try:
            yield
        except UnitsDiffer as error:
            mine = units.batches[error.microbatch].checksums if units is not None else {}
            told = [json.loads(each) for each in self.pipeline.gather(json.dumps(mine))]
            known = [(rank, each) for rank, each in enumerate(told) if each]
            differing = [each for each in known[1:] if each[1] != known[0][1]]
            if not differing:
                raise
            (first, one), (second, other) = known[0], differing[0]
            names = [name for name in one if one[name] != other.get(name)] or sorted(other.keys() - one.keys())
            raise UserError(
                f"ranks {first} and {second} have read different data for microbatch {error.microbatch}: {names[0]} is "
                f"not the same, {len(names)} of {len(one | other)} differ; {_why(self.config)}"
            ) from None

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


def _ends(units: Units | None) -> tuple[Microbatches | None, Microbatches | None]:
    return (units.inputs(), units.targets()) if units is not None else (None, None)


def _why(config: PipelineConfig) -> str:
    """What makes two processes read other data."""
    if DATASET_REGISTRY.is_own(config.dataset.name):
        return (
            f"the data set {config.dataset.name} gives other examples or random numbers in another process (the order "
            "of a set, a generator with a seed of the clock, a file that changes; torch's, numpy's and Python's own "
            f"generators are seeded for every unit): make it give the same{ONE}"
        )
    return f"the files under {config.dataset.path} are not the same for all ranks: copy them again" + ONE


def load_data(config: PipelineConfig) -> DataSet:
    """The data set of a config: built in, or registered by the user."""
    section, length = config.dataset, config.model.sequence_length
    load_plugins(config.plugins)
    if DATASET_REGISTRY.is_own(section.name):
        with dataset.seeded(section.split_seed):
            rows = section.batch_size * num_replicas(config) if config.training.max_iterations > 0 else 0
            return registered_dataset(section, length, section.split_seed, rows)
    extra = dict(section.extra)
    options = dataset.options(section.name)
    if "test_size" in options:
        extra.setdefault("test_size", section.test_size)
    for place in (config.model.directory, config.model.config):  # a model's own tokenizer knows what its ids mean
        own = Path(place) / FILE_NAME if isinstance(place, str) else None
        if own is not None and own.is_file() and "tokenizer" in options and extra.get("tokenizer", "auto") == "auto":
            extra["tokenizer"] = str(own)
    return dataset.load(section.name, path=section.path, sequence_length=length, seed=section.split_seed, extra=extra)


def load_model(config: PipelineConfig, vocab_size: int | None) -> Model:
    """The model of a config: built in, or registered by the user."""
    load_plugins(config.plugins)
    model = registered_model(config.model, vocab_size, config.training.seed)
    return grouped(
        split_head(model, config.parallel.model_parallel_size) if splits_head(config, model) else model, config.training
    )


def splits_head(config: PipelineConfig, model: Model) -> bool:
    """Whether the head is cut: ``auto`` does it where the rank that works most then works less, by the weights."""
    if config.model.split_head != "auto":
        return config.model.split_head
    num_ranks, placement = config.parallel.model_parallel_size, schedule_of(config).placement
    if placement.num_stages != 2 * num_ranks or why_not(model, num_ranks):
        return False

    def most(model: Model) -> float:
        skeleton = Skeleton.of(config.model.name, model)
        first, work = 0, [0.0] * num_ranks
        for stage, count in enumerate(by_work(skeleton.work, skeleton.num_shards, placement.num_stages)):
            work[placement.ranks_of[stage][0] % num_ranks] += sum(skeleton.work[first : first + count])
            first += count
        return max(work)

    return most(split_head(model, num_ranks)) < 0.98 * most(model)


def skeleton_of(config: PipelineConfig, model: Model) -> Skeleton:
    """Its names, shapes and sizes; refused where the config names parameters that it does not have."""
    skeleton = Skeleton.of(config.model.name, model)
    check_groups(skeleton, config.training)
    return skeleton


def refuse(config: PipelineConfig) -> None:
    """Raise where the config asks for what this version cannot do: an option that is accepted and does nothing would be
    worse."""
    parallel = config.parallel
    entry = schedule_of(config).entry
    if not OPTIMIZER_REGISTRY.is_own(config.training.optimizer):
        optimizer(config.training)([nn.Parameter(torch.zeros(1))])
    if parallel.backend == "nccl" and is_host(chosen_devices(parallel.device, 1, 0)[0]):
        raise UserError(
            f"parallel.backend is nccl, but parallel.device {parallel.device} means the CPU here; run where torch "
            "finds an accelerator, or set parallel.backend: auto (--set parallel.backend=auto)"
        )
    if entry.asynchronous and config.training.gradient_accumulation != 1:
        units = entry.chains is Chain.UNITS
        why = "counts units" if units else "updates with every batch, by the weights of the one before"
        remedy = "give parallel.schedule_options: {update_interval: N}" if units else "raise dataset.batch_size"
        raise UserError(
            f"training.gradient_accumulation is {config.training.gradient_accumulation}, but scheduler {entry.name} "
            f"{why}: {remedy} instead"
        )
    alone = parallel.transport != "inprocess" and not parallel.use_orion_scheduler
    if parallel.priority != "none" and alone and not entry.runs_threads:
        raise UserError(
            f"parallel.priority {parallel.priority} orders work that shares a device, but here every rank is a process "
            "of its own; set parallel.transport: inprocess, or parallel.priority: none"
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
    check_vocabulary(config, model.vocab_size, data)
    check_padding(config, model, data)
    skeleton = skeleton_of(config, model)
    spec = schedule_of(config)
    chosen = cut(config, skeleton, spec.placement.num_stages)
    return Materials(data, model, skeleton, spec, chosen, feed_of(config, data, model, flops=skeleton.flops))


def open_session(config: PipelineConfig, materials: Materials | None = None) -> Session:
    """Build everything that this rank needs; of ``materials`` where they are gathered already."""
    made = materials or gather(config)
    parallel, training = config.parallel, config.training
    model, spec, chosen = made.model, made.spec, made.cut
    pipeline = Pipeline(
        compiled(model.layers, spec) if config.model.compile else model.layers,
        model.loss,
        schedule=spec,
        partition=chosen.partition,
        recompute=chosen.recompute,
        swap=chosen.swap,
        optimizer=optimizer(training),
        clip_norm=training.gradient_clipping or None,
        exact_reduction=parallel.exact_reduction,
        loss_scale=loss_scale(training),
        autocast=autocast(training, parallel.device),
        num_ranks=config.num_ranks,
        replicas=parallel.replicas or parallel.data_parallel_size,
        transport=parallel.transport if under_launcher() else "auto",
        device=parallel.device,
        device_messages=parallel.backend != "gloo",
        timeout=parallel.timeout,
        tied=model.tied,
        seed=training.seed,
    )
    device = None
    if parallel.priority != "none" or parallel.use_orion_scheduler:
        device = FORM_REGISTRY.create(
            "turns",
            pipeline.each_engine,
            parallel.priority,
            use_orion=parallel.use_orion_scheduler,
            num_microbatches=training.num_microbatches,
        )
    return Session(config, made.data, model, made.skeleton, pipeline, made.feed, device)


def check_vocabulary(config: PipelineConfig, size: int, data: DataSet) -> None:
    """Refuse ids that a model with a vocabulary of this ``size`` does not have."""
    if 0 < size < data.vocab_size:
        raise UserError(
            f"model.vocab_size is {size}, but the data set {config.dataset.name} has {data.vocab_size} "
            "token ids; set model.vocab_size: -1 to ask the data set"
        )


def check_padding(config: PipelineConfig, model: Model, data: DataSet) -> None:
    """Refuse padding that the model would train on."""
    ignored = getattr(model.loss, "ignored", data.ignore_index)
    if ignored != data.ignore_index and not DATASET_REGISTRY.is_own(config.dataset.name):
        raise UserError(
            f"the data set {config.dataset.name} marks what does not count with {data.ignore_index}, but the loss of "
            f"the model {config.model.name} ignores {ignored} and would train on it; give the model its own "
            f"(huggingface: model.config.pad_token_id: {data.ignore_index}, or model.extra.ignored)"
        )


def schedule_of(config: PipelineConfig) -> ScheduleSpec:
    """The schedule that the config's pipeline runs, with the options that ``parallel.schedule_options`` gives: its
    entry says which it has, and its author what they may be. Nothing here knows an option's meaning."""
    parallel, num_readers = config.parallel, num_replicas(config)
    for own in (BATCHES, REPLICAS):
        if own in parallel.schedule_options:
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
        parallel.schedule_options,
        num_readers,
    )


def feed_of(config: PipelineConfig, data: DataSet, model: Model | None, **options: Any) -> Feed:
    """The units of the config's iterations; without a model they can only be planned."""
    training, section = config.training, config.dataset
    if model is not None:
        options |= {"given": model.given, "apart": model.count_apart}
    options = {"seed": training.seed, "num_workers": section.num_workers, **options}
    return Feed(
        data,
        model.count if model is not None else len,
        num_microbatches=training.num_microbatches,
        num_replicas=num_replicas(config),
        batch_size=section.batch_size,
        max_tokens=section.max_tokens,
        **options,
    )
