"""From a Hugging Face object, config or directory to a ``Model``: which architectures there are, and what is refused
in words."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vpipe.errors import UserError, nearest
from vpipe.models.huggingface import decoders, encoders
from vpipe.models.huggingface.pieces import Piece, tied_weights, unshared
from vpipe.models.huggingface.source import Source
from vpipe.models.losses import IGNORED, PretrainingCount, PretrainingLoss, TokenCount, TokenLoss
from vpipe.models.model import Model, seed_layers, tie


@dataclass(frozen=True)
class Architecture:
    """A model class of the library, how it is cut, and what it is trained on."""

    name: str
    cut: Callable[[nn.Module], list[Piece]]
    task: str = "causal"
    """``causal``, ``pretraining`` (BERT's two losses) or ``translation`` (encoder and decoder)."""


ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture("GPT2LMHeadModel", decoders.gpt2),
    "llama": Architecture("LlamaForCausalLM", decoders.llama_family),
    "mistral": Architecture("MistralForCausalLM", decoders.llama_family),
    "qwen2": Architecture("Qwen2ForCausalLM", decoders.llama_family),
    "qwen3": Architecture("Qwen3ForCausalLM", decoders.llama_family),
    "olmo": Architecture("OlmoForCausalLM", decoders.llama_family),
    "olmo2": Architecture("Olmo2ForCausalLM", decoders.llama_family),
    "phi3": Architecture("Phi3ForCausalLM", decoders.llama_family),
    "smollm3": Architecture("SmolLM3ForCausalLM", decoders.llama_family),
    "bert": Architecture("BertForPreTraining", encoders.bert, "pretraining"),
    "bart": Architecture("BartForConditionalGeneration", encoders.bart, "translation"),
    "marian": Architecture("MarianMTModel", encoders.bart, "translation"),
    "t5": Architecture("T5ForConditionalGeneration", encoders.t5, "translation"),
}
"""By ``model_type`` of the config."""


def layers(model: nn.Module, *, sequence_length: int = 0, ignored: int | None = None) -> Model:
    """An untouched Hugging Face model as a ``Model``: its own modules, in place, tied weights declared.

    The parameters are the model's own, so that training moves them; a weight that is tied is copied for its second
    owner, and the copy stays equal. ``sequence_length`` 0 is the config's longest; ``ignored`` is the target that
    does not count."""
    config: Any = getattr(model, "config", None)
    architecture = architecture_of(config)
    if type(model).__name__ != architecture.name:
        raise UserError(
            f"a {type(model).__name__} cannot be cut into layers; of {config.model_type!r} models, load the weights as "
            f"{architecture.name}"
        )
    pieces = architecture.cut(model)
    tied = tied_weights(pieces, model)
    later: dict[int, list[str]] = {}
    for weight in tied:
        for layer, name in weight.owners[1:]:
            later.setdefault(layer, []).append(name)
    parts = [piece.make(model) for piece in pieces]
    parts = [unshared(part, later[index]) if index in later else part for index, part in enumerate(parts)]
    cut = [piece.layer(part) for piece, part in zip(pieces, parts, strict=True)]
    return described(architecture, config, sequence_length, ignored, layers=cut, tied=tied)


def from_config(
    config: Any,
    *,
    directory: str | Path | None = None,
    sequence_length: int = 0,
    ignored: int | None = None,
    dtype: str = "float32",
    seed: int = 0,
) -> Model:
    """A model that ``config`` describes: a mapping with ``model_type``, a config object, or a path of a config.json.

    New weights, or those of ``directory``. Only the owner of a layer builds it.
    """
    transformers = library()
    config = config_of(config)
    architecture = architecture_of(config)
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise UserError(f"model.dtype {dtype!r} is not a floating type; use float32, bfloat16 or float16")
    source = Source(
        getattr(transformers, architecture.name), config, None if directory is None else str(directory), kind
    )
    pieces = architecture.cut(source.skeleton)
    if directory is not None:
        _ = source.files  # a directory without weights is an error now, not on the last rank
    tied = tied_weights(pieces, source.skeleton)
    cut = seed_layers([piece.layer(partial(source.build, piece)) for piece in pieces], seed)
    if directory is None:
        cut = tie(cut, tied)
    return described(architecture, config, sequence_length, ignored, layers=cut, tied=tied)


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
    if vocab_size and isinstance(config, Mapping):
        config = {"vocab_size": vocab_size, **config}
    found = config_of(directory if config is None else config)
    if vocab_size > found.vocab_size:
        raise UserError(
            f"the data set has {vocab_size} tokens but the {found.model_type} config has vocab_size "
            f"{found.vocab_size}; "
            "use the checkpoint's own tokenizer, or raise vocab_size in the config"
        )
    return from_config(
        found, directory=directory, sequence_length=sequence_length, ignored=ignored, dtype=dtype, seed=seed
    )


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

    kind = values.get("model_type")
    if kind not in ARCHITECTURES:
        raise UserError(unknown_architecture(kind))
    rest = {key: value for key, value in values.items() if key != "model_type"}
    default = AutoConfig.for_model(kind)
    known = {*default.to_dict(), *default.attribute_map, "attn_implementation"}
    for key in rest:
        if closed and key not in known:
            raise UserError(f"model.config.{key} is not a setting of a {kind} config{nearest(key, known)}")
    try:
        return AutoConfig.for_model(kind, **rest)
    except Exception as error:
        raise UserError(f"the {kind} config cannot be used: {' '.join(str(error).split())}") from error


def architecture_of(config: Any) -> Architecture:
    kind = getattr(config, "model_type", None)
    if kind not in ARCHITECTURES:
        raise UserError(unknown_architecture(kind))
    return ARCHITECTURES[kind]


def unknown_architecture(kind: Any) -> str:
    known = ", ".join(ARCHITECTURES)
    return (
        f"model_type {kind!r} is not a Hugging Face architecture that vpipe can "
        f"cut{nearest(str(kind), ARCHITECTURES)}; "
        f"it can cut {known}"
    )


def described(architecture: Architecture, config: Any, sequence_length: int, ignored: int | None, **cut: Any) -> Model:
    """The ``Model`` around the layers: its loss by task, its sizes from the config."""
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 512
    length = sequence_length or longest
    if sequence_length > longest and architecture.name != "T5ForConditionalGeneration":
        raise UserError(
            f"model.sequence_length is {sequence_length} but the {config.model_type} config has {longest} positions"
        )
    loss: Any
    count: Any
    if architecture.task == "pretraining":
        loss, count = (
            PretrainingLoss(-1 if ignored is None else ignored),
            PretrainingCount(-1 if ignored is None else ignored),
        )
    else:
        padded = IGNORED if architecture.task == "causal" else config.pad_token_id
        value = padded if ignored is None else ignored
        loss, count = TokenLoss(value), TokenCount(value)
    attentions = config.num_hidden_layers
    if architecture.task == "translation":
        decoder_layers = getattr(config, "num_decoder_layers", None) or getattr(config, "decoder_layers", attentions)
        attentions += 2 * decoder_layers
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Model(
        loss=loss,
        count=count,
        sequence_length=length,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        attention_flops=12.0 * attentions * config.num_attention_heads * head_size * length,
        **cut,
    )
