"""The sum of all words of a piece of memory: whether a copy is whole."""

from __future__ import annotations

import torch
from torch import Tensor


def word_sum(tensor: Tensor) -> int:
    """The sum of all 64-bit words: at the speed of memory, and a word that is old or missing shows."""
    memory = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = memory.numel() // 8 * 8
    rest = int.from_bytes(bytes(memory[whole:].tolist()), "little") if whole < memory.numel() else 0
    begin = memory.storage_offset() % 8
    words = memory[:whole] if not begin else memory[:whole].clone()
    return (int(words.view(torch.int64).sum()) + rest + 2**63) % 2**64 - 2**63
