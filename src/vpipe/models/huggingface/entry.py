"""From a Hugging Face object, config or directory to a ``Model``, and what is refused in words."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vpipe.errors import UserError, nearest
from vpipe.layer import Layer, TiedWeight
from vpipe.models.huggingface.architectures import (
    architecture,
    examples,
    inner_model,
    model_types,
    task_of,
    unknown_type,
)
from vpipe.models.huggingface.cut import cut_frame, owned_paths
from vpipe.models.huggingface.part import Frame, Part
from vpipe.models.huggingface.pieces import Piece
from vpipe.models.huggingface.source import PieceBuilder
from vpipe.models.huggingface.tasks import ModelTask
from vpipe.models.model import Model, seed_layers, tie


def layers(
    model: nn.Module,
    *,
    example: Mapping[str, Tensor] | None = None,
    sequence_length: int = 0,
    ignored: int | None = None,
) -> Model:
    """An untouched Hugging Face model as a ``Model``: its own modules, in place, tied weights declared.

    The parameters are the model's own, so that training moves them; a weight that is tied is copied for its second
    owner, and the copy stays equal. With an ``example``, a batch of the forward's own arguments with labels, the
    layers take these arguments by name and the last one gives the model's own loss. ``sequence_length`` 0 is the
    config's longest; ``ignored`` is the target that does not count."""
    library()
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        config = getattr(inner_model(model), "config", None)
    if not hasattr(config, "get_text_config"):
        raise UserError(f"a {type(model).__name__} is no model of transformers: it has no config")
    frame = framed(model, config, example)
    cut, tied = cut_layers(frame)
    return described(frame.task, config, sequence_length, ignored, layers=cut, tied=tied)


def cut_layers(frame: Frame) -> tuple[list[Layer], tuple[TiedWeight, ...]]:
    """The pieces as layers with the model's own modules, and which of their weights are one."""
    own = [whole_part(frame, piece) for piece in frame.plan.pieces]
    tied = tied_weights(own)
    later: dict[int, set[int]] = {}
    for weight in tied:
        for layer, name in weight.owners[1:]:
            later.setdefault(layer, set()).add(id(own[layer].get_parameter(name)))
    parts = [unshared(part, later[index]) if index in later else part for index, part in enumerate(own)]
    return [described_layer(piece, part) for piece, part in zip(frame.plan.pieces, parts, strict=True)], tied


def framed(model: nn.Module, config: Any, example: Mapping[str, Tensor] | None) -> Frame:
    """The cut of ``model``, tried with the first inputs that it takes."""
    task = task_of(model, config, example)
    return tried(model, task, examples(model, config, task, example, longest_sequence(config) or 512))


def tried(model: nn.Module, task: ModelTask, tries: Sequence[tuple[Mapping[str, Tensor], ...]]) -> Frame:
    """The cut of ``model`` with the first of these inputs that it takes."""
    for attempt, given in enumerate(tries):
        try:
            return cut_frame(model, task, given)
        except UserError:
            raise
        except Exception as error:
            if attempt == len(tries) - 1:
                raise UserError(
                    f"a {type(model).__name__} cannot be cut: its forward, tried with {', '.join(given[0])}, failed "
                    f"with {type(error).__name__}: {' '.join(str(error).split())[:300]}"
                ) from error
    raise AssertionError


def whole_part(frame: Frame, piece: Piece) -> Part:
    """A part with the very modules and parameters of the model."""
    units = {path: frame.root.get_submodule(path) for path in owned_paths(frame.plan, piece)}
    raw = {path: frame.root.get_parameter(path) for path in piece.raw if not inside(path, units)}
    return Part(frame, piece, units, raw)


def inside(path: str, units: Mapping[str, nn.Module]) -> bool:
    return any(path.startswith(f"{unit}.") for unit in units)


def described_layer(piece: Piece, module: Any) -> Layer:
    return Layer(module, piece.reads, piece.writes, name=piece.name, cost_key=piece.cost_key)


def tied_weights(parts: Sequence[Part]) -> tuple[TiedWeight, ...]:
    """The parameters that appear in several parts."""
    owners: dict[int, list[tuple[int, str]]] = {}
    for index, part in enumerate(parts):
        for name, parameter in part.named_parameters():
            owners.setdefault(id(parameter), []).append((index, name))
    return tuple(TiedWeight(tuple(places)) for places in owners.values() if len(places) > 1)


def unshared(part: Part, copied: set[int]) -> Part:
    """The part with copies of the parameters ``copied``, the others being the same objects as before.

    Stages own their parameters: a tied weight is one parameter per owner, kept equal by summing gradients. In one
    process the original's shared parameter would be summed by autograd and again by the pipeline."""
    kept: dict[int, Any] = {id(value): value for value in part.buffers()}
    kept.update({id(value): value for value in part.parameters() if id(value) not in copied})
    kept.update({id(module.config): module.config for module in part.modules() if hasattr(module, "config")})
    return copy.deepcopy(part, kept)


def from_config(
    config: Any,
    *,
    directory: str | Path | None = None,
    sequence_length: int = 0,
    ignored: int | None = None,
    dtype: str = "float32",
    seed: int = 0,
    example: Mapping[str, Tensor] | None = None,
) -> Model:
    """A model that ``config`` describes: a mapping with ``model_type``, a config object, or a path of a config.json.

    New weights, or those of ``directory``. Only the owner of a layer builds it.
    """
    transformers = library()
    config = config_of(config)
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise UserError(f"model.dtype {dtype!r} is not a floating type; use float32, bfloat16 or float16")
    check_length(config, sequence_length)
    source = PieceBuilder(
        architecture(transformers, config), config, None if directory is None else str(directory), kind
    )
    frame = framed(source.skeleton, config, example)
    source.body, source.plan, source.task, source.solid = frame.body, frame.plan, frame.task, frame.stand_ins.solid
    if directory is not None:
        _ = source.tensors  # a directory without weights is an error now, not on the last rank
    tied = tied_weights([whole_part(frame, piece) for piece in frame.plan.pieces])
    pieces = frame.plan.pieces
    cut = seed_layers([described_layer(piece, partial(source.build, piece)) for piece in pieces], seed)
    if directory is None:
        cut = tie(cut, tied)
    return described(frame.task, config, sequence_length, ignored, layers=cut, tied=tied)


def from_directory(
    directory: str | Path,
    *,
    sequence_length: int = 0,
    ignored: int | None = None,
    dtype: str = "float32",
) -> Model:
    """The model of a local directory as ``save_pretrained`` writes it: config.json and safetensors."""
    return from_config(directory, directory=directory, sequence_length=sequence_length, ignored=ignored, dtype=dtype)


def huggingface(
    *,
    config: Any = None,
    directory: str | None = None,
    vocab_size: int = 0,
    sequence_length: int = 0,
    ignored: int | None = None,
    dtype: str = "float32",
    seed: int = 0,
) -> Model:
    """The catalog's entry: new weights from ``config``, or trained ones from ``directory``.

    ``vocab_size``, usually the data set's, fills a config that is a mapping without one and is checked against any
    other."""
    if config is None and directory is None:
        raise UserError("model.config is missing: give a mapping with model_type, or model.directory with a checkpoint")
    if vocab_size and isinstance(config, Mapping) and has_vocabulary(config.get("model_type")):
        config = {"vocab_size": vocab_size, **config}
    found = config_of(directory if config is None else config)
    known = setting(found.get_text_config(), "vocab_size")
    if known and vocab_size > known:
        raise UserError(
            f"the data set has {vocab_size} tokens but the {found.model_type} config has vocab_size {known}; "
            "use the checkpoint's own tokenizer, or raise vocab_size in the config"
        )
    padding = setting(found.get_text_config(), "pad_token_id")
    if known and padding and padding >= known:
        raise UserError(
            f"the {found.model_type} config has pad_token_id {padding}, but the vocabulary is {known}; set "
            "model.config.pad_token_id to the id that the data pad with (ours: 1)"
        )
    return from_config(
        found, directory=directory, sequence_length=sequence_length, ignored=ignored, dtype=dtype, seed=seed
    )


def has_vocabulary(kind: Any) -> bool:
    """Whether configs of this type have a ``vocab_size`` of their own: those of pictures have none."""
    from transformers import AutoConfig

    library()
    return kind in model_types() and "vocab_size" in AutoConfig.for_model(kind).to_dict()


def library() -> Any:
    """``transformers``, or the sentence that says how to get it."""
    try:
        import transformers
    except ImportError as error:
        raise UserError("Hugging Face models need transformers: pip install 'vpipe[huggingface]'") from error
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise UserError(
            f"transformers {transformers.__version__} is too old for model 'huggingface', which needs 5.0 or newer: "
            "pip install -U transformers"
        )
    if torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
        quiet: Any = transformers.logging.set_verbosity_error
        quiet()  # what it warns of, rank 0 says for all
    return transformers


def config_of(config: Any) -> Any:
    """A config object of a mapping, of a path of a config.json or its directory, or as it is."""
    if isinstance(config, str | Path):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise UserError(f"{path} does not exist; give a local directory with a config.json, nothing is downloaded")
        try:
            config = json.loads(path.read_text())
        except ValueError as error:
            raise UserError(f"{path} is not JSON: {error}") from error
        return made_config(config, closed=False)
    return made_config(config, closed=True) if isinstance(config, Mapping) else config


def made_config(values: Mapping[str, Any], closed: bool) -> Any:
    """The config object with these values; where ``closed``, a key that its class does not know is an error."""
    library()
    from transformers import AutoConfig

    kind: Any = values.get("model_type")
    if kind not in model_types():
        raise UserError(unknown_type(kind))
    rest = {key: value for key, value in values.items() if key != "model_type"}
    default = AutoConfig.for_model(kind)
    known = {*default.to_dict(), *default.attribute_map, *MORE_SETTINGS}
    for key in rest:
        if closed and key not in known and not read_by_code(kind, key):
            raise UserError(f"model.config.{key} is not a setting of a {kind} config{nearest(key, known)}")
    try:
        return AutoConfig.for_model(kind, **rest)
    except Exception as error:
        raise UserError(f"the {kind} config cannot be used: {' '.join(str(error).split())}") from error


MORE_SETTINGS = ("attn_implementation", "architectures", "num_labels", "id2label", "label2id", "problem_type")
"""Settings of every config that it does not list."""


def read_by_code(kind: str, key: str) -> bool:
    """Whether the library's code for this kind of model reads ``config.key``, though its config does not list it."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    module = model_type_to_module_name(kind)
    found = importlib.util.find_spec(f"transformers.models.{module}.modeling_{module}")
    if found is None or found.origin is None:
        return False
    code = Path(found.origin).read_text()
    return re.search(rf"config\.{re.escape(key)}\b|config, ['\"]{re.escape(key)}['\"]", code) is not None


def longest_sequence(config: Any) -> int:
    """How many positions the config has; 0 where it sets no limit."""
    text = config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_target_positions")
    return next((int(value) for name in names if (value := setting(text, name)) and value > 0), 0)


def setting(config: Any, name: str) -> Any:
    """A number of the config, 0 where it has none (or one per layer)."""
    try:
        value = getattr(config, name, 0)
    except Exception:
        return 0
    return value if isinstance(value, int | float) else 0


def check_length(config: Any, sequence_length: int) -> None:
    longest = longest_sequence(config)
    if longest and sequence_length > longest and config.model_type != "t5":
        raise UserError(
            f"model.sequence_length is {sequence_length} but the {config.model_type} config has {longest} positions"
        )


def described(task: ModelTask, config: Any, sequence_length: int, ignored: int | None, **cut: Any) -> Model:
    """The ``Model`` around the layers: its loss by task, its sizes from the config."""
    check_length(config, sequence_length)
    text = config.get_text_config()
    length = sequence_length or longest_sequence(config) or 512
    loss = task.loss(ignored)
    layers, decoder_layers = setting(text, "num_hidden_layers"), 0
    if task.kind == "translation":
        decoder_layers = setting(config, "num_decoder_layers") or setting(config, "decoder_layers") or layers
    heads, hidden = setting(text, "num_attention_heads"), setting(text, "hidden_size")
    head_size = setting(text, "head_dim") or setting(text, "d_kv") or (hidden // heads if heads else 0)
    width = 12.0 * heads * head_size
    return Model(
        loss=loss,
        sequence_length=length,
        vocab_size=setting(text, "vocab_size"),
        hidden_size=hidden,
        num_layers=int(layers),
        attention_flops=width * (layers + 2 * decoder_layers) * length,
        pair_flops=(width * layers, width * decoder_layers) if decoder_layers else (0.0, 0.0),
        experts_per_token=int(setting(text, "num_experts_per_tok")),
        **cut,
    )
