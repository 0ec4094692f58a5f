"""LLaMA against a plain one written with complex numbers and repeated heads."""

from __future__ import annotations

import pytest
import torch
from models_reference import assert_close, loss_and_gradients
from torch import Tensor, nn
from torch.nn import functional as F

from vpipe.errors import UserError
from vpipe.models.llama import llama
from vpipe.models.model import build

SMALL = {
    "vocab_size": 23, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "sequence_length": 10,
    "num_kv_heads": 2, "intermediate_size": 40, "rope_theta": 500.0,
}  # fmt: skip


def turned(x: Tensor) -> Tensor:
    """Rotary positions as a product of complex numbers: channel i is the real part, channel i + half the imaginary."""
    length, half = x.shape[-2], x.shape[-1] // 2
    rates = 500.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), rates)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((z.real, z.imag), dim=-1)


def plain(modules: list[nn.Module], tokens: Tensor) -> Tensor:
    """The model by the book, on the same parameters."""

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (32,), weight, 1e-6)

    x = modules[0].tokens.weight[tokens]
    length = tokens.shape[1]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    for block in modules[1:-1]:
        a, f = block.attention, block.feed_forward
        n = rms(x, a.norm.weight)
        query, key, value = (
            (n @ part.weight.T).view(*tokens.shape, -1, 8).transpose(1, 2) for part in (a.query, a.key, a.value)
        )
        key, value = key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1)
        scores = (turned(query) @ turned(key).transpose(-1, -2)) / 8**0.5
        mixed = scores.masked_fill(future, -torch.inf).softmax(-1) @ value
        x = x + mixed.transpose(1, 2).flatten(2) @ a.out.weight.T
        n = rms(x, f.norm.weight)
        x = x + (F.silu(n @ f.gate.weight.T) * (n @ f.up.weight.T)) @ f.down.weight.T
    return rms(x, modules[-1].norm.weight) @ modules[-1].projection.weight.T


def test_loss_and_gradients_equal_the_plain_model() -> None:
    model = llama(**SMALL)
    modules = [module.double() for module in model.build()]
    tokens, targets = torch.randint(23, (3, 10)), torch.randint(23, (3, 10))
    loss, gradients = loss_and_gradients(model, modules, tokens, targets)
    for module in modules:
        module.zero_grad()
    expected = F.cross_entropy(plain(modules, tokens).flatten(0, 1).float(), targets.flatten())
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    theirs = {(i, name): p.grad for i, module in enumerate(modules) for name, p in module.named_parameters()}
    assert_close(gradients, theirs, 1e-5)  # our angles are fp32


def test_split_is_the_same_model_in_more_layers() -> None:
    model, fine = llama(**SMALL), llama(**SMALL, split=True)
    assert len(fine.layers) == len(model.layers) + 2
    assert fine.num_parameters == model.num_parameters
    assert fine.flops_per_token == model.flops_per_token


def test_defaults_and_ties() -> None:
    model = build("llama", {"name": "llama", "extra": {"tied": True}}, vocab_size=100)
    assert model.layers[1].build().feed_forward.up.weight.shape == (1536, 512)
    sizes = {hidden: build("llama", {"hidden_size": hidden}, vocab_size=8).blank()[1] for hidden in (4096, 5120)}
    assert [each.feed_forward.up.out_features for each in sizes.values()] == [11008, 13824], "of 7B and of 13B"
    assert torch.equal(model.layers[0].build().tokens.weight, model.layers[-1].build().projection.weight)


@pytest.mark.parametrize(
    ("section", "words"),
    [({"num_kv_heads": 3}, "num_heads 4 is not a multiple of model.num_kv_heads 3"), ({"hidden_size": 36}, "even")],
)
def test_errors(section: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build("llama", {**SMALL, **section})
