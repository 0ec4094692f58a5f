"""Fixed random tensors of the right shapes: to measure speed and test machinery where no data are wanted.

The examples are drawn once from the seed, so every process holds the same ones. Nothing can be learnt from them but
themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vpipe.data.dataset import IGNORE, Batch, DataSet
from vpipe.data.tokenizer import EOS, PAD
from vpipe.errors import UserError, nearest

if TYPE_CHECKING:
    from vpipe.data.dataset import Tensors

KINDS = ("gpt", "bert", "translation")
_MASKED_SHARE = 0.15


class Synthetic(DataSet):
    """``num_examples`` examples; every token counts, except in BERT, where about 15 % do."""

    def __init__(
        self, inputs: Tensors, targets: Tensors, vocab_size: int, ignore_index: int, pad_id: int | None
    ) -> None:
        self._inputs, self._targets = inputs, targets
        self.vocab_size, self.ignore_index, self.pad_id = vocab_size, ignore_index, pad_id

    def __len__(self) -> int:
        return len(self._targets["masked_labels"] if isinstance(self._targets, dict) else self._targets)

    def batch(self, indices: Sequence[int]) -> Batch:
        chosen = torch.tensor(list(indices), dtype=torch.int64)
        inputs, targets = _pick(self._inputs, chosen), _pick(self._targets, chosen)
        return Batch(inputs, targets)


def _pick(values: Tensors, chosen: Tensor) -> Tensors:
    if isinstance(values, dict):
        return {name: value[chosen] for name, value in values.items()}
    return values[chosen]


def load(
    path: Path | None = None,
    sequence_length: int = 128,
    *,
    seed: int = 1024,
    kind: str = "gpt",
    vocab_size: int = 1024,
    num_examples: int = 1024,
    num_valid_examples: int = 64,
) -> DataSet:
    """Random examples for a ``kind`` of model: gpt (also LLaMA), bert, translation. ``path`` is not read."""
    if kind not in KINDS:
        raise UserError(f"there are no synthetic data for {kind!r}: use {', '.join(KINDS)}{nearest(kind, KINDS)}")
    if vocab_size < 8:
        raise UserError(f"vocab_size is {vocab_size}; synthetic data need 8 or more, 4 of them special")
    for name, value in (("num_examples", num_examples), ("sequence_length", sequence_length)):
        if value < 1:
            raise UserError(f"{name} is {value}; it must be 1 or more")
    train = _make(kind, num_examples, sequence_length, vocab_size, np.random.default_rng([seed, 0]))
    if num_valid_examples > 0:
        train.valid = _make(kind, num_valid_examples, sequence_length, vocab_size, np.random.default_rng([seed, 1]))
    return train


def _make(kind: str, num: int, length: int, vocab_size: int, random: np.random.Generator) -> Synthetic:
    def tokens(columns: int) -> Tensor:
        return torch.from_numpy(random.integers(4, vocab_size, size=(num, columns), dtype=np.int64))

    if kind == "gpt":
        drawn = tokens(length + 1)
        return Synthetic(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous(), vocab_size, IGNORE, None)
    if kind == "translation":
        source, target_out = tokens(length), tokens(length)
        source[:, -1] = target_out[:, -1] = EOS
        target_in = torch.cat([torch.full((num, 1), EOS, dtype=torch.int64), target_out[:, :-1]], dim=1)
        made = Synthetic({"source": source, "target_in": target_in}, target_out, vocab_size, PAD, PAD)
        made.lengths = np.full(num, length, dtype=np.int64)  # so that batches by tokens work as with real pairs
        return made
    answers = tokens(length)
    masked = torch.from_numpy(random.random((num, length)) < _MASKED_SHARE)
    masked[:, 0] = True  # an example without any label would make its loss undefined
    inputs = {
        "tokens": tokens(length),
        "segments": (torch.arange(length) >= length // 2).long().repeat(num, 1),
        "mask": torch.ones((num, length), dtype=torch.bool),
    }
    targets = {
        "masked_labels": answers.masked_fill(~masked, -1),
        "next_sentence": torch.from_numpy(random.integers(0, 2, size=num, dtype=np.int64)),
    }
    return Synthetic(inputs, targets, vocab_size, -1, 0)
