"""LLaMA as a list of layers: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Rotary angles depend on positions only, so every block computes them instead of receiving them: they are smaller to make
than to send.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vpipe.errors import UserError
from vpipe.models.gpt import Head, attended, causal, heads, initialised
from vpipe.models.model import Model, head_size_of, positive


class TokenEmbedding(nn.Module):
    """Tokens only: positions enter in the attention."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(tokens)
        return embedded


class RMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x²) + eps)``, the statistics in fp32."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        exact = x if x.dtype == torch.float64 else x.float()
        return self.weight * (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotary_angles(length: int, head_size: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) of shape (length, head_size): position times a frequency that falls from 1 to 1/theta, each for two
    channels."""
    channels = torch.arange(0, head_size, 2, dtype=torch.int64, device=like.device).float()
    frequencies = 1.0 / theta ** (channels / head_size)
    angles = torch.outer(torch.arange(length, device=like.device).float(), frequencies).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (channel i, channel i + half) of ``x`` by its angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Pre-norm causal attention with its residual; several query heads share a key and value head."""

    def __init__(
        self, hidden_size: int, num_heads: int, num_kv_heads: int, head_size: int, eps: float, theta: float
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size, self.theta = num_heads, num_kv_heads, head_size, theta
        self.norm = RMSNorm(hidden_size, eps)
        self.query = linear(hidden_size, num_heads * head_size)
        self.key = linear(hidden_size, num_kv_heads * head_size)
        self.value = linear(hidden_size, num_kv_heads * head_size)
        self.out = linear(num_heads * head_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        query, key = heads(self.query(normed), self.num_heads), heads(self.key(normed), self.num_kv_heads)
        value = heads(self.value(normed), self.num_kv_heads)
        cos, sin = rotary_angles(x.shape[1], self.head_size, self.theta, query)
        return x + self.out(attended(rotate(query, cos, sin), rotate(key, cos, sin), value, causal=True))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    """Pre-norm gated feed-forward with its residual: ``x + down(silu(gate(norm(x))) * up(norm(x)))``."""

    def __init__(self, hidden_size: int, intermediate_size: int, eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden_size, eps)
        self.gate = linear(hidden_size, intermediate_size)
        self.up = linear(hidden_size, intermediate_size)
        self.down = linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))  # type: ignore[no-any-return]


def linear(size_in: int, size_out: int) -> nn.Linear:
    """A map without bias, as everywhere in LLaMA."""
    return initialised(nn.Linear(size_in, size_out, bias=False), 0.02)


def llama(
    *,
    vocab_size: int,
    hidden_size: int = 512,
    num_layers: int = 16,
    num_heads: int = 16,
    sequence_length: int = 128,
    num_kv_heads: int = 0,
    intermediate_size: int = 0,
    rms_norm_eps: float = 1e-6,
    rope_theta: float = 10000.0,
    tied: bool = False,
    split: bool = False,
    seed: int = 0,
) -> Model:
    """LLaMA. ``num_kv_heads`` 0 is one per query head; ``intermediate_size`` 0 is LLaMA's: 8/3 of the hidden size, a
    multiple of 256.

    ``tied``: the head is the token embedding. ``split``: two layers per block.
    """
    positive(vocab_size=vocab_size, hidden_size=hidden_size, num_layers=num_layers, sequence_length=sequence_length)
    head_size = head_size_of(hidden_size, num_heads)
    num_kv_heads = num_kv_heads or num_heads
    if num_heads % num_kv_heads:
        raise UserError(f"model.num_heads {num_heads} is not a multiple of model.num_kv_heads {num_kv_heads}")
    if head_size % 2:
        raise UserError(
            f"model.hidden_size {hidden_size} over model.num_heads {num_heads} gives heads of {head_size}; "
            "rotary positions need an even size"
        )
    inner = intermediate_size or -(-(8 * hidden_size // 3) // 256) * 256
    attention = partial(Attention, hidden_size, num_heads, num_kv_heads, head_size, rms_norm_eps, rope_theta)
    feed_forward = partial(SwiGLU, hidden_size, inner, rms_norm_eps)
    return causal(
        partial(TokenEmbedding, vocab_size, hidden_size),
        attention,
        feed_forward,
        partial(Head, partial(RMSNorm, hidden_size, rms_norm_eps), hidden_size, vocab_size),
        num_layers=num_layers,
        split=split,
        tied=tied,
        seed=seed,
        sequence_length=sequence_length,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        attention_flops=12.0 * num_layers * hidden_size * sequence_length,
    )
