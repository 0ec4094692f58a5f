"""The sections of a first config for a model in a Python file of the user's own.

A file that registers a model is a plugin already. For any other, a second file is written that registers what the first
one defines, with random examples of the right shapes in place of data: it trains at once and shows what to replace."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from vpipe.cli.init import line, refuse_existing
from vpipe.errors import UserError
from vpipe.registry import DATASET_REGISTRY, MODEL_REGISTRY, load_plugins, loaded_plugin


def sections(file: Path, path: Path) -> tuple[str, str, str, list[str]]:
    """(model, dataset, plugins, notes)."""
    before = {*MODEL_REGISTRY}, {*DATASET_REGISTRY}
    load_plugins([str(file.resolve())])
    models = sorted({*MODEL_REGISTRY} - before[0])
    datasets = sorted({*DATASET_REGISTRY} - before[1])
    if models:
        listed = line("plugins", [file.name if file.parent.resolve() == path.parent.resolve() else str(file.resolve())])
        data = datasets[0] if datasets else "synthetic"
        comment = "" if datasets else "random tokens; or your own, which the file may register too"
        return (
            "model:\n" + line("name", models[0], f"registered by {file.name}") + "\n",
            "dataset:\n" + line("name", data, comment) + line("batch_size", 8) + "\n",
            listed[2:] + "\n",
            [],
        )
    module = loaded_plugin(str(file.resolve()))
    name, call = found_model(module, file)
    stem = re.sub(r"\W", "_", file.stem).strip("_").lower() or "model"
    written = path.parent / f"vpipe_{stem}.py"
    refuse_existing(written)
    shape, made_of = input_of(getattr(module, name), call)
    written.write_text(PLUGIN.format(stem=stem, file=file.stem, name=name, call=call, shape=shape, made=made_of))
    plugin = line("plugins", [written.name], f"registers the model of {file.name}, and examples to replace by yours")
    return (
        "model:\n" + line("name", stem) + "\n",
        "dataset:\n" + line("name", stem) + line("batch_size", 8) + "\n",
        plugin[2:] + "\n",
        [f"{written} is written: it registers {name} of {file.name}, with random examples; put your data there"],
    )


def found_model(module: ModuleType, file: Path) -> tuple[str, str]:
    """(name in the file, how it is called): the first sequence of modules, or what makes one without arguments."""
    from torch import nn

    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    for name, value in own.items():
        if is_sequence(value) and not isinstance(value, type):
            return name, ""
    for name, value in own.items():
        here = getattr(value, "__module__", None) == module.__name__
        if not here or not callable(value) or needs_arguments(value):
            continue
        if isinstance(value, type) and not issubclass(value, nn.Module):
            continue
        try:
            made = value()
        except Exception as error:
            raise UserError(f"{name}() of {file} fails: {type(error).__name__}: {error}") from error
        if is_sequence(made):
            return name, "()"
    raise UserError(
        f"{file} has no nn.Sequential, no list of modules, and no function or class without arguments that gives one; "
        "a pipeline cuts a list of layers: write the model as one, or register a ModelInterface (docs/from-ourgpipe.md)"
    )


def is_sequence(value: Any) -> bool:
    from torch import nn

    if isinstance(value, nn.Sequential):
        return len(value) > 0
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(item, nn.Module) for item in value)


def needs_arguments(value: Any) -> bool:
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def input_of(found: Any, call: str) -> tuple[str, str]:
    """(shape of one example, code that draws it), from the first module with weights."""
    from torch import nn

    layers = found() if call else found
    for module in (inner for layer in layers for inner in layer.modules()):
        if isinstance(module, nn.Linear):
            return f"({module.in_features},)", "torch.randn(*shape, generator=generator)"
        if isinstance(module, nn.Embedding):
            return "(16,)", f"torch.randint(0, {module.num_embeddings}, shape, generator=generator)"
        if isinstance(module, nn.Conv2d):
            return f"({module.in_channels}, 32, 32)", "torch.randn(*shape, generator=generator)"
        if isinstance(module, nn.Conv1d):
            return f"({module.in_channels}, 64)", "torch.randn(*shape, generator=generator)"
    raise UserError(
        "the model has no Linear, Embedding or Conv from which the shape of an input could be told; register a model "
        "and a data set of your own (docs/from-ourgpipe.md)"
    )


PLUGIN = '''\
"""Registers the model of {file}.py for vpipe, with random examples to replace by your own."""

import copy

import torch
from {file} import {name}
from torch import nn

from vpipe.interfaces import DatasetInterface, ModelInterface, StageInterface
from vpipe.registry import DATASET_REGISTRY, MODEL_REGISTRY, STAGE_REGISTRY

LAYERS = list({name}{call})


@MODEL_REGISTRY.register("{stem}")
class Model(ModelInterface):
    def get_model_config(self):
        return {{f"{{index}} {{type(layer).__name__}}": {{"index": index}} for index, layer in enumerate(LAYERS)}}

    def create_layer(self, layer_type, params):
        return copy.deepcopy(LAYERS[params["index"]])


@STAGE_REGISTRY.register("{stem}")
class Loss(StageInterface):
    def compute_loss(self, output, labels):
        return nn.functional.mse_loss(output, labels)  # your loss: the mean over the examples

    def count_targets(self, labels):
        return len(labels)


@DATASET_REGISTRY.register("{stem}")
class Examples(DatasetInterface):
    """Random inputs, and as labels what the untrained model makes of other ones. Put your own here."""

    def load_dataset(self):
        generator = torch.Generator().manual_seed(0)
        shape = {shape}
        inputs = [{made} for _ in range(256)]
        with torch.no_grad():
            labels = [nn.Sequential(*copy.deepcopy(LAYERS)).eval()(value[None])[0] + 1 for value in inputs]
        return list(zip(inputs, labels))

    def process_batch(self, batch):
        return {{"inputs": torch.stack([a for a, _ in batch]), "labels": torch.stack([b for _, b in batch])}}

    def get_vocab_size(self):
        return 1
'''
