"""Hugging Face models, cut: loss and every gradient equal the untouched model's to the bit."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models_reference import assert_close, assert_same_bits, loss_and_gradients
from torch import Tensor, nn

from vpipe.errors import UserError
from vpipe.models.catalog import build
from vpipe.models.model import Model

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

from vpipe.models import huggingface as hf  # noqa: E402
from vpipe.models.huggingface.pieces import hub_name  # noqa: E402

DECODER = {
    "vocab_size": 41, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
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
CONFIGS: dict[str, dict[str, Any]] = {
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
    "phi3": {"model_type": "phi3", **DECODER, "sliding_window": 5, "pad_token_id": 0},
    "smollm3": {"model_type": "smollm3", **DECODER, "no_rope_layers": [1, 0, 1], "pad_token_id": 0},
    "bert": {
        "model_type": "bert", "vocab_size": 41, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 24, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "bart": {"model_type": "bart", **BART},
    "marian": {"model_type": "marian", **BART},
    "t5": {"model_type": "t5", **T5},
    "t5 untied": {"model_type": "t5", **T5, "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"},
}  # fmt: skip


def original(name: str, attention: str = "sdpa") -> nn.Module:
    """The library's own model, in training mode and without the cache of generation, which copies keys and values."""
    config = hf.entry.config_of({**CONFIGS[name], "attn_implementation": attention, "use_cache": False})
    torch.manual_seed(3)
    return getattr(transformers, hf.entry.architecture_of(config).name)(config).train()


def random_batch(kind: str) -> tuple[dict[str, Tensor], Any, dict[str, Tensor]]:
    """(inputs, targets, the arguments of the library's forward that mean the same)."""
    generator = torch.Generator().manual_seed(11)

    def draw(*shape: int) -> Tensor:
        return torch.randint(3, 41, shape, generator=generator)

    tokens = draw(3, 12)
    if kind == "bert":
        mask = torch.ones(3, 12, dtype=torch.long)
        mask[1, 8:] = 0
        labels = torch.where(torch.rand(3, 12, generator=generator) < 0.4, draw(3, 12), -1)
        sentence = torch.tensor([0, 1, 0])
        segments = (torch.arange(12) > 5).long().expand(3, -1)
        theirs = {
            "input_ids": tokens, "attention_mask": mask, "token_type_ids": segments,
            "labels": labels.masked_fill(labels < 0, -100), "next_sentence_label": sentence,
        }  # fmt: skip
        inputs = {"tokens": tokens, "segments": segments, "mask": mask}
        return inputs, {"masked_labels": labels, "next_sentence": sentence}, theirs
    if kind in ("bart", "marian", "t5"):
        pad = 0 if kind == "t5" else 1
        target_in, targets = draw(3, 7), draw(3, 7)
        tokens[1, 8:] = pad
        targets[2, 4:] = pad
        theirs = {
            "input_ids": tokens, "attention_mask": (tokens != pad).long(), "decoder_input_ids": target_in,
            "labels": targets.masked_fill(targets == pad, -100),
        }  # fmt: skip
        return {"source": tokens, "target_in": target_in}, targets, theirs
    targets = torch.cat((tokens[:, 1:], torch.full((3, 1), -100)), dim=1)
    return {"tokens": tokens}, targets, {"input_ids": tokens, "labels": tokens}


def under_their_names(modules: list[nn.Module], gradients: dict[tuple[int, str], Tensor]) -> dict[str, Tensor]:
    return {hub_name(modules[layer].paths, name): gradient for (layer, name), gradient in gradients.items()}


def compare(name: str, model: Model, modules: list[nn.Module], reference: nn.Module) -> None:
    """Loss and gradients of our layers equal those of the library's forward and backward, to the bit."""
    inputs, targets, theirs = random_batch(CONFIGS[name]["model_type"])
    reference.zero_grad()
    expected = reference(**theirs).loss
    expected.backward()
    gradients = {key: p.grad for key, p in reference.named_parameters(remove_duplicate=False) if p.grad is not None}
    loss, ours = loss_and_gradients(model, modules, inputs, targets)
    assert torch.equal(loss, expected.detach())
    mine = under_their_names(modules, ours)
    tied_orders_matter = any(len(weight.owners) > 2 for weight in model.tied)
    shared = {
        key
        for key in gradients
        if gradients[key] is gradients.get("shared.weight", gradients.get("model.shared.weight"))
    }
    exact = set(mine) - (shared if tied_orders_matter else set())
    assert_same_bits({key: mine[key] for key in exact}, {key: gradients[key] for key in exact})
    assert_close({key: mine[key] for key in mine}, {key: gradients[key] for key in mine}, 1e-6)
    missing = set(gradients) - set(mine)
    values = dict(reference.named_parameters(remove_duplicate=False))
    assert all(any(values[key] is values[other] for other in mine) for key in missing), missing


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_cut_model_equals_the_untouched_one(name: str, attention: str) -> None:
    reference = original(name, attention)
    model = hf.layers(copy.deepcopy(reference))
    compare(name, model, model.build(), reference)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_models_own_parameters_are_trained(name: str) -> None:
    reference = original(name)
    model = hf.layers(reference)
    later = {owner for weight in model.tied for owner in weight.owners[1:]}
    own = {id(parameter) for parameter in reference.parameters()}
    seen = [
        id(parameter)
        for index, module in enumerate(model.build())
        for key, parameter in module.named_parameters()
        if (index, key) not in later
    ]
    assert sorted(seen) == sorted(own)
    assert model.num_parameters == sum(p.numel() for p in reference.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_directory_gives_the_same_model(name: str, tmp_path: Path) -> None:
    reference = original(name)
    reference.save_pretrained(tmp_path, max_shard_size="8KB" if name == "gpt2" else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (name == "gpt2")
    model = pickle.loads(pickle.dumps(hf.from_directory(tmp_path)))  # noqa: S301
    compare(name, model, model.build(), reference)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_new_weights_that_do_not_depend_on_the_partition(name: str) -> None:
    model = build("huggingface", {"config": CONFIGS[name]}, seed=7)
    whole = model.build()
    elsewhere: Model = pickle.loads(pickle.dumps(model))  # noqa: S301
    last = elsewhere.layers[-1].build()
    assert_same_bits(dict(last.named_parameters()), dict(whole[-1].named_parameters()))
    for weight in model.tied:
        first, *others = [whole[layer].get_parameter(key) for layer, key in weight.owners]
        assert all(torch.equal(first, other) for other in others)
    reference = original(name)
    state = {hub: part.state_dict()[key] for part in whole for key, hub in hf.hub_names(part).items()}
    unknown = reference.load_state_dict(state, strict=False)
    assert not unknown.unexpected_keys
    compare(name, model, whole, reference)


def test_new_weights_are_spread_as_the_librarys() -> None:
    for name in ("gpt2", "llama", "bert", "t5"):
        reference = dict(original(name).named_parameters())
        for part in build("huggingface", {"config": CONFIGS[name]}).build():
            for key, parameter in part.named_parameters():
                if parameter.numel() > 200 and not key.endswith("bias"):
                    expected = reference.get(hub_name(part.paths, key))
                    if expected is not None:
                        assert parameter.std().item() == pytest.approx(expected.std().item(), rel=0.25), (name, key)


def test_only_the_owner_allocates() -> None:
    model = build("huggingface", {"config": {"model_type": "llama"}}, vocab_size=100)  # 7 billion parameters
    assert model.num_parameters > 6e9
    assert model.vocab_size == 100


def test_bf16_keeps_the_angles_exact() -> None:
    block = build("huggingface", {"config": CONFIGS["llama"], "dtype": "bfloat16"}).layers[1].build()
    assert {p.dtype for p in block.parameters()} == {torch.bfloat16}
    assert block.rotary_emb.inv_freq.dtype == torch.float32


def test_errors_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["gpt2"]))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"config": {"model_type": "lama"}}, "model_type 'lama' is not .*did you mean 'llama'"),
        ({"config": {"model_type": "gpt2", "n_layr": 2}}, r"model\.config\.n_layr is not .*did you mean 'n_layer'"),
        ({"config": str(tmp_path / "nowhere")}, "nowhere does not exist"),
        ({"config": str(broken)}, "is not JSON"),
        ({"directory": str(tmp_path)}, r"has no model\.safetensors"),
        ({"config": CONFIGS["gpt2"], "dtype": "int8"}, "not a floating type"),
        ({"config": CONFIGS["gpt2"], "sequence_length": 99}, "99 but the gpt2 config has 32 positions"),
        ({"config": {**CONFIGS["bart"], "encoder_layerdrop": 0.1}}, "set both to 0"),
        ({}, r"model\.config is missing"),
    ]
    for section, words in cases:
        with pytest.raises(UserError, match=words) as caught:
            build("huggingface", section)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="has 50 tokens but the gpt2 config has vocab_size 41"):
        build("huggingface", {"config": CONFIGS["gpt2"]}, vocab_size=50)
    with pytest.raises(UserError, match="load the weights as GPT2LMHeadModel"):
        hf.layers(original("gpt2").transformer)


def test_a_checkpoint_of_another_model_is_named(tmp_path: Path) -> None:
    original("gpt2").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["gpt2"], "n_layer": 4}))
    with pytest.raises(UserError, match=r"has no tensor 'transformer\.h\.3\.ln_1\.weight'"):
        hf.from_directory(tmp_path).build()
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["gpt2"], "n_positions": 16}))
    with pytest.raises(UserError, match=r"shape \(32, 16\) but config\.json asks for \(16, 16\)"):
        hf.from_directory(tmp_path).build()
    (tmp_path / "model.safetensors").write_bytes(b"not a file of tensors")
    with pytest.raises(UserError, match="cannot be read"):
        hf.from_directory(tmp_path)


def test_transformers_is_imported_only_when_asked_for() -> None:
    code = "import sys, vpipe.models.catalog as c, vpipe.models.huggingface; c.build('gpt', vocab_size=9); "
    done = subprocess.run([sys.executable, "-c", code + "assert 'transformers' not in sys.modules"], check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "qwen3"])
def test_a_trained_cut_model_equals_the_trained_original(name: str) -> None:
    """Five steps of AdamW: what was cut ends with the weights that the untouched model ends with, to the bit."""
    reference = original(name)
    cut = copy.deepcopy(reference)
    model = hf.layers(cut)
    modules = model.build()
    owned = {(i, key): value for i, module in enumerate(modules) for key, value in module.named_parameters()}
    inputs, targets, theirs = random_batch(CONFIGS[name]["model_type"])
    ours, plain = torch.optim.AdamW(owned.values(), lr=1e-2), torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for _ in range(5):
        plain.zero_grad()
        reference(**theirs).loss.backward()
        plain.step()
        _, gradients = loss_and_gradients(model, modules, inputs, targets)
        for owner, gradient in gradients.items():
            owned[owner].grad = gradient.clone()
        ours.step()
    assert_same_bits(dict(cut.named_parameters()), dict(reference.named_parameters()))
