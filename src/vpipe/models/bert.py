"""BERT for pre-training as 2N + 1 blocks: VPipe's plans count blocks, and theirs must fit ours.

    block 0          embeddings and the first attention half
    blocks 1..2N−1   feed-forward and attention halves in turn
    block 2N         both heads: masked tokens and next sentence

The embeddings are a look-up and cost little, so they ride with the first half. The heads hold the largest matrix
product and stand alone, where a plan can place them. Every attention half reads ``mask``, which is an input of the
model: it travels from the first stage to each of them, and the blocks between do not carry it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vpipe.layer import Layer, TiedWeight
from vpipe.models.gpt import Make, attended, heads, initialised
from vpipe.models.losses import PretrainingLoss
from vpipe.models.model import Model, fits, head_size_of, positive, seed_layers, tie

EPS = 1e-12


class Embeddings(nn.Module):
    """Words, segments and learned positions, normalised."""

    def __init__(self, vocab_size: int, sequence_length: int, hidden_size: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, hidden_size)
        self.positions = nn.Embedding(sequence_length, hidden_size)
        self.segments = nn.Embedding(2, hidden_size)
        self.norm = nn.LayerNorm(hidden_size, EPS)
        self.dropout = nn.Dropout(dropout)
        for part in (self.words, self.positions, self.segments):
            nn.init.normal_(part.weight, std=0.02)

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        length = tokens.shape[1]
        fits(length, self.positions.num_embeddings)
        positions = torch.arange(length, device=tokens.device)
        embedded = self.words(tokens) + self.segments(segments.long()) + self.positions(positions)
        normed: Tensor = self.dropout(self.norm(embedded))
        return normed


class Attention(nn.Module):
    """The attention half of an encoder layer: ``norm(x + out(attend(x)))``; ``mask`` is 1 where a token is, 0 where
    padding is."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.rate = num_heads, dropout
        self.qkv = initialised(nn.Linear(hidden_size, 3 * hidden_size), 0.02)
        self.out = initialised(nn.Linear(hidden_size, hidden_size), 0.02)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(hidden_size, EPS)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (heads(part, self.num_heads) for part in self.qkv(x).chunk(3, -1))
        visible = mask.bool()[:, None, None, :]
        mixed = attended(query, key, value, self.rate if self.training else 0.0, visible)
        y: Tensor = self.norm(x + self.dropout(self.out(mixed)))
        return y


class FirstBlock(nn.Module):
    """The embeddings and the first attention half."""

    def __init__(self, embeddings: Make, attention: Make) -> None:
        super().__init__()
        self.embeddings, self.attention = embeddings(), attention()

    def forward(self, tokens: Tensor, segments: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.attention(self.embeddings(tokens, segments), mask)
        return y


class FeedForward(nn.Module):
    """The feed-forward half of an encoder layer: ``norm(x + down(gelu(up(x))))``."""

    def __init__(self, hidden_size: int, inner_size: int, dropout: float) -> None:
        super().__init__()
        self.up = initialised(nn.Linear(hidden_size, inner_size), 0.02)
        self.down = initialised(nn.Linear(inner_size, hidden_size), 0.02)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(hidden_size, EPS)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x + self.dropout(self.down(F.gelu(self.up(x)))))
        return y


class Heads(nn.Module):
    """Logits of every token ``(B, L, vocab)`` and of the question whether the second sentence follows the first ``(B,
    2)``."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.transform = initialised(nn.Linear(hidden_size, hidden_size), 0.02)
        self.norm = nn.LayerNorm(hidden_size, EPS)
        self.words = initialised(nn.Linear(hidden_size, vocab_size), 0.02)
        self.pooler = initialised(nn.Linear(hidden_size, hidden_size), 0.02)
        self.next_sentence = initialised(nn.Linear(hidden_size, 2), 0.02)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.words(self.norm(F.gelu(self.transform(x))))
        sentence = self.next_sentence(torch.tanh(self.pooler(x[:, 0])))
        return tokens, sentence


def bert(
    *,
    vocab_size: int = 30522,
    hidden_size: int = 1024,
    num_layers: int = 24,
    num_heads: int = 16,
    sequence_length: int = 128,
    intermediate_size: int = 0,
    dropout: float = 0.1,
    tied: bool = True,
    seed: int = 0,
) -> Model:
    """BERT; the defaults are BERT-large at 128 tokens. ``intermediate_size`` 0 is four times the hidden size. ``tied``:
    the words' embedding is also the matrix of their logits, which an asynchronous schedule cannot have.

    Inputs ``tokens``, ``segments``, ``mask``; output (token logits, sentence logits); targets ``masked_labels`` (−1
    where nothing is masked) and ``next_sentence``."""
    positive(vocab_size=vocab_size, hidden_size=hidden_size, num_layers=num_layers, sequence_length=sequence_length)
    head_size_of(hidden_size, num_heads)
    embeddings = partial(Embeddings, vocab_size, sequence_length, hidden_size, dropout)
    attention = partial(Attention, hidden_size, num_heads, dropout)
    feed_forward = partial(FeedForward, hidden_size, intermediate_size or 4 * hidden_size, dropout)
    first = partial(FirstBlock, embeddings, attention)
    layers = [Layer(first, reads=("tokens", "segments", "mask"), name="embeddings and attention 0")]
    for half in range(1, 2 * num_layers):
        name = f"{'feed-forward' if half % 2 else 'attention'} {half // 2}"
        if half % 2:
            layers.append(Layer(feed_forward, name=name, cost_key="feed-forward"))
        else:
            layers.append(Layer(attention, reads=("x", "mask"), name=name, cost_key="attention"))
    layers.append(Layer(partial(Heads, hidden_size, vocab_size), name="heads"))
    weights = (TiedWeight(((0, "embeddings.words.weight"), (2 * num_layers, "words.weight"))),) if tied else ()
    return Model(
        layers=tie(seed_layers(layers, seed), weights),
        loss=PretrainingLoss(),
        tied=weights,
        sequence_length=sequence_length,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        attention_flops=12.0 * num_layers * hidden_size * sequence_length
        - 6.0 * hidden_size * (hidden_size + 2) * (1 - 1 / sequence_length),  # of the pooler, which reads one token
    )
