"""Which examples make up the batches of an epoch: a pure function of ``(seed, epoch)`` and of what has been read of it.

A pipeline's first and last stage read the same batch without talking to each other, and a resumed run continues with
the very example that the interrupted one would have read next. Both follow if the order keeps no hidden random state.
What has been read is said in examples, or in batches by tokens; a run that resumes with other batches reads what is
left, whatever cut it before: no example is lost or read twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vpipe.errors import UserError

Indices = NDArray[np.int64]

PartsRead = tuple[tuple[int, int], ...]
"""What has been read of an epoch, part after part: ``(0, examples)``, or ``(max_tokens, batches)`` where batches of so
many tokens were made."""

_EXAMPLES, _GROUPS, _BATCHES = range(3)  # independent random streams of one epoch


ENDLESS = 2**62
"""Stands for the number of examples of a stream, which is not known."""


class _StreamBatches(Sequence[Indices]):
    """Batches of ``size`` examples one after the other, from ``first`` on."""

    def __init__(self, first: int, size: int) -> None:
        self._first, self._size = first, size

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(ENDLESS))]
        begin = self._first + index * self._size
        return np.arange(begin, begin + self._size, dtype=np.int64)


class BatchOrder:
    """The shuffled batches of a data set.

    ``examples`` is the number of examples, or the length of each. With ``batch_size`` a batch is that many examples.
    With ``max_tokens`` (needs lengths) a batch holds examples of similar length, as many as fit when all are padded to
    the longest: rows x longest <= ``max_tokens``.

    ``groups`` are the sizes of consecutive runs that are cheap to read together (the shards of a large data set): the
    groups are shuffled, then the examples inside each, so that a reader holds one or two of them at a time.
    """

    def __init__(
        self,
        examples: int | Sequence[int] | Indices,
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
        groups: Sequence[int] | None = None,
        shuffle: bool = True,
    ) -> None:
        self._lengths = None if isinstance(examples, int) else np.asarray(examples, dtype=np.int64)
        self._num_examples = examples if isinstance(examples, int) else len(examples)
        self._batch_size, self._max_tokens, self._seed = batch_size, max_tokens, seed
        self._groups = list(groups) if groups is not None else [self._num_examples]
        self._shuffle = shuffle
        self._check()

    def __iter__(self) -> Iterator[Indices]:
        """The batches of the first epoch."""
        return iter(self.batches(0))

    def batches(self, epoch: int, read: PartsRead = ()) -> Sequence[Indices]:
        """The batches that are left of an epoch; the last of a ``batch_size`` may be smaller."""
        if self._num_examples == ENDLESS:
            return _StreamBatches(sum(count for _, count in read), self._batch_size or 1)
        left, done = self._shuffled_examples(epoch), 0
        if read and read[-1][0] == self._max_tokens:  # the same batches go on
            *earlier, (_, done) = read
            read = tuple(earlier)
        for max_tokens, count in read:
            taken = self._by_tokens(left, epoch, max_tokens)[:count] if max_tokens else [left[:count]]
            left = left[~np.isin(left, np.concatenate([left[:0], *taken]))]
        if self._max_tokens is not None:
            return self._by_tokens(left, epoch, self._max_tokens)[done:]
        assert self._batch_size is not None
        return [left[begin : begin + self._batch_size] for begin in range(0, len(left), self._batch_size)]

    def extended(self, read: PartsRead, num_batches: int) -> PartsRead:
        """What has been read once ``num_batches`` more are, none of them a smaller last one."""
        kind, count = self._max_tokens or 0, num_batches * (1 if self._max_tokens else self._batch_size or 0)
        if read and read[-1][0] == kind:
            return (*read[:-1], (kind, read[-1][1] + count))
        return (*read, (kind, count)) if count else read

    def _check(self) -> None:
        if self._num_examples == 0:
            raise UserError("the data set has 0 examples; check its path, or build it again with a larger --limit")
        if self._seed < 0:
            raise UserError(f"the data seed is {self._seed}; it must be 0 or more")
        for name, value in (("batch_size", self._batch_size), ("max_tokens", self._max_tokens)):
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}; it must be 1 or more")
        if sum(self._groups) != self._num_examples:
            raise ValueError(f"groups hold {sum(self._groups)} examples, the data set {self._num_examples}")
        if self._max_tokens is None:
            if self._batch_size is None:
                raise UserError("batches need a size: give batch_size or max_tokens")
            return
        if self._lengths is None:
            raise UserError(
                "max_tokens needs examples of different lengths; this data set has one length: use batch_size"
            )
        longest = int(self._lengths.argmax())
        if self._lengths[longest] > self._max_tokens:
            raise UserError(
                f"example {longest} has {self._lengths[longest]} tokens, more than max_tokens {self._max_tokens}; "
                "raise max_tokens or lower sequence_length"
            )

    def _by_tokens(self, order: Indices, epoch: int, max_tokens: int) -> list[Indices]:
        """Where examples of ascending length are cut depends on their lengths only: every whole epoch has as many
        batches."""
        assert self._lengths is not None
        order = order[np.argsort(self._lengths[order], kind="stable")]
        cuts = [0]
        for i, length in enumerate(self._lengths[order].tolist()):
            if (i + 1 - cuts[-1]) * length > max_tokens and i > cuts[-1]:
                cuts.append(i)
        batches = [order[start:stop] for start, stop in pairwise([*cuts, len(order)]) if start < stop]
        return [batches[i] for i in self._shuffled(len(batches), epoch, _BATCHES)] if self._shuffle else batches

    def _shuffled_examples(self, epoch: int) -> Indices:
        if not self._shuffle:
            return np.arange(self._num_examples, dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum(self._groups)])
        scores = self._scores(self._num_examples, epoch, _EXAMPLES)
        pieces = []
        for group in self._shuffled(len(self._groups), epoch, _GROUPS):
            start, stop = int(starts[group]), int(starts[group + 1])
            pieces.append(start + np.argsort(scores[start:stop], kind="stable"))
        return np.concatenate(pieces).astype(np.int64)

    def _shuffled(self, num: int, epoch: int, stream: int) -> Indices:
        return np.argsort(self._scores(num, epoch, stream), kind="stable").astype(np.int64)

    def _scores(self, num: int, epoch: int, stream: int) -> NDArray[np.uint64]:
        # Raw bits sorted by value, not Generator.permutation: numpy promises the same bits in every release, not the
        # same shuffle.
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, epoch, stream]))
        return np.asarray(bits.random_raw(num), dtype=np.uint64)
