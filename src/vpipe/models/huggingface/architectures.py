"""Which class of the library a config means, what that class is trained on, and inputs to try it with."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vpipe.errors import UserError, nearest
from vpipe.models.huggingface.cut import varied
from vpipe.models.huggingface.tasks import ModelTask

MAPPINGS = (
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
)
"""The library's tables of classes by model_type; the first that has a type decides, unless the config names its class
in ``architectures``."""


def architecture(transformers: Any, config: Any) -> type[nn.Module]:
    """The class of a config: the one that it names, or the usual one for its type."""
    named = (getattr(config, "architectures", None) or [None])[0]
    if named is not None:
        found = getattr(transformers, named, None)
        if found is None:
            raise UserError(
                f"architectures names {named!r}, which transformers {transformers.__version__} does not have; no code "
                "of a checkpoint is run"
            )
        return found  # type: ignore[no-any-return]
    if found := usual(transformers, config):
        return getattr(transformers, found)  # type: ignore[no-any-return]
    raise UserError(
        f"model_type {config.model_type!r} has no class with a loss; name one in architectures: [TheClassForTheTask]"
    )


def usual(transformers: Any, config: Any) -> str:
    """The usual class with a loss for the type of a config; empty where there is none."""
    from transformers.models.auto import modeling_auto

    found = (getattr(modeling_auto, mapping, {}).get(config.model_type) for mapping in MAPPINGS)
    return next((name for name in found if isinstance(name, str) and hasattr(transformers, name)), "")


def unknown_type(kind: Any) -> str:
    known = model_types()
    return f"model_type {kind!r} is not one of the {len(known)} that transformers has{nearest(str(kind), known)}"


def model_types() -> list[str]:
    from transformers.models.auto import configuration_auto

    return list(configuration_auto.__dict__["CONFIG_MAPPING_NAMES"])


def task_of(model: nn.Module, config: Any, example: Mapping[str, Tensor] | None) -> ModelTask:
    """What the model is trained on, by its class and the arguments of its forward; an example decides for itself."""
    name = type(inner_model(model)).__name__
    parameters = inspect.signature(inner_model(model).forward).parameters
    with_cache = "use_cache" in parameters
    if example is not None:
        return ModelTask("own", names=tuple(example), with_cache=with_cache, constants=constants(parameters))
    text = config.get_text_config()
    speaks = "input_ids" in parameters and bool(getattr(text, "vocab_size", 0))
    padding = getattr(text, "pad_token_id", None)
    if speaks and "next_sentence_label" in parameters and name.endswith("ForPreTraining"):
        return ModelTask("pretraining", with_cache=with_cache)
    if speaks and config.is_encoder_decoder:
        return ModelTask("translation", 0 if padding is None else padding, with_cache=with_cache)
    if speaks and name.endswith("MaskedLM"):
        return ModelTask("masked", with_cache=with_cache)
    if speaks and "pixel_values" not in parameters and name.endswith(("CausalLM", "LMHeadModel", "LMHead")):
        return ModelTask("causal", -1, with_cache=with_cache)
    own = own_example(config, name, parameters, 3, 8)
    return ModelTask("own", names=tuple(own), with_cache=with_cache, constants=constants(parameters))


def inner_model(model: Any) -> Any:
    """The library's model inside an adapter's wrapping."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def constants(parameters: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Arguments that ask for a loss."""
    return (("return_loss", True),) if "return_loss" in parameters else ()


def own_example(config: Any, name: str, parameters: Mapping[str, Any], rows: int, length: int) -> dict[str, Tensor]:
    """Inputs for the model's own forward: pictures, sounds or tokens, with labels."""
    generator = torch.Generator().manual_seed(rows)
    vision = getattr(config, "vision_config", config)
    text = config.get_text_config()
    made: dict[str, Tensor] = {}

    def numbers(below: int, *size: int) -> Tensor:
        return torch.randint(1, max(below, 2), size, generator=generator)

    if "input_ids" in parameters:
        made["input_ids"] = numbers(text.vocab_size, rows, length)
        made["attention_mask"] = torch.ones(rows, length, dtype=torch.long)
    if "pixel_values" in parameters:
        size = vision.image_size
        height, width = (size, size) if isinstance(size, int) else size
        channels = getattr(vision, "num_channels", 3)
        made["pixel_values"] = torch.rand(rows, channels, height, width, generator=generator)
    if "input_features" in parameters:
        made["input_features"] = torch.rand(
            rows, config.num_mel_bins, 2 * config.max_source_positions, generator=generator
        )
    if "input_values" in parameters:
        made["input_values"] = torch.rand(rows, 4000, generator=generator)
    if "labels" in parameters:
        if name.endswith("Classification") and not name.endswith("TokenClassification"):
            made["labels"] = numbers(config.num_labels, rows) % config.num_labels
        else:
            below = config.num_labels if name.endswith("TokenClassification") else text.vocab_size
            made["labels"] = numbers(below, rows, length) % below
    return made


def examples(
    model: nn.Module, config: Any, task: ModelTask, given: Mapping[str, Tensor] | None, longest: int
) -> list[tuple[Mapping[str, Tensor], ...]]:
    """Ways to try the model: each one input, one of other sizes, one of other values; the first that runs is taken."""
    if task.kind != "own":
        length = min(11, longest)
        return [
            (
                task.example(config, 3, length, 1),
                task.example(config, 2, max(length - 3, 1), 2),
                task.example(config, 3, length, 4),
            )
        ]
    name, parameters = type(inner_model(model)).__name__, inspect.signature(inner_model(model).forward).parameters
    one = given if given is not None else own_example(config, name, parameters, 3, min(8, longest))
    shorter, rows, other = varied(one)
    return [(one, shorter, other), (one, rows, other)]
