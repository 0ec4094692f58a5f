"""GPT against torch's own Transformer layers, and the promises that every model keeps."""

from __future__ import annotations

import pickle
from itertools import pairwise

import pytest
import torch
from models_reference import assert_close, loss_and_gradients
from torch import Tensor, nn
from torch.nn import functional as F

from vpipe.config import ModelConfig
from vpipe.errors import UserError
from vpipe.interfaces import registered_model
from vpipe.models.gpt import gpt, gpt2
from vpipe.models.model import build, run, seeded
from vpipe.registry import MODEL_REGISTRY

SMALL = {"vocab_size": 37, "hidden_size": 24, "num_layers": 3, "num_heads": 4, "sequence_length": 16}


class Plain(nn.Module):
    """A GPT written with torch's layers and the tied head that PyTorch users write."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(37, 24), nn.Embedding(16, 24)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                24, 4, 96, 0.0, lambda x: F.gelu(x, approximate="tanh"), batch_first=True, norm_first=True
            )
            for _ in range(3)
        )
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 37, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


PARTS = {
    "norm1": "attention.norm",
    "self_attn.in_proj_": "attention.qkv.",
    "self_attn.out_proj": "attention.out",
    "norm2": "feed_forward.norm",
    "linear1": "feed_forward.up",
    "linear2": "feed_forward.down",
}


def where(name: str, split: bool) -> tuple[int, str]:
    """The place in our list of a parameter of Plain."""
    if not name.startswith("blocks."):
        last = 7 if split else 4
        return (last, name.replace("head", "projection")) if name.startswith(("norm", "head")) else (0, name)
    _, block, rest = name.split(".", 2)
    for theirs, ours in PARTS.items():
        rest = rest.replace(theirs, ours)
    if not split:
        return 1 + int(block), rest
    half, rest = rest.split(".", 1)
    return 1 + 2 * int(block) + (half == "feed_forward"), rest


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_equal_torchs_layers(tied: bool, split: bool) -> None:
    model = gpt(**SMALL, tied=tied, split=split)
    modules = [module.double() for module in model.build()]
    plain = Plain(tied).double()
    names = dict(plain.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, parameter in names.items():
            layer, own = where(name, split)
            parameter.copy_(modules[layer].get_parameter(own))
    tokens, targets = torch.randint(37, (3, 16)), torch.randint(37, (3, 16))
    targets[0, 3:] = -100
    loss, gradients = loss_and_gradients(model, modules, tokens, targets)
    logits = plain(tokens)
    expected = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-6)
    assert_close(gradients, {where(name, split): p.grad for name, p in names.items()}, 1e-7)
    assert model.count(targets) == 3 * 16 - 13


def test_head_size_and_low_rank_change_the_matrices() -> None:
    model = gpt(**SMALL, head_size=5, ff_low_rank=7)
    block = model.layers[1].build()
    assert block.attention.qkv.weight.shape == (60, 24)
    assert [tuple(p.shape) for p in block.feed_forward.up.parameters()] == [(7, 24), (96, 7), (96,)]
    assert run(model.layers, model.build(), torch.zeros(2, 16, dtype=torch.long)).shape == (2, 16, 37)


def test_weights_depend_on_seed_and_place_only() -> None:
    model, other = gpt(**SMALL, seed=5), gpt(**SMALL, seed=6)
    before = torch.get_rng_state()
    whole = model.build()
    alone = model.layers[2].build()
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(whole[2].parameters(), alone.parameters(), strict=True))
    qkv = [module.attention.qkv.weight for module in whole[1:-1]]
    assert not any(torch.equal(a, b) for a, b in pairwise(qkv))
    assert not torch.equal(qkv[0], other.layers[1].build().attention.qkv.weight)


def test_seeded_restores_the_generator_after_an_error() -> None:
    def broken() -> nn.Module:
        torch.rand(3)
        raise RuntimeError

    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        seeded(broken, 0, 0)()
    assert torch.equal(before, torch.get_rng_state())


def test_tied_weights_start_equal_without_a_message() -> None:
    model = gpt2(**SMALL)
    embedding, head = model.layers[0].build(), model.layers[-1].build()
    assert torch.equal(embedding.tokens.weight, head.projection.weight)
    assert embedding.tokens.weight is not head.projection.weight


@pytest.mark.parametrize("tied", [False, True])
def test_counts_need_no_memory_and_are_exact(tied: bool) -> None:
    model = gpt(**SMALL, tied=tied)
    plain = Plain(tied)
    assert model.num_parameters == sum(p.numel() for p in plain.parameters())
    weights = 3 * 12 * 24 * 24 + 24 * 37
    assert model.flops_per_token == 6 * weights + 12 * 3 * 24 * 16


def test_published_sizes() -> None:
    assert gpt2().num_parameters == 124_439_808
    assert build("cpm-medium").num_parameters == pytest.approx(334e6, rel=0.01)
    assert build("cpm-large").num_parameters == pytest.approx(2.6e9, rel=0.02)


@pytest.mark.parametrize(
    ("name", "count"), [("cpm-large", 2.6e9), ("cpm-medium", 334e6), ("gpt2", 124e6), ("bert", 336e6)]
)
def test_a_config_without_sizes_has_the_models_own(name: str, count: float) -> None:
    """A config's defaults hid them: cpm-large had 65.9 million parameters."""
    vocab_size = {"gpt2": 50257, "bert": 30522}.get(name, 30000)
    made = registered_model(ModelConfig(name=name, sequence_length=1024 if name != "bert" else 512), vocab_size)
    assert made.num_parameters == pytest.approx(count, rel=0.02)


def test_a_model_can_be_pickled() -> None:
    model = pickle.loads(pickle.dumps(gpt2(**SMALL)))  # noqa: S301
    assert model.num_parameters == gpt2(**SMALL).num_parameters


def test_a_unit_without_valid_targets_has_loss_zero() -> None:
    model = gpt(**SMALL)
    logits = torch.randn(2, 4, 37, requires_grad=True)
    loss = model.loss(logits, torch.full((2, 4), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert not logits.grad.any()


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"hidden_size": 30}, "model.hidden_size 30 is not divisible by model.num_heads 4; 3 heads would fit"),
        ({"num_layers": 0}, "model.num_layers is 0 but must be at least 1"),
        ({"extra": {"dropout": "much"}}, "model.dropout is 'much'"),
        ({"extra": {"head_size": -4}}, "model.head_size is -4"),
        ({"extra": {"head_size": True}}, r"model.head_size is True"),
        ({"extra": {"drop_out": 0.1}}, "model.drop_out is not an option of 'gpt'; did you mean 'dropout'?"),
        ({"vocab_size": -1}, "model.vocab_size is missing"),
    ],
)
def test_errors_are_one_sentence(section: dict, words: str) -> None:
    with pytest.raises(UserError, match="^" + words.replace(".", r"\.").replace("?", r"\?")):
        build("gpt", {**SMALL, **section})


def test_unknown_model() -> None:
    with pytest.raises(UserError, match="did you mean 'llama'"):
        build("lama")


def test_long_sequences_are_refused() -> None:
    model = gpt(**SMALL)
    with pytest.raises(UserError, match=r"17 tokens but model\.sequence_length is 16"):
        run(model.layers, model.build(), torch.zeros(1, 17, dtype=torch.long))


def test_the_data_sets_vocabulary_is_taken_where_the_config_has_none() -> None:
    assert build("gpt", {**SMALL, "name": "gpt", "vocab_size": -1, "extra": {}}, vocab_size=11).vocab_size == 11
    assert "gpt" in MODEL_REGISTRY.built_in


def test_a_model_made_of_another_model_is_built() -> None:
    """A registered function that returns gpt(...) is seeded once more: the layer waited for itself, and the run hung."""
    inner = seeded(lambda: nn.Linear(2, 2), 3, 1)
    weights = seeded(inner, 5, 0)().weight
    assert torch.equal(weights, inner().weight)
