"""The encoder–decoder against torch's own layers."""

from __future__ import annotations

import math

import pytest
import torch
from models_reference import assert_close, loss_and_gradients
from torch import Tensor, nn
from torch.nn import functional as F

from vpipe.models.translation import PAD, sinusoids, translation

SMALL = {
    "vocab_size": 31, "hidden_size": 16, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
    "sequence_length": 9, "dropout": 0.0,
}  # fmt: skip
OPTIONS = {"dim_feedforward": 64, "dropout": 0.0, "batch_first": True, "norm_first": True}


class Plain(nn.Module):
    """nn.TransformerEncoder and nn.TransformerDecoder with one shared embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(31, 16)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 4, **OPTIONS), 2, nn.LayerNorm(16), enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, **OPTIONS), 3, nn.LayerNorm(16))

    def embed(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) * math.sqrt(16)
        return x + sinusoids(tokens.shape[1], 16, x)

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        padding = source == PAD
        memory = self.encoder(self.embed(source), src_key_padding_mask=padding)
        causal = torch.ones(target_in.shape[1], target_in.shape[1], dtype=torch.bool).triu(1)
        y = self.decoder(self.embed(target_in), memory, tgt_mask=causal, memory_key_padding_mask=padding)
        return y @ self.tokens.weight.T


def ours(modules: list[nn.Module], kind: str) -> dict[str, Tensor]:
    """Our values (``kind`` "data") or gradients ("grad") under Plain's names."""

    def of(tensor: Tensor) -> Tensor:
        return tensor.data if kind == "data" else tensor.grad

    def attention(prefix: str, part: nn.Module) -> dict[str, Tensor]:
        three = (part.query, part.key, part.value)
        return {
            f"{prefix}.in_proj_weight": torch.cat([of(one.weight) for one in three]),
            f"{prefix}.in_proj_bias": torch.cat([of(one.bias) for one in three]),
            **both(f"{prefix}.out_proj", part.out),
        }

    def both(prefix: str, part: nn.Module) -> dict[str, Tensor]:
        return {f"{prefix}.weight": of(part.weight), f"{prefix}.bias": of(part.bias)}

    named: dict[str, Tensor] = {}
    for prefix, layers in (("encoder", modules[1:3]), ("decoder", modules[4:7])):
        for index, layer in enumerate(layers):
            here = f"{prefix}.layers.{index}"
            parts = [layer.attention, layer.feed_forward]
            named |= attention(f"{here}.self_attn", layer.attention)
            if prefix == "decoder":
                parts.insert(1, layer.cross_attention)
                named |= attention(f"{here}.multihead_attn", layer.cross_attention)
            for number, part in enumerate(parts, start=1):
                named |= both(f"{here}.norm{number}", part.norm)
            named |= both(f"{here}.linear1", layer.feed_forward.up) | both(f"{here}.linear2", layer.feed_forward.down)
    return named | both("encoder.norm", modules[2].norm) | both("decoder.norm", modules[7].norm)


def test_loss_and_gradients_equal_torchs_transformer() -> None:
    model = translation(**SMALL)
    modules = [module.double() for module in model.build()]
    plain = Plain().double()
    plain.load_state_dict(ours(modules, "data") | {"tokens.weight": modules[0].tokens.weight.data})
    source, target_in, targets = (torch.randint(4, 31, shape) for shape in ((3, 9), (3, 7), (3, 7)))
    source[1, 5:] = PAD
    target_in[2, 4:] = targets[2, 4:] = PAD
    loss, gradients = loss_and_gradients(model, modules, {"source": source, "target_in": target_in}, targets)
    logits = plain(source, target_in).flatten(0, 1).float()
    expected = F.cross_entropy(logits, targets.flatten(), ignore_index=PAD, label_smoothing=0.1)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    total = gradients[(0, "tokens.weight")]
    assert_close(
        ours(modules, "grad") | {"tokens.weight": total},
        {name: parameter.grad for name, parameter in plain.named_parameters()},
        1e-6,
    )
    assert model.count(targets) == 3 * 7 - 3


def test_names_and_ties() -> None:
    model = translation(**SMALL)
    assert model.inputs == ("source", "target_in")
    assert [layer.writes for layer in model.layers[1:4]] == [("x",), ("memory",), ("y",)]
    assert all("memory" in layer.reads for layer in model.layers[4:7])
    modules = model.build()
    first, *rest = [modules[layer].get_parameter(name) for layer, name in model.tied[0].owners]
    assert len(rest) == 2
    assert all(torch.equal(first, other) for other in rest)
    assert model.num_parameters == sum(p.numel() for p in Plain().parameters())


@pytest.mark.parametrize(("target", "tied", "owners"), [(0, True, 3), (40, True, 2), (0, False, 0)])
def test_two_vocabularies(target: int, tied: bool, owners: int) -> None:
    model = translation(**SMALL, target_vocab_size=target, tied=tied)
    assert sum(len(weight.owners) for weight in model.tied) == owners
    assert model.vocab_size == (target or 31)
