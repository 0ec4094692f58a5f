"""BERT against torch's own encoder layers, and the block count of VPipe's plans."""

from __future__ import annotations

import pytest
import torch
from models_reference import assert_close, loss_and_gradients
from torch import Tensor, nn
from torch.nn import functional as F

from vpipe.models.bert import EPS, bert
from vpipe.models.model import run

SMALL = {"vocab_size": 29, "hidden_size": 16, "num_layers": 3, "num_heads": 4, "sequence_length": 12, "dropout": 0.0}


class Plain(nn.Module):
    """BERT written with nn.TransformerEncoderLayer and the word embedding as the decoder's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions, self.segments = nn.Embedding(29, 16), nn.Embedding(12, 16), nn.Embedding(2, 16)
        self.norm = nn.LayerNorm(16, EPS)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 4, 64, 0.0, F.gelu, EPS, batch_first=True) for _ in range(3)
        )
        self.transform, self.head_norm, self.bias = (
            nn.Linear(16, 16),
            nn.LayerNorm(16, EPS),
            nn.Parameter(torch.zeros(29)),
        )
        self.pooler, self.sentence = nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, tokens: Tensor, segments: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(tokens.shape[1])[None]
        x = self.norm(self.words(tokens) + self.positions(positions) + self.segments(segments))
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=mask == 0)
        hidden = self.head_norm(F.gelu(self.transform(x)))
        return F.linear(hidden, self.words.weight, self.bias), self.sentence(torch.tanh(self.pooler(x[:, 0])))


ENDS = {
    "words.": (0, "embeddings.words."), "positions.": (0, "embeddings.positions."),
    "segments.": (0, "embeddings.segments."), "norm.": (0, "embeddings.norm."), "transform.": (6, "transform."),
    "head_norm.": (6, "norm."), "bias": (6, "words.bias"), "pooler.": (6, "pooler."),
    "sentence.": (6, "next_sentence."),
}  # fmt: skip
HALVES = {
    "self_attn.in_proj_": (0, "qkv."), "self_attn.out_proj.": (0, "out."), "norm1.": (0, "norm."),
    "linear1.": (1, "up."), "linear2.": (1, "down."), "norm2.": (1, "norm."),
}  # fmt: skip


def where(name: str) -> tuple[int, str]:
    """The place in our list of a parameter of Plain."""
    if name.startswith("layers."):
        _, layer, rest = name.split(".", 2)
        half, ours = next(
            (half, ours + rest[len(theirs) :]) for theirs, (half, ours) in HALVES.items() if rest.startswith(theirs)
        )
        block = 2 * int(layer) + half
        return block, ours if block else f"attention.{ours}"
    return next(
        (block, ours + name[len(theirs) :]) for theirs, (block, ours) in ENDS.items() if name.startswith(theirs)
    )


def test_loss_and_gradients_equal_torchs_layers() -> None:
    model = bert(**SMALL)
    modules = [module.double() for module in model.build()]
    plain = Plain().double()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            layer, own = where(name)
            parameter.copy_(modules[layer].get_parameter(own))
    tokens, segments = torch.randint(29, (4, 12)), torch.randint(2, (4, 12))
    mask = torch.ones(4, 12, dtype=torch.int8)
    mask[1, 7:] = 0
    labels = torch.where(torch.rand(4, 12) < 0.3, torch.randint(29, (4, 12)), -1)
    labels[0, 0] = 3
    sentence = torch.tensor([0, 1, 1, 0])
    inputs = {"tokens": tokens, "segments": segments, "mask": mask}
    loss, gradients = loss_and_gradients(model, modules, inputs, {"masked_labels": labels, "next_sentence": sentence})
    words, following = plain(tokens, segments, mask)
    expected = F.cross_entropy(words.flatten(0, 1).float(), labels.flatten(), ignore_index=-1)
    expected = expected + F.cross_entropy(following.float(), sentence)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    gradients.pop((6, "words.weight"))  # tied: the sum is also at its first owner
    assert_close(gradients, {where(name): p.grad for name, p in plain.named_parameters()}, 1e-6)
    assert model.count((labels, sentence)) == int((labels >= 0).sum())


@pytest.mark.parametrize(("num_layers", "blocks"), [(24, 49), (48, 97)])
def test_blocks_are_those_of_vpipes_plans(num_layers: int, blocks: int) -> None:
    assert len(bert(num_layers=num_layers).layers) == blocks


def test_published_size_and_inputs() -> None:
    model = bert(sequence_length=512)
    assert model.inputs == ("tokens", "segments", "mask")
    assert model.num_parameters == 336_226_108  # BERT-large with both heads


def test_padding_does_not_reach_the_tokens() -> None:
    model = bert(**SMALL)
    modules = model.build()
    tokens, segments = torch.randint(29, (1, 12)), torch.zeros(1, 12, dtype=torch.int8)
    mask = (torch.arange(12) < 8)[None].to(torch.int8)
    other = torch.where(mask.bool(), tokens, torch.randint(29, (1, 12)))
    one, two = (run(model.layers, modules, {"tokens": t, "segments": segments, "mask": mask}) for t in (tokens, other))
    assert torch.equal(one[0][:, :8], two[0][:, :8])
    assert torch.equal(one[1], two[1])
