"""What only the model and the data together show, all of it at once, before a rank starts.

A config can be right field by field and still not train: ids that the vocabulary does not have, sequences longer than
the positions, labels that the loss cannot read, fewer layers than stages. Each would end a run after its start, one by
one. So the model is built here without storage, the first rows are read and sent through it by their shapes alone, and
the loss is asked with the real targets.

Only what is certain is told. A model or a data set whose own code fails here for another reason says so in the ranks,
with its traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from vpipe.config import PipelineConfig
from vpipe.config.problems import ConfigError, Key, Problem
from vpipe.data.dataset import Batch, DataSet
from vpipe.errors import UserError
from vpipe.layer import bind_inputs, input_names
from vpipe.models.losses import first_output, problem_of_loss
from vpipe.models.model import Model, Skeleton
from vpipe.registry import DATASET_REGISTRY, MODEL_REGISTRY, load_plugins
from vpipe.runtime.device import chosen
from vpipe.runtime.flow import resolve
from vpipe.runtime.updates.update import checked_scale
from vpipe.schedule.catalog import ScheduleSpec
from vpipe.schedule.placement import Layout, Placement
from vpipe.train import sizes
from vpipe.train.cut import Cut, cut
from vpipe.train.optimizers import loss_scale
from vpipe.train.session import (
    Materials,
    check_padding,
    check_vocabulary,
    feed_of,
    load_data,
    load_model,
    schedule_of,
    skeleton_of,
)
from vpipe.train.session import refuse as refuse_unsupported

T = TypeVar("T")
STAND_IN = 1 << 20
"""The vocabulary of data that could not be read: large, so that nothing is told of it."""
FEW_PARAMETERS = 1 << 22
"""Of a model that is built to be tried."""
TOKENS = ("tokens", "source", "target_in")
"""The inputs of our models that are looked up in a vocabulary."""


@dataclass
class Findings:
    """What is wrong so far, and what a session can be made of where nothing is."""

    problems: list[Problem] = field(default_factory=list)
    materials: Materials | None = None

    def attempt(self, action: Callable[[], T], *sections: str) -> T | None:
        """The result, or ``None`` with the sentence noted; ``sections`` are those of the config that it reads."""
        try:
            return action()
        except ConfigError as error:
            self.problems += error.problems
        except UserError as error:
            self.note(error.sentence, *sections)
        except Exception:
            return None  # the user's own code: the ranks show where
        return None

    def note(self, text: str, *sections: str, key: Key = ()) -> None:
        also: tuple[Key, ...] = tuple((section,) for section in sections)
        self.problems.append(Problem(text, key, also=also))


def refuse(config: dict[str, Any], parallel: bool = True) -> None:
    """Raise where the config cannot train, or its fewest or most ranks could not: asked by a process that ends with the
    answer."""
    checked = PipelineConfig.from_dict(config)
    elastic = parallel and checked.launch.elastic is not None
    if elastic:
        sizes.refuse_devices(checked)
    for each in sizes.all_of(checked) if elastic else [checked]:
        if found := check(each, parallel=parallel, ends=True).problems:
            raise ConfigError(found)


def check(config: PipelineConfig, *, parallel: bool = True, here: bool = True, ends: bool = False) -> Findings:
    """Every reason why the config cannot train, and what was gathered on the way. ``parallel`` asks for the stages too,
    ``here`` says that it would run on this machine; elsewhere, files that are not here are not asked for. ``ends``:
    this process does nothing else."""
    found = Findings()
    found.attempt(partial(load_plugins, config.plugins), "plugins")
    absent = set() if here else {key[0] for key, _ in missing_files(config)}
    data = None if "dataset" in absent else found.attempt(partial(load_data, config), "dataset", "model")
    vocab_size = data.vocab_size if data is not None else max(config.model.vocab_size, 0) or STAND_IN
    rows = model = skeleton = stages = None
    if data is not None:
        rows = found.attempt(partial(data.first, config.dataset.batch_size), "dataset", "model")
    if "model" not in absent:
        model = found.attempt(partial(load_model, config, vocab_size), "model", *(["dataset"] if data else []))
    if model is not None:
        skeleton = found.attempt(partial(skeleton_of, config, model), "model", "training")
    if parallel:
        stages = _stages(found, config, here, model, skeleton if "parallel" not in absent else None)
    if data is not None:
        size = model.vocab_size if model is not None else config.model.vocab_size
        found.attempt(partial(check_vocabulary, config, size, data), "model", "dataset")
        flops = skeleton.flops if skeleton is not None else None
        feed = found.attempt(partial(feed_of, config, data, model, flops=flops), "dataset", "training", "parallel")
        if model is not None and skeleton is not None:
            _together(found, config, data, rows, model, skeleton, ends)
            # Code of the user's own may remember that it was tried: a run makes its model and data anew.
            own = MODEL_REGISTRY.is_own(config.model.name) or DATASET_REGISTRY.is_own(config.dataset.name)
            if feed is not None and stages is not None and not own:
                found.materials = Materials(data, model, skeleton, *stages, feed)
        if feed is not None and (found.problems or found.materials is None):
            feed.close()
    found.problems = list({str(each): each for each in found.problems}.values())  # two steps may trip over one mistake
    return found


def missing_files(config: PipelineConfig) -> list[tuple[Key, str]]:
    """(key, path) of what the config reads and this machine does not have."""
    partition = config.parallel.partition
    named: dict[Key, Any] = {
        ("dataset", "path"): config.dataset.path,
        ("dataset", "extra", "path"): config.dataset.extra.get("path"),
        ("model", "directory"): config.model.directory,
        ("model", "config"): config.model.config,
        ("parallel", "partition"): partition if isinstance(partition, str) and partition != "auto" else None,
    }
    return [(key, path) for key, path in named.items() if isinstance(path, str) and not Path(path).exists()]


def _stages(
    found: Findings, config: PipelineConfig, here: bool, model: Model | None, skeleton: Skeleton | None
) -> tuple[ScheduleSpec, Cut] | None:
    """Whether there are ranks for the schedule, and the layers can be cut as it wants them; both, if so."""

    def placed() -> tuple[ScheduleSpec, Placement]:
        spec = schedule_of(config)
        return spec, spec.placement

    scale, made = loss_scale(config.training), None
    schedule = found.attempt(placed, "parallel", "training")
    if here:
        found.attempt(partial(refuse_unsupported, config), "parallel")
    if schedule is not None and skeleton is not None and model is not None:
        layers, (spec, placement) = model.layers, schedule
        made = found.attempt(partial(cut, config, skeleton, placement.num_stages), "parallel", "model", "training")
        if made is not None:
            partition = made.partition
            found.attempt(lambda: resolve(layers, Layout.of(partition, placement)), "parallel", "model")
    if schedule is not None:
        found.attempt(partial(checked_scale, scale, schedule[0].synchronous), "parallel", "training")
    if here:
        found.attempt(partial(chosen, config.parallel.device, 1, 0), "parallel")
    return (spec, made) if made is not None else None


def _together(
    found: Findings,
    config: PipelineConfig,
    data: DataSet,
    rows: Batch | None,
    model: Model,
    skeleton: Skeleton,
    ends: bool,
) -> None:
    """What the first rows show on their way through the model; a smaller vocabulary has been told already."""
    names = found.attempt(partial(input_names, model.layers), "model")
    if rows is None or names is None:
        return
    rows = Batch(model.given(*rows), rows.targets)
    built_in = not MODEL_REGISTRY.is_own(config.model.name)
    try:
        if built_in and isinstance(rows.inputs, Mapping) and not set(names) <= set(rows.inputs):
            given = ", ".join(map(str, rows.inputs))
            raise UserError(f"the model reads {', '.join(names)}, the data are {given}")
        values = bind_inputs(names, rows.inputs)
    except UserError as error:
        pair = f"the data set {config.dataset.name} does not fit the model {config.model.name}"
        found.note(f"{pair}: {error.sentence}", "model", "dataset")
        return
    if 0 < model.vocab_size < data.vocab_size or not _ids(found, config, rows, model):
        return
    small = ends and sum(skeleton.parameters) <= FEW_PARAMETERS
    modules = None if small else skeleton.modules  # built, which is quicker than shapes: these load 1.4 s of torch
    output = found.attempt(lambda: first_output(model, modules, values), "model", "dataset")
    if problem := problem_of_loss(model, rows.targets, output):
        found.note(
            f"the loss of the model {config.model.name} cannot use the targets of the data set {config.dataset.name} "
            f"{problem}; choose a data set for this model",
            "model",
            "dataset",
        )
    else:
        found.attempt(partial(check_padding, config, model, data), "model", "dataset")


def _ids(found: Findings, config: PipelineConfig, rows: Batch, model: Model) -> bool:
    """Whether the embedding has all ids of the first rows; a registered model may mean something else by integers."""
    if MODEL_REGISTRY.is_own(config.model.name) or model.vocab_size <= 0:
        return True
    before = len(found.problems)
    inputs = rows.inputs if isinstance(rows.inputs, Mapping) else {"tokens": rows.inputs}
    for name, ids in inputs.items():
        if name not in TOKENS or not isinstance(ids, Tensor) or ids.is_floating_point() or not ids.numel():
            continue
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= model.vocab_size:
            found.note(
                f"the data set {config.dataset.name} has the token id {low if low < 0 else high}, but the model's "
                f"vocabulary is {model.vocab_size} (ids 0 to {model.vocab_size - 1}); let the data set say how many it "
                "has, and set model.vocab_size: -1",
                "dataset",
                "model",
            )
    return len(found.problems) == before
