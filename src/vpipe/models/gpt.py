"""GPT as a list of layers: OurGPipe's (free head size, low-rank feed-forward, untied head) and GPT-2's (tied head, its
initialisation); and the form that it shares with LLaMA: an embedding, blocks of attention and feed-forward, and a head.

Each block is one layer, or two with ``split``, so that a partition can cut between attention and feed-forward. The
final norm and the head are the last layer: logits are the largest tensor of a language model and never leave the last
stage.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vpipe.layer import Layer, TiedWeight
from vpipe.models.losses import TokenLoss
from vpipe.models.model import Model, fits, head_size_of, positive, seed_layers, tie

Make = Callable[[], nn.Module]


class Embedding(nn.Module):
    """Tokens and learned positions."""

    def __init__(
        self, vocab_size: int, sequence_length: int, hidden_size: int, dropout: float, std: float = 0.02
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.positions = nn.Embedding(sequence_length, hidden_size)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.tokens.weight, std=std)
        nn.init.normal_(self.positions.weight, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        fits(length, self.positions.num_embeddings)
        positions = torch.arange(length, device=tokens.device)
        embedded: Tensor = self.dropout(self.tokens(tokens) + self.positions(positions))
        return embedded


def heads(x: Tensor, num_heads: int) -> Tensor:
    """``(batch, length, channels)`` as ``(batch, num_heads, length, channels of a head)``."""
    batch, length, _ = x.shape
    return x.view(batch, length, num_heads, -1).transpose(1, 2)


def attended(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, mask: Tensor | None = None, *, causal: bool = False
) -> Tensor:
    """What all heads make of the values, side by side; several query heads may share a key and value head."""
    shared = key.shape[1] != query.shape[1]
    mixed = F.scaled_dot_product_attention(query, key, value, mask, dropout, causal, enable_gqa=shared)
    return mixed.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Pre-norm causal self-attention with its residual: ``x + out(attend(norm(x)))``."""

    def __init__(
        self, hidden_size: int, num_heads: int, head_size: int, dropout: float, std: float, residual_std: float
    ) -> None:
        super().__init__()
        self.num_heads, self.rate = num_heads, dropout
        self.norm = nn.LayerNorm(hidden_size)
        self.qkv = initialised(nn.Linear(hidden_size, 3 * num_heads * head_size), std)
        self.out = initialised(nn.Linear(num_heads * head_size, hidden_size), residual_std)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (heads(part, self.num_heads) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = attended(query, key, value, self.rate if self.training else 0.0, causal=True)
        return x + self.dropout(self.out(mixed))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Pre-norm feed-forward with its residual: ``x + down(gelu(up(norm(x))))``.

    With ``low_rank`` each of the two matrices is a product of two thin ones.
    """

    def __init__(
        self, hidden_size: int, inner_size: int, low_rank: int, dropout: float, std: float, residual_std: float
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.up = projection(hidden_size, inner_size, low_rank, std, std)
        self.activation = nn.GELU(approximate="tanh")
        self.down = projection(inner_size, hidden_size, low_rank, std, residual_std)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.activation(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class Head(nn.Module):
    """The final norm and the projection onto the vocabulary, also of LLaMA and of the translator."""

    def __init__(self, norm: Make, hidden_size: int, vocab_size: int, std: float = 0.02) -> None:
        super().__init__()
        self.norm = norm()
        self.projection = initialised(nn.Linear(hidden_size, vocab_size, bias=False), std)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.projection(self.norm(x))
        return logits


def initialised(linear: nn.Linear, std: float) -> nn.Linear:
    """``linear`` with normal weights and no bias."""
    nn.init.normal_(linear.weight, std=std)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear


def projection(size_in: int, size_out: int, low_rank: int, std: float, last_std: float) -> nn.Module:
    """A linear map, through a space of ``low_rank`` dimensions if that is not 0."""
    if not low_rank:
        return initialised(nn.Linear(size_in, size_out), last_std)
    thin = initialised(nn.Linear(size_in, low_rank, bias=False), std)
    return nn.Sequential(thin, initialised(nn.Linear(low_rank, size_out), last_std))


class Block(nn.Module):
    """Attention, then feed-forward."""

    def __init__(self, attention: Make, feed_forward: Make) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention(), feed_forward()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.feed_forward(self.attention(x))
        return y


def causal(
    embedding: Make,
    attention: Make,
    feed_forward: Make,
    head: Make,
    *,
    num_layers: int,
    split: bool,
    tied: bool,
    seed: int,
    **facts: Any,
) -> Model:
    """The model of these parts; ``facts`` are its sizes. ``tied``: the head is the token embedding."""
    layers = [Layer(embedding, reads=("tokens",), name="embedding")]
    for block in range(num_layers):
        if split:
            layers.append(Layer(attention, name=f"attention {block}", cost_key="attention"))
            layers.append(Layer(feed_forward, name=f"feed-forward {block}", cost_key="feed-forward"))
        else:
            layers.append(Layer(partial(Block, attention, feed_forward), name=f"block {block}", cost_key="block"))
    layers.append(Layer(head, name="head"))
    weights = (TiedWeight(((0, "tokens.weight"), (len(layers) - 1, "projection.weight"))),) if tied else ()
    return Model(layers=tie(seed_layers(layers, seed), weights), loss=TokenLoss(), tied=weights, **facts)


def sized(base: Callable[..., Model], summary: str, **defaults: Any) -> Callable[..., Model]:
    """``base`` with other defaults, which its signature tells: a size of a model is not another model."""
    signature = inspect.signature(base)
    parameters = [each.replace(default=defaults.get(name, each.default)) for name, each in signature.parameters.items()]

    def build(**options: Any) -> Model:
        return base(**defaults | options)

    build.__doc__ = summary
    build.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return build


def gpt(
    *,
    vocab_size: int,
    hidden_size: int = 512,
    num_layers: int = 16,
    num_heads: int = 16,
    sequence_length: int = 128,
    head_size: int = 0,
    ff_low_rank: int = 0,
    dropout: float = 0.0,
    tied: bool = False,
    split: bool = False,
    scaled_residuals: bool = False,
    seed: int = 0,
) -> Model:
    """OurGPipe's GPT. ``head_size`` 0 is hidden_size / num_heads; ``ff_low_rank`` 0 is a full feed-forward.

    ``tied``: the head is the token embedding. ``split``: two layers per block. ``scaled_residuals``: GPT-2's smaller
    start of what is added to the residual stream.
    """
    positive(vocab_size=vocab_size, hidden_size=hidden_size, num_layers=num_layers, sequence_length=sequence_length)
    head_size = head_size or head_size_of(hidden_size, num_heads)
    positive(head_size=head_size)
    std = 0.02
    residual_std = std / (2 * num_layers) ** 0.5 if scaled_residuals else std
    attention = partial(Attention, hidden_size, num_heads, head_size, dropout, std, residual_std)
    feed_forward = partial(FeedForward, hidden_size, 4 * hidden_size, ff_low_rank, dropout, std, residual_std)
    return causal(
        partial(Embedding, vocab_size, sequence_length, hidden_size, dropout),
        attention,
        feed_forward,
        partial(Head, partial(nn.LayerNorm, hidden_size), hidden_size, vocab_size),
        num_layers=num_layers,
        split=split,
        tied=tied,
        seed=seed,
        sequence_length=sequence_length,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        attention_flops=12.0 * num_layers * num_heads * head_size * sequence_length,
    )


gpt2 = sized(
    gpt,
    "GPT-2; the defaults are its smallest size.",
    vocab_size=50257,
    hidden_size=768,
    num_layers=12,
    num_heads=12,
    sequence_length=1024,
    dropout=0.1,
    tied=True,
    scaled_residuals=True,
)
