"""Examples for models that predict the next token: GPT, LLaMA, the Chinese GPT-2.

Two layouts. ``TokenBlocks`` packs all documents into one stream and cuts it: every position counts, no padding is
computed. ``PaddedDocuments`` keeps one document per row: rows are comparable, short ones are padded and their padding
is not counted. Both give ``inputs`` and ``targets`` of shape (examples, sequence_length), the targets one token
further.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from vpipe.data.dataset import IGNORE, Batch, DataSet, check_vocabulary
from vpipe.data.token_cache import TokenCache, Tokens
from vpipe.data.tokenizer import encode, end_of_text, padding
from vpipe.errors import UserError


class TokenBlocks(DataSet):
    """One stream of tokens in consecutive blocks of ``sequence_length``; the target of a block's last token is the
    next block's first.
    """

    def __init__(self, stream: Tokens, sequence_length: int, vocab_size: int, tokenizer: Any = None) -> None:
        self._stream, self._length = stream, sequence_length
        self.vocab_size, self.tokenizer = vocab_size, tokenizer

    def __len__(self) -> int:
        return max(0, len(self._stream) - 1) // self._length

    def batch(self, indices: Sequence[int]) -> Batch:
        starts = np.asarray(indices, dtype=np.int64) * self._length
        rows = self._stream[starts[:, None] + np.arange(self._length + 1)]
        block = torch.from_numpy(rows.astype(np.int64))
        return Batch(block[:, :-1].contiguous(), block[:, 1:].contiguous())


class PaddedDocuments(DataSet):
    """One document per example, cut or padded to ``sequence_length``.

    ``last_only`` counts the prediction of each document's last token only: cloze data, whose last token is the answer.
    """

    def __init__(
        self,
        documents: Sequence[Tokens],
        sequence_length: int,
        vocab_size: int,
        *,
        pad_id: int,
        last_only: bool = False,
        tokenizer: Any = None,
    ) -> None:
        self._length, self._last_only, self._pad_id = sequence_length, last_only, pad_id
        self.vocab_size, self.pad_id, self.tokenizer = vocab_size, pad_id, tokenizer
        # A cloze keeps its end, where the answer is; other documents keep their beginning.
        side = slice(-(sequence_length + 1), None) if last_only else slice(0, sequence_length + 1)
        self._documents = [document[side] for document in documents if len(document) > 1]

    def __len__(self) -> int:
        return len(self._documents)

    def batch(self, indices: Sequence[int]) -> Batch:
        inputs = torch.full((len(indices), self._length), self._pad_id, dtype=torch.int64)
        targets = torch.full((len(indices), self._length), IGNORE, dtype=torch.int64)
        for row, index in enumerate(indices):
            document = torch.from_numpy(self._documents[index].astype(np.int64))
            last = len(document) - 1
            first = last - 1 if self._last_only else 0
            inputs[row, :last] = document[:-1]
            targets[row, first:last] = document[first + 1 :]
        return Batch(inputs, targets)


def from_documents(
    documents: Callable[[], Iterable[str]],
    tokenizer: Any,
    sequence_length: int,
    *,
    pack: bool,
    where: str,
    cache: TokenCache | None = None,
) -> DataSet:
    """Texts as a data set, an end-of-text token after each."""
    if sequence_length < 1:
        raise UserError(f"sequence_length is {sequence_length}; it must be 1 or more")
    end = end_of_text(tokenizer)
    tail = np.asarray([] if end is None else [end], dtype=np.int32)

    def pieces() -> Iterator[Tokens]:
        return (np.concatenate([ids, tail]) for ids in encode(tokenizer, documents()))

    vocab_size = int(tokenizer.get_vocab_size())
    data: DataSet
    if pack:
        stream = (cache or TokenCache(None)).stream(pieces)
        check_vocabulary(stream, vocab_size, where)
        data = TokenBlocks(stream, sequence_length, vocab_size, tokenizer)
        size = f"{len(stream)} tokens, fewer than the {sequence_length + 1} of one sequence and its targets"
    else:
        rows = list(pieces())
        data = PaddedDocuments(rows, sequence_length, vocab_size, pad_id=padding(tokenizer), tokenizer=tokenizer)
        size = f"{len(rows)} documents, none of two tokens"
    if len(data) == 0:
        raise UserError(f"{where} has {size}; use more text or a smaller sequence_length")
    return data
