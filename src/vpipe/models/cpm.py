"""The Chinese GPT-2 of VPipe's `cpm` folder, as sizes of the one GPT-2 that we have."""

from __future__ import annotations

from vpipe.models.gpt import gpt2
from vpipe.models.model import Model


def cpm_medium(
    *,
    vocab_size: int = 30000,
    hidden_size: int = 1024,
    num_layers: int = 24,
    num_heads: int = 16,
    sequence_length: int = 1024,
    dropout: float = 0.1,
    split: bool = False,
    tied: bool = True,
    seed: int = 0,
) -> Model:
    """24 layers of 1024."""
    return gpt2(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        sequence_length=sequence_length,
        dropout=dropout,
        split=split,
        tied=tied,
        seed=seed,
    )


def cpm_large(
    *,
    vocab_size: int = 30000,
    hidden_size: int = 2560,
    num_layers: int = 32,
    num_heads: int = 32,
    sequence_length: int = 1024,
    dropout: float = 0.1,
    split: bool = False,
    tied: bool = True,
    seed: int = 0,
) -> Model:
    """32 layers of 2560."""
    return cpm_medium(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        sequence_length=sequence_length,
        dropout=dropout,
        split=split,
        tied=tied,
        seed=seed,
    )
