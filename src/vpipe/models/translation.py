"""The encoder–decoder Transformer for translation, the model whose layers are not a chain.

    source ─▶ embed ─▶ encoder … encoder ─▶ memory ═══════╦═════════╗
    target_in ──────────────────────────▶ embed ─▶ decoder … decoder ─▶ head

The last encoder layer writes ``memory``; every decoder layer reads it, wherever it lives, and its gradient is the sum
over them. The padding of the source is derived from the tokens once, beside the memory, as ``source_mask``. Layers are
pre-norm, which needs no warm-up to start; positions are sinusoids, so that no length is too long.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vpipe.layer import Layer, TiedWeight
from vpipe.models.gpt import Head, attended, heads
from vpipe.models.losses import TokenLoss
from vpipe.models.model import Model, head_size_of, positive, seed_layers, tie

PAD = 1
"""fairseq's padding index."""


def sinusoids(length: int, hidden_size: int, like: Tensor) -> Tensor:
    """(length, hidden_size): sines in the first half of the channels, cosines in the second."""
    half = hidden_size // 2
    rates = torch.exp(torch.arange(half, device=like.device) * -(math.log(10000.0) / max(half - 1, 1)))
    angles = torch.arange(length, device=like.device)[:, None] * rates
    table = torch.cat((angles.sin(), angles.cos()), dim=1).to(like.dtype)
    return F.pad(table, (0, hidden_size - 2 * half))


class Embedding(nn.Module):
    """Scaled tokens and sinusoidal positions; of the source also its mask, 1 where a token is."""

    def __init__(self, vocab_size: int, hidden_size: int, dropout: float, pad: int, with_mask: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.pad, self.with_mask = pad, with_mask
        nn.init.normal_(self.tokens.weight, std=hidden_size**-0.5)

    def forward(self, tokens: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        hidden_size = self.tokens.embedding_dim
        embedded = self.tokens(tokens) * math.sqrt(hidden_size)
        x: Tensor = self.dropout(embedded + sinusoids(tokens.shape[1], hidden_size, embedded))
        return (x, tokens != self.pad) if self.with_mask else x


class Attention(nn.Module):
    """``x + out(attend(norm(x), memory))``; without ``memory`` the layer attends to itself."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.rate = num_heads, dropout
        self.norm = nn.LayerNorm(hidden_size)
        self.query, self.key, self.value, self.out = (xavier(hidden_size, hidden_size) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        normed = self.norm(x)
        seen = normed if memory is None else memory
        query, key, value = (
            heads(part, self.num_heads) for part in (self.query(normed), self.key(seen), self.value(seen))
        )
        visible = None if mask is None else mask[:, None, None, :]
        mixed = attended(query, key, value, self.rate if self.training else 0.0, visible, causal=is_causal)
        return x + self.dropout(self.out(mixed))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """``x + down(relu(up(norm(x))))``."""

    def __init__(self, hidden_size: int, inner_size: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.up, self.down = xavier(hidden_size, inner_size), xavier(inner_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.dropout(F.relu(self.up(self.norm(x))))))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """An encoder layer; the last one also holds the final norm."""

    def __init__(self, hidden_size: int, num_heads: int, inner_size: int, dropout: float, last: bool) -> None:
        super().__init__()
        self.attention = Attention(hidden_size, num_heads, dropout)
        self.feed_forward = FeedForward(hidden_size, inner_size, dropout)
        self.norm = nn.LayerNorm(hidden_size) if last else nn.Identity()

    def forward(self, x: Tensor, source_mask: Tensor) -> Tensor:
        y: Tensor = self.norm(self.feed_forward(self.attention(x, mask=source_mask)))
        return y


class Decoder(nn.Module):
    """A decoder layer: itself, the memory, feed-forward. The target's padding is at its end, where no token looks."""

    def __init__(self, hidden_size: int, num_heads: int, inner_size: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(hidden_size, num_heads, dropout)
        self.cross_attention = Attention(hidden_size, num_heads, dropout)
        self.feed_forward = FeedForward(hidden_size, inner_size, dropout)

    def forward(self, y: Tensor, memory: Tensor, source_mask: Tensor) -> Tensor:
        y = self.attention(y, is_causal=True)
        z: Tensor = self.feed_forward(self.cross_attention(y, memory=memory, mask=source_mask))
        return z


def xavier(size_in: int, size_out: int) -> nn.Linear:
    """A linear map that starts with Glorot's uniform weights."""
    made = nn.Linear(size_in, size_out)
    nn.init.xavier_uniform_(made.weight)
    nn.init.zeros_(made.bias)
    return made


def translation(
    *,
    vocab_size: int,
    target_vocab_size: int = 0,
    hidden_size: int = 512,
    num_layers: int = 6,
    num_decoder_layers: int = 0,
    num_heads: int = 8,
    intermediate_size: int = 0,
    sequence_length: int = 128,
    dropout: float = 0.1,
    label_smoothing: float = 0.1,
    pad: int = PAD,
    tied: bool = True,
    seed: int = 0,
) -> Model:
    """The Transformer; the defaults are its base size. 0 means: as the source, as the encoder, four times the hidden
    size.

    Inputs ``source`` and ``target_in``; targets are the sentence shifted by one, ``pad`` where it has ended. ``tied``:
    the head is the target embedding, and the source embedding too where the vocabularies are one.
    """
    positive(vocab_size=vocab_size, hidden_size=hidden_size, num_layers=num_layers, sequence_length=sequence_length)
    head_size_of(hidden_size, num_heads)
    target_vocab_size, num_decoder_layers = target_vocab_size or vocab_size, num_decoder_layers or num_layers
    sizes = (hidden_size, num_heads, intermediate_size or 4 * hidden_size, dropout)
    source = partial(Embedding, vocab_size, hidden_size, dropout, pad, True)
    target = partial(Embedding, target_vocab_size, hidden_size, dropout, pad, False)
    layers = [Layer(source, reads=("source",), writes=("x", "source_mask"), name="source embedding")]
    for index in range(num_layers):
        last = index == num_layers - 1
        layers.append(
            Layer(
                partial(Encoder, *sizes, last),
                reads=("x", "source_mask"),
                writes=("memory",) if last else ("x",),
                name=f"encoder {index}",
                cost_key="encoder",
            )
        )
    layers.append(Layer(target, reads=("target_in",), writes=("y",), name="target embedding"))
    for index in range(num_decoder_layers):
        reads = ("y", "memory", "source_mask")
        layers.append(Layer(partial(Decoder, *sizes), reads, ("y",), name=f"decoder {index}", cost_key="decoder"))
    head = partial(Head, partial(nn.LayerNorm, hidden_size), hidden_size, target_vocab_size, hidden_size**-0.5)
    layers.append(Layer(head, reads=("y",), writes=("y",), name="head"))
    owners = [(num_layers + 1, "tokens.weight"), (len(layers) - 1, "projection.weight")]
    if target_vocab_size == vocab_size:
        owners.insert(0, (0, "tokens.weight"))
    weights = (TiedWeight(tuple(owners)),) if tied else ()
    return Model(
        layers=tie(seed_layers(layers, seed), weights),
        loss=TokenLoss(ignored=pad, smoothing=label_smoothing),
        tied=weights,
        sequence_length=sequence_length,
        vocab_size=target_vocab_size,
        hidden_size=hidden_size,
        attention_flops=12.0 * (num_layers + 2 * num_decoder_layers) * hidden_size * sequence_length,
        pair_flops=(12.0 * num_layers * hidden_size, 12.0 * num_decoder_layers * hidden_size),
    )
