"""The sections of a first config for a model of transformers. Nothing is downloaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vpipe.cli.init import line
from vpipe.errors import UserError, nearest

SMALL = {
    "vocab_size": 256, "hidden_size": 64, "n_embd": 64, "d_model": 64, "dim": 64, "num_hidden_layers": 4, "n_layer": 4,
    "n_layers": 4, "num_layers": 2, "num_decoder_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "num_key_value_heads": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "intermediate_size": 128, "hidden_dim": 128,
    "ffn_dim": 128, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "d_ff": 128, "d_kv": 16, "head_dim": 16,
    "max_position_embeddings": 128, "n_positions": 128, "num_local_experts": 4, "num_experts": 4,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "pad_token_id": 1, "bos_token_id": 0,
    "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
"""Sizes of a model to begin with, by the names that configs have for them."""

KINDS = {"causal": "gpt", "masked": "bert", "pretraining": "bert", "translation": "translation"}
"""Task → kind of synthetic data."""


def sections(given: str, path: Path) -> tuple[str, str, str, list[str]]:
    """(model, dataset, plugins, notes) for a directory, a model of the cache, or a type."""
    from vpipe.models.huggingface.architectures import architecture, model_types, task_of
    from vpipe.models.huggingface.entry import config_of, library, longest_sequence, made_config, setting

    transformers = library()
    place = local_directory(given)
    value: Any
    if place is not None:
        config = config_of(str(place))
        weights = any(place.glob("model*.safetensors"))
        key, value = ("directory" if weights else "config"), os.path.relpath(place, path.parent)
        comment = "its weights are read too, each rank its own" if weights else "new weights"
    else:
        if given not in model_types():
            raise UserError(
                f"{given} is no local directory with a config.json, not in the hub's cache here, and no type "
                f"of transformers; nothing is downloaded here, so get it first, such as with 'hf download {given}'"
                f"{nearest(given, model_types()) if '/' not in given else ''}"
            )
        values = small(transformers, given)
        config = made_config(values, closed=False)
        key, value, comment = "config", values, "new weights; any size"
    cls = architecture(transformers, config)
    task = task_of(empty(cls, config), config, None)
    if task.kind not in KINDS:
        raise UserError(
            f"a {cls.__name__} takes {', '.join(task.names)}, for which there is no built-in data set; "
            "docs/huggingface.md shows the data set file that it needs"
        )
    length = min(64, longest_sequence(config) or 64)
    vocabulary = setting(config.get_text_config(), "vocab_size")
    model = (
        "model:\n"
        + line("name", "huggingface", f"{cls.__name__}, cut at its own list of blocks")
        + line(key, value, comment)
        + line("sequence_length", length, f"at most {longest_sequence(config)}" if longest_sequence(config) else "")
        + "\n"
    )
    data = (
        "dataset:\n"
        + line("name", "synthetic", "random tokens, to see it run; then your own (see docs/huggingface.md)")
        + line("batch_size", 8)
        + line("extra", {"kind": KINDS[task.kind], "vocab_size": vocabulary, "num_examples": 256})
        + "\n"
    )
    return model, data, "", []


def small(transformers: Any, kind: str) -> dict[str, Any]:
    """A small config of a type: the sizes that it has a name for."""
    default = transformers.AutoConfig.for_model(kind)
    listed = default.to_dict()
    names = {default.attribute_map.get(name, name) for name in SMALL}
    return {"model_type": kind, **{name: SMALL[name] for name in SMALL if name in listed and name in names}}


def empty(cls: Any, config: Any) -> Any:
    import torch

    with torch.device("meta"):
        return cls(config)


def local_directory(given: str) -> Path | None:
    """The directory itself, or the newest snapshot of that model in the hub's cache on this machine."""
    place = Path(given).expanduser()
    if (place / "config.json").is_file():
        return place.resolve()
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE) / ("models--" + given.replace("/", "--")) / "snapshots"
    found = sorted(folder.glob("*/config.json"), key=lambda file: file.stat().st_mtime)
    return found[-1].parent if found else None
