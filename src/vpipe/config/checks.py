"""The rules between fields: what no single field can know.

A rule says which keys it reads, so that it stays silent about a config whose keys are already known to be wrong, and
names both values and a remedy. Rules that need the model or the schedule itself (block counts of other models, what a
schedule accepts) are checked by those, when they are built. Keys that are set but do nothing here are told as warnings
(``idle_keys``): an option that does nothing is a trap.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from vpipe.config.pipeline import OLDER_KEYS, PipelineConfig
from vpipe.config.problems import Key, Problem, short
from vpipe.config.sections import TrainingConfig
from vpipe.registry import SCHEDULE_REGISTRY

MAX_NESTING = 32


def check(config: PipelineConfig) -> list[Problem]:
    """Every broken rule."""
    rules = (_model, _plain_values, _batches, _learning_rate, _stages, _adapt, _replicas, _older_keys, _launch)
    return [problem for rule in rules for problem in rule(config)]


def _broken(text: str, key: str, *also: str) -> Problem:
    return Problem(text, tuple(key.split(".")), also=tuple(tuple(other.split(".")) for other in also))


def _model(config: PipelineConfig) -> Iterator[Problem]:
    model = config.model
    if model.vocab_size == 0:
        yield _broken("is 0 but must be -1 (ask the data set) or at least 1", "model.vocab_size")
    if model.name == "huggingface" and model.config is None and model.directory is None:
        yield _broken(
            "is null, but name: huggingface needs it; give a directory, a JSON file or {model_type: ...}",
            "model.config",
            "model.name",
            "model.directory",
        )
    for key in ("config", "directory"):
        if model.name != "huggingface" and getattr(model, key) is not None:
            text = f"is only read with name: huggingface, not with {model.name!r}; remove it"
            yield _broken(text, f"model.{key}", "model.name")
    if model.name == "huggingface":
        yield from _hugging_face(config)
    dropout = model.extra.get("dropout", 0)
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        yield _broken(f"has dropout {short(dropout)}, which must be a number from 0 to below 1", "model.extra")
    partition = config.parallel.partition
    if model.name == "bert" and isinstance(partition, tuple) and sum(partition) != 2 * model.num_layers + 1:
        yield _broken(
            f"adds up to {sum(partition)} blocks, but a BERT of {model.num_layers} layers has "
            f"2 x {model.num_layers} + 1 = {2 * model.num_layers + 1}; change one of the two",
            "parallel.partition",
            "model.num_layers",
            "model.name",
        )


def _hugging_face(config: PipelineConfig) -> Iterator[Problem]:
    """What a Hugging Face config says of itself, against the data: told here, before ranks start."""
    model, extra = config.model, config.dataset.extra
    key = "model.directory" if model.config is None else "model.config"
    given: Any = model.directory if model.config is None else model.config
    if isinstance(given, str):
        file = Path(given) / "config.json" if Path(given).is_dir() else Path(given)
        try:
            given = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return  # told with the file's name when the model is built
    if not isinstance(given, Mapping):
        return
    text = given.get("text_config") if isinstance(given.get("text_config"), Mapping) else given
    assert isinstance(text, Mapping)
    longest = next((text[name] for name in ("max_position_embeddings", "n_positions") if name in text), None)
    if isinstance(longest, int) and 0 < longest < model.sequence_length:
        yield _broken(
            f"is {model.sequence_length}, but the Hugging Face config has {longest} positions; set it to {longest} or "
            "less",
            "model.sequence_length",
            key,
        )
    known, wanted = text.get("vocab_size"), extra.get("vocab_size")
    if isinstance(known, int) and isinstance(wanted, int) and wanted > known:
        yield _broken(
            f"is {wanted}, but the Hugging Face config has a vocabulary of {known}; use the model's own tokenizer, or "
            "lower it",
            "dataset.extra.vocab_size",
            key,
        )


def _plain_values(config: PipelineConfig) -> Iterator[Problem]:
    """Free mappings hold what YAML and JSON can hold, so that the resolved config can be written and read back."""
    free = {
        "model.extra": config.model.extra,
        "model.config": config.model.config,
        "dataset.extra": config.dataset.extra,
        "parallel.schedule_options": config.parallel.schedule_options,
    }
    for key, value in free.items():
        odd = _not_plain(value, 0)
        if odd:
            yield _broken(f"holds {odd}; use words, finite numbers, true, false, null, lists and mappings", key)


def _not_plain(value: Any, depth: int) -> str:
    """What in ``value`` is not plain; empty where all is."""
    if depth > MAX_NESTING:
        return f"more than {MAX_NESTING} levels"
    if isinstance(value, dict):
        odd = next((short(key) for key in value if not isinstance(key, str)), "")
        return (
            f"the key {odd}"
            if odd
            else next(filter(None, (_not_plain(item, depth + 1) for item in value.values())), "")
        )
    if isinstance(value, list):
        return next(filter(None, (_not_plain(item, depth + 1) for item in value)), "")
    if value is None or isinstance(value, bool | str) or (isinstance(value, int) and abs(value) < 2**63):
        return ""
    return "" if isinstance(value, float) and isfinite(value) else short(value)


def _batches(config: PipelineConfig) -> Iterator[Problem]:
    training, dataset = config.training, config.dataset
    if dataset.max_tokens is None and dataset.batch_size < training.num_microbatches:
        yield _broken(
            f"is {dataset.batch_size}, which cannot be cut into training.num_microbatches = "
            f"{training.num_microbatches} units; raise it, or lower num_microbatches",
            "dataset.batch_size",
            "training.num_microbatches",
        )
    if training.max_iterations == 0:
        yield _broken("is 0 but must be -1 (no limit) or at least 1", "training.max_iterations")
    if training.evaluation_batches == 0:
        yield _broken(
            "is 0 but must be -1 (all) or at least 1; evaluation_interval: -1 turns evaluation off",
            "training.evaluation_batches",
        )
    if 0 < training.max_iterations <= training.profile_iteration:
        yield _broken(
            f"is {training.profile_iteration}, but the run ends after max_iterations = {training.max_iterations}; "
            f"the last iteration is {training.max_iterations - 1}",
            "training.profile_iteration",
            "training.max_iterations",
        )


def _learning_rate(config: PipelineConfig) -> Iterator[Problem]:
    training = config.training
    steps = training.learning_rate_steps
    if training.learning_rate_policy == "step" and not steps:
        yield _broken(
            "is empty, but learning_rate_policy: step needs it, such as [0.5, 0.8]",
            "training.learning_rate_steps",
            "training.learning_rate_policy",
        )
    if any(step <= 0 for step in steps) or any(later <= step for step, later in pairwise(steps)):
        yield _broken(f"is {short(list(steps))} but must rise and begin above 0", "training.learning_rate_steps")
    if training.minimum_learning_rate > training.learning_rate:
        yield _broken(
            f"is {training.minimum_learning_rate}, above learning_rate = {training.learning_rate}; lower it",
            "training.minimum_learning_rate",
            "training.learning_rate",
        )


def _stages(config: PipelineConfig) -> Iterator[Problem]:
    """Lists with one entry per stage have one length, and it fits the ranks."""
    parallel = config.parallel
    lists: dict[str, Sequence[float]] = {}
    for name in ("partition", "recompute", "swap", "replicas", "depths"):
        value = getattr(parallel, name)
        if isinstance(value, tuple):
            lists[name] = value
    for older in OLDER_KEYS:
        value = parallel.schedule_options.get(older.option)
        if isinstance(value, list | tuple):
            lists[f"schedule_options.{older.option}"] = value
    size, stages = parallel.model_parallel_size, config.num_stages
    for name, values in lists.items():
        key = f"parallel.{name}"
        others = ("parallel.model_parallel_size", "parallel.stages_per_rank", "parallel.scheduler")
        if stages is not None and len(values) != stages:
            yield _broken(f"has {len(values)} entries, but there are {stages} stages; give one per stage", key, *others)
        elif len(values) % size:
            yield _broken(
                f"has {len(values)} entries, but model_parallel_size is {size}; give one per stage", key, *others
            )
    lengths = {len(values) for values in lists.values() if len(values) % size == 0}
    if stages is None and len(lengths) > 1:
        told = ", ".join(f"{name} has {len(values)}" for name, values in lists.items())
        yield _broken(f"disagree on the number of stages: {told}", "parallel", *(f"parallel.{name}" for name in lists))
    yield from _recompute_and_swap(config)


def _recompute_and_swap(config: PipelineConfig) -> Iterator[Problem]:
    recompute, swap = config.parallel.recompute, config.parallel.swap
    count = max((len(value) for value in (recompute, swap) if isinstance(value, tuple)), default=1)
    ratios = [value if isinstance(value, tuple) else (value,) * count for value in (recompute, swap)]
    for stage, (again, out) in enumerate(zip(*ratios, strict=False)):
        if again + out > 1:
            yield _broken(
                f"is {out} and recompute is {again} at stage {stage}: together they are more than all of its blocks",
                "parallel.swap",
                "parallel.recompute",
            )
            return


def _adapt(config: PipelineConfig) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.memory is not None and parallel.adapt == "off":
        yield _broken(
            f"is {parallel.memory}, but adapt: off reads it nowhere; set adapt: on, or plan with 'vpipe plan --memory'",
            "parallel.memory",
            "parallel.adapt",
        )


def _replicas(config: PipelineConfig) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.replicas is not None and parallel.data_parallel_size not in (1, *_only(parallel.replicas)):
        yield _broken(
            f"is {short(list(parallel.replicas))}, but data_parallel_size is {parallel.data_parallel_size}; give one",
            "parallel.replicas",
            "parallel.data_parallel_size",
        )
    machines, elastic, num_ranks = config.launch.machines, config.launch.elastic, config.num_ranks
    if elastic and machines and len(machines) != int(elastic.split(":")[1]):
        yield _broken(
            f"lists {len(machines)} machines, but launch.elastic is {elastic}; one host:gpu for each rank of the most",
            "launch.machines",
            "launch.elastic",
        )
    elif machines and not elastic and len(machines) != num_ranks:
        yield _broken(
            f"lists {len(machines)} machines, but the pipeline has {num_ranks} ranks; one host:gpu per rank",
            "launch.machines",
            "parallel.model_parallel_size",
            "parallel.data_parallel_size",
            "parallel.replicas",
        )


def _only(values: Sequence[int]) -> set[int]:
    """The one value that all have, if they have one."""
    return set(values) if len(set(values)) == 1 else set()


def _older_keys(config: PipelineConfig) -> Iterator[Problem]:
    """Options of one schedule, given with another, would be read by nobody; of two values, one."""
    scheduler, chosen = config.parallel.scheduler, config.parallel.schedule_options
    for older in OLDER_KEYS:
        value = older.value(config)
        if value is not None and chosen.get(older.option, value) != value:
            yield _broken(
                f"has {older.option}: {chosen[older.option]}, but {older.key} is {value}; give one of them",
                "parallel.schedule_options",
                older.key,
            )
        if value is not None and SCHEDULE_REGISTRY.meant(scheduler) != older.scheduler:
            yield _broken(
                f"is an option of scheduler {older.scheduler}, but parallel.scheduler is {scheduler!r}; remove it",
                older.key,
                "parallel.scheduler",
            )


def _launch(config: PipelineConfig) -> Iterator[Problem]:
    if config.checkpoint.on_exit and config.launch.elastic is None:
        yield _broken(
            "is true, but only an elastic run keeps copies in memory that could be written; set launch.elastic too",
            "checkpoint.on_exit",
            "launch.elastic",
        )
    if config.launch.through == "srun" and config.launch.elastic is None:
        yield _broken(
            "is srun, but launch.elastic is null; a run of fixed ranks is started by srun itself: srun python -m vpipe "
            "train CONFIG",
            "launch.through",
            "launch.elastic",
        )
    container = config.launch.container
    if container.kind != "none" and container.image is None:
        yield _broken(
            f"is null, but kind is {container.kind}; name the image", "launch.container.image", "launch.container.kind"
        )
    if container.kind == "none" and (container.image or container.binds):
        yield _broken(
            "is none, but an image or binds are given; choose apptainer, docker, charliecloud or bubblewrap",
            "launch.container.kind",
            "launch.container.image",
            "launch.container.binds",
        )


def touches(problem: Problem, wrong: Sequence[Key]) -> bool:
    """Whether a rule read one of the keys that are wrong by themselves."""
    return any(key[: len(bad)] == bad for key in (problem.key, *problem.also) for bad in wrong)


MOMENTS = ("adam", "adamw", "lamb")
"""Optimizers that have two moments; one of a plugin gets ``optimizer_options`` instead."""


def idle_keys(config: PipelineConfig) -> list[str]:
    """One sentence per key that differs from its default and is read by nothing here."""
    training = config.training
    optimizer, policy = training.optimizer, training.learning_rate_policy
    read_by = {
        "momentum": (optimizer == "sgd", f"optimizer {optimizer}"),
        "betas": (optimizer in MOMENTS, f"optimizer {optimizer}"),
        "eps": (optimizer in MOMENTS, f"optimizer {optimizer}"),
        "learning_rate_degree": (policy == "polynomial", f"learning_rate_policy {policy}"),
        "learning_rate_steps": (policy == "step", f"learning_rate_policy {policy}"),
        "learning_rate_factor": (policy == "step", f"learning_rate_policy {policy}"),
        "minimum_learning_rate": (policy != "constant", "learning_rate_policy constant"),
        "loss_scale": (training.precision == "fp16", f"precision {training.precision}"),
        "exit_after_profile": (training.profile_iteration >= 0, "profile_iteration -1"),
        "evaluation_batches": (training.evaluation_interval >= 0, "evaluation_interval -1"),
    }
    defaults = {name: field.default for name, field in TrainingConfig.model_fields.items()}
    return [
        f"training.{name} has no effect with {reason}"
        for name, (is_read, reason) in read_by.items()
        if not is_read and getattr(training, name) != defaults[name]
    ]
