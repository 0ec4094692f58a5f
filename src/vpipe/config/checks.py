"""The rules between fields: what no single field can know.

A rule says which keys it reads, so that it stays silent about a config whose keys are already known to be wrong, and
names both values and a remedy. Rules that need the model or the schedule itself (block counts of other models, what a
schedule accepts) are checked by those, when they are built. Keys that are set but do nothing here are told as warnings
(``idle_keys``): an option that does nothing is a trap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import isfinite
from typing import Any

from vpipe.config.pipeline import PipelineConfig
from vpipe.config.problems import Key, Problem, short

MAX_NESTING = 32


def check(config: PipelineConfig) -> list[Problem]:
    """Every broken rule."""
    rules = (_model, _plain_values, _batches, _learning_rate, _stages, _replicas, _launch)
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
    dropout = model.extra.get("dropout", 0)
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        yield _broken(f"has dropout {short(dropout)}, which must be a number from 0 to below 1", "model.extra")
    partition = config.parallel.partition
    layers = model.num_layers or 24
    if model.name == "bert" and isinstance(partition, tuple) and sum(partition) != 2 * layers + 1:
        yield _broken(
            f"adds up to {sum(partition)} blocks, but a BERT of {layers} layers has "
            f"2 x {layers} + 1 = {2 * layers + 1}; change one of the two",
            "parallel.partition",
            "model.num_layers",
            "model.name",
        )


def _plain_values(config: PipelineConfig) -> Iterator[Problem]:
    """Free mappings hold what YAML and JSON can hold, so that the resolved config can be written and read back."""
    free = {
        "model.extra": config.model.extra,
        "model.config": config.model.config,
        "dataset.extra": config.dataset.extra,
        "parallel.schedule_options": config.parallel.schedule_options,
        "training.optimizer_options": config.training.optimizer_options,
        "training.parameter_groups": list(config.training.parameter_groups),
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


def _learning_rate(config: PipelineConfig) -> Iterator[Problem]:
    training = config.training
    for number, group in enumerate(training.parameter_groups):
        rate, frozen = group.get("learning_rate", 1.0), group.get("frozen", False)
        key = f"training.parameter_groups.{number}"
        if not isinstance(group.get("match"), str) or not group["match"] or "lr" in group or len(group) < 2:
            yield _broken("must have match, a pattern of names, and what is otherwise, such as weight_decay: 0", key)
        elif isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1e6:
            yield _broken(f"has learning_rate {short(rate)}, which must be a part of that of all, such as 0.1", key)
        elif not isinstance(frozen, int) or frozen < 0:
            yield _broken(f"has frozen {short(frozen)}, which must be true, false or a number of iterations", key)
        for name, most in (("layer_decay", 1), ("gradient_clipping", 1e9)):
            value = group.get(name, 1)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
                yield _broken(f"has {name} {short(value)}, which must be a number above 0, at most {most:g}", key)
    if "lr" in training.optimizer_options:
        yield _broken(
            f"has lr: {short(training.optimizer_options['lr'])}, but every update takes learning_rate = "
            f"{training.learning_rate}; give it there",
            "training.optimizer_options",
            "training.learning_rate",
        )
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
    for name in ("partition", "recompute", "swap", "replicas"):
        value = getattr(parallel, name)
        if isinstance(value, tuple):
            lists[name] = value
    if isinstance(depths := parallel.schedule_options.get("depths"), list):
        lists["schedule_options.depths"] = depths
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


def _replicas(config: PipelineConfig) -> Iterator[Problem]:
    parallel = config.parallel
    size = parallel.data_parallel_size
    if parallel.replicas is not None and size != 1 and set(parallel.replicas) != {size}:
        yield _broken(
            f"is {short(list(parallel.replicas))}, but data_parallel_size is {size}; give one",
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


def _launch(config: PipelineConfig) -> Iterator[Problem]:
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


def idle_keys(config: PipelineConfig) -> list[str]:
    """One sentence per key that differs from its default and is read by nothing here."""
    training, parallel, launch = config.training, config.parallel, config.launch
    policy = f"learning_rate_policy {training.learning_rate_policy}"
    replicas = max(parallel.replicas or (parallel.data_parallel_size,))
    evaluates = (config.checkpoint.best or "").startswith("evaluation")
    looks = training.evaluation_interval if evaluates else config.checkpoint.interval
    read_by = {
        "training.learning_rate_degree": (training.learning_rate_policy == "polynomial", policy),
        "training.learning_rate_steps": (training.learning_rate_policy == "step", policy),
        "training.learning_rate_factor": (training.learning_rate_policy == "step", policy),
        "training.minimum_learning_rate": (training.learning_rate_policy != "constant", policy),
        "training.loss_scale": (training.precision == "fp16", f"precision {training.precision}"),
        "training.exit_after_profile": (training.profile_iteration >= 0, "profile_iteration -1"),
        "training.evaluation_batches": (training.evaluation_interval >= 0, "evaluation_interval -1"),
        "training.nan_limit": (training.on_nan != "skip", "on_nan skip"),
        "dataset.batch_size": (config.dataset.max_tokens is None, f"max_tokens {config.dataset.max_tokens}"),
        "parallel.memory": (parallel.adapt != "off", "adapt off: plan with 'vpipe plan --memory'"),
        "parallel.exact_reduction": (replicas > 1, "one replica of every stage"),
        "launch.on_loss": (launch.elastic is not None, "launch.elastic null"),
        "checkpoint.on_exit": (launch.elastic is not None, "launch.elastic null"),
        "training.patience": (config.checkpoint.best is not None, "checkpoint.best null"),
        "checkpoint.best": (looks >= 0, f"{'evaluation_' if evaluates else 'checkpoint.'}interval -1"),
        "checkpoint.keep": (config.checkpoint.interval >= 0, "checkpoint.interval -1"),
        "checkpoint.blocking": (config.checkpoint.interval >= 0, "checkpoint.interval -1"),
    }
    return [
        f"{key} has no effect with {reason}"
        for key, (is_read, reason) in read_by.items()
        if not is_read and _differs(config, *key.split("."))
    ]


def _differs(config: PipelineConfig, section: str, name: str) -> bool:
    """Whether a value is not the default."""
    found = getattr(config, section)
    return bool(getattr(found, name) != type(found).model_fields[name].default)
