"""Small models of many families of transformers, with random batches, for the tests of the cut."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from vpipe.models.huggingface.architectures import architecture, own_example
from vpipe.models.huggingface.tasks import ModelTask

DECODER = {
    "vocab_size": 41, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
ENCODER = {
    "vocab_size": 41, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24,
    "max_position_embeddings": 40, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 1,
}  # fmt: skip
BART = {
    "vocab_size": 41, "d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
    "dropout": 0.0, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}  # fmt: skip
T5 = {
    "vocab_size": 41, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
    "dropout_rate": 0.0,
}  # fmt: skip
PICTURE = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
EXPERTS = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
SLIDING = {"head_dim": 4, "sliding_window": 4, "query_pre_attn_scalar": 4}

CASES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 41, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 32,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
    },
    "llama": {"model_type": "llama", **DECODER},
    "llama tied": {"model_type": "llama", **DECODER, "tie_word_embeddings": True},
    "llama rope": {
        "model_type": "llama", **DECODER,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral": {"model_type": "mistral", **DECODER, "sliding_window": 5},
    "qwen2": {
        "model_type": "qwen2", **DECODER, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", **DECODER, "head_dim": 6, "tie_word_embeddings": True},
    "olmo": {"model_type": "olmo", **DECODER, "clip_qkv": 0.1},
    "olmo2": {"model_type": "olmo2", **DECODER},
    "phi3": {"model_type": "phi3", **DECODER, "sliding_window": 5},
    "smollm3": {"model_type": "smollm3", **DECODER, "no_rope_layers": [1, 0, 1]},
    "gemma": {"model_type": "gemma", **DECODER, "head_dim": 4},
    "gemma2": {"model_type": "gemma2", **DECODER, **SLIDING},
    "gemma3_text": {
        "model_type": "gemma3_text", **DECODER, **SLIDING,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "mixtral": {"model_type": "mixtral", **DECODER, "num_local_experts": 4, **EXPERTS},
    "qwen2_moe": {
        "model_type": "qwen2_moe", **DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8, "decoder_sparse_step": 1, **EXPERTS,
    },
    "gpt_neox": {"model_type": "gpt_neox", **{k: v for k, v in DECODER.items() if k != "num_key_value_heads"}},
    "gptj": {
        "model_type": "gptj", "vocab_size": 41, "n_embd": 16, "n_layer": 3, "n_head": 4, "rotary_dim": 4,
        "n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "gpt_neo": {
        "model_type": "gpt_neo", "vocab_size": 41, "hidden_size": 16, "num_layers": 4, "num_heads": 4, "window_size": 4,
        "attention_types": [[["global", "local"], 2]], "max_position_embeddings": 32, "resid_dropout": 0.0,
        "embed_dropout": 0.0, "attention_dropout": 0.0,
    },
    "opt": {
        "model_type": "opt", "vocab_size": 41, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 3,
        "num_attention_heads": 4, "max_position_embeddings": 32, "dropout": 0.0, "attention_dropout": 0.0,
        "word_embed_proj_dim": 8, "pad_token_id": 1,
    },
    "bloom": {
        "model_type": "bloom", "vocab_size": 41, "hidden_size": 16, "n_layer": 3, "n_head": 4, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "pad_token_id": 0,
    },
    "phi": {"model_type": "phi", **DECODER},
    "falcon": {
        "model_type": "falcon", "vocab_size": 41, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
        "max_position_embeddings": 32, "pad_token_id": 0,
    },
    "starcoder2": {
        "model_type": "starcoder2", **DECODER, "sliding_window": 4, "residual_dropout": 0.0, "embedding_dropout": 0.0,
    },
    "granite": {
        "model_type": "granite", **DECODER, "residual_multiplier": 0.5, "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
    },
    "mamba": {
        "model_type": "mamba", "vocab_size": 41, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 3,
        "pad_token_id": 0,
    },
    "bert": {"model_type": "bert", **ENCODER},
    "roberta": {"model_type": "roberta", **ENCODER},
    "distilbert": {
        "model_type": "distilbert", "vocab_size": 41, "dim": 16, "n_layers": 3, "n_heads": 4, "hidden_dim": 24,
        "max_position_embeddings": 32, "dropout": 0.0, "attention_dropout": 0.0,
    },
    "deberta": {"model_type": "deberta", **ENCODER, **DISENTANGLED},
    "deberta-v2": {
        "model_type": "deberta-v2", **ENCODER, **DISENTANGLED, "position_buckets": 8, "norm_rel_ebd": "layer_norm",
    },
    "vit": {
        "model_type": "vit", **PICTURE, "num_labels": 5, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "clip": {
        "model_type": "clip", "projection_dim": 8, "vision_config": PICTURE,
        "text_config": {
            "vocab_size": 41, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 24, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
            "eos_token_id": 2,
        },
    },
    "whisper": {
        **{k: v for k, v in BART.items() if k not in ("max_position_embeddings", "forced_eos_token_id")},
        "model_type": "whisper", "num_mel_bins": 4, "max_source_positions": 10, "max_target_positions": 32,
        "decoder_layers": 2, "suppress_tokens": None, "begin_suppress_tokens": None,
    },
    "bart": {"model_type": "bart", **BART},
    "marian": {"model_type": "marian", **BART},
    "t5": {"model_type": "t5", **T5},
    "t5 untied": {"model_type": "t5", **T5, "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"},
}  # fmt: skip


def config_for(name: str, **more: Any) -> Any:
    values = {**CASES[name], **more}
    return transformers.AutoConfig.for_model(**values)


def original(name: str, **more: Any) -> nn.Module:
    """The library's own model, in training mode."""
    config = config_for(name, **more)
    torch.manual_seed(3)
    return architecture(transformers, config)(config).train()


def random_batch(
    task: ModelTask, model: Any, rows: int = 4, length: int = 9
) -> tuple[dict[str, Tensor], Any, dict[str, Any]]:
    """(inputs, targets, the arguments of the library's forward that mean the same)."""
    generator = torch.Generator().manual_seed(11)
    if task.kind == "own":
        inputs = own_example(
            model.config, type(model).__name__, inspect.signature(model.forward).parameters, rows, length
        )
        return inputs, next(iter(inputs.values())), task.arguments(inputs)
    inputs = task.example(model.config, rows, length, 7)
    theirs = task.arguments(inputs)
    hidden = torch.rand(rows, length, generator=generator) < 0.4
    labels = torch.where(hidden, torch.randint(3, 41, (rows, length), generator=generator), -1)
    if task.kind == "causal":
        tokens = inputs["tokens"]
        shifted = torch.cat((tokens[:, 1:], torch.full((rows, 1), -100)), dim=1)
        return inputs, shifted, {**theirs, "labels": tokens}
    if task.kind == "masked":
        return inputs, labels, {**theirs, "labels": labels.masked_fill(labels < 0, -100)}
    if task.kind == "pretraining":
        sentence = torch.arange(rows) % 2
        their_labels = {"labels": labels.masked_fill(labels < 0, -100), "next_sentence_label": sentence}
        return inputs, {"masked_labels": labels, "next_sentence": sentence}, {**theirs, **their_labels}
    targets = inputs["target_in"].roll(1, 1)
    targets[1, 3:] = task.padding
    return inputs, targets, {**theirs, "labels": targets.masked_fill(targets == task.padding, -100)}
