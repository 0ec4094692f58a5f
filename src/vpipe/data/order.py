"""Which examples make up batch ``n`` of an epoch: a pure function of ``(seed, epoch, n)``.

A pipeline's first and last stage read the same batch without talking to each other, and a resumed run continues with
the very batch that the interrupted one would have read next. Both follow if the order keeps no hidden random state: a
position is two integers, and to resume is to jump.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from vpipe.errors import UserError

Indices = NDArray[np.int64]

_EXAMPLES, _GROUPS, _BATCHES = range(3)  # independent random streams of one epoch


class BatchOrder:
    """The shuffled batches of a data set for one of ``num_replicas`` data-parallel replicas.

    ``examples`` is the number of examples, or the length of each. With ``batch_size`` a batch is that many examples
    *per replica*. With ``max_tokens`` (needs lengths) a batch holds examples of similar length, as many as fit when
    all are padded to the longest: rows x longest <= ``max_tokens``; ``batch_size`` then caps the rows.

    ``groups`` are the sizes of consecutive runs that are cheap to read together (the shards of a large data set): the
    groups are shuffled, then the examples inside each, so that a reader holds one or two of them at a time.

    A batch of the whole pipeline is the concatenation over replicas, and depends on ``batch_size * num_replicas``
    only: a run that resumes with twice the replicas and half the batch size reads on where the old one stopped.

    ``drop_last`` leaves out the examples that do not fill a batch on every replica. Without it the last batch is
    shared out as evenly as it can be, and may be empty on some replicas.
    """

    def __init__(
        self,
        examples: int | Sequence[int] | Indices,
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
        epoch: int = 0,
        batch: int = 0,
        num_replicas: int = 1,
        replica: int = 0,
        groups: Sequence[int] | None = None,
        shuffle: bool = True,
        drop_last: bool = True,
    ) -> None:
        self.lengths = None if isinstance(examples, int) else np.asarray(examples, dtype=np.int64)
        self.num_examples = examples if isinstance(examples, int) else len(examples)
        self.batch_size, self.max_tokens, self.seed = batch_size, max_tokens, seed
        self.num_replicas, self.replica = num_replicas, replica
        self.groups = list(groups) if groups is not None else [self.num_examples]
        self.shuffle, self.drop_last = shuffle, drop_last
        self._check()
        self._epoch_of_table = -1
        self._table: list[Indices] = []
        self.epoch, self.batch = 0, 0
        self.restore({"epoch": epoch, "batch": batch})

    def __len__(self) -> int:
        """The number of batches in an epoch: the same for every replica and every epoch."""
        return self._num_batches

    def indices(self, batch: int, epoch: int | None = None) -> list[int]:
        """The examples of one batch on this replica."""
        if not 0 <= batch < len(self):
            raise IndexError(f"batch {batch} of an epoch of {len(self)} batches")
        epoch = self.epoch if epoch is None else epoch
        if epoch != self._epoch_of_table:
            self._table, self._epoch_of_table = self._lay_out(epoch), epoch
        if self.max_tokens is not None:
            unit = batch * self.num_replicas + self.replica
            return [int(i) for i in self._table[unit]] if unit < len(self._table) else []
        assert self.batch_size is not None
        order, step = self._table[0], self.batch_size * self.num_replicas
        whole = order[batch * step : (batch + 1) * step]
        return [int(i) for i in np.array_split(whole, self.num_replicas)[self.replica]]

    def __iter__(self) -> Iterator[list[int]]:
        """The rest of this epoch's batches."""
        for epoch, batch in self.positions():
            yield self.indices(batch, epoch)

    def positions(self) -> Iterator[tuple[int, int]]:
        """The rest of this epoch as positions. While one is in hand the order stands at the next: a checkpoint taken
        inside the loop resumes behind the batch that was just used.
        """
        epoch = self.epoch
        while self.epoch == epoch:
            batch = self.batch
            self.batch += 1
            if self.batch == len(self):
                self.epoch, self.batch = epoch + 1, 0
            yield epoch, batch

    def state(self) -> dict[str, int]:
        """The position, for a checkpoint."""
        return {"epoch": self.epoch, "batch": self.batch}

    def restore(self, state: Mapping[str, int]) -> None:
        """Jump to a position."""
        epoch, batch = int(state["epoch"]), int(state["batch"])
        if epoch < 0 or not 0 <= batch < len(self):
            raise UserError(
                f"cannot resume at batch {batch} of epoch {epoch}: an epoch of this data has {len(self)} batches; "
                "resume with the data, batch size and number of replicas of the interrupted run"
            )
        self.epoch, self.batch = epoch, batch

    def _check(self) -> None:
        if self.num_examples == 0:
            raise UserError("the data set has 0 examples; check its path, or build it again with a larger --limit")
        if self.seed < 0:
            raise UserError(f"the data seed is {self.seed}; it must be 0 or more")
        if not 0 <= self.replica < self.num_replicas:
            raise UserError(f"replica {self.replica} does not exist: there are {self.num_replicas}, counted from 0")
        for name, value in (("batch_size", self.batch_size), ("max_tokens", self.max_tokens)):
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}; it must be 1 or more")
        if sum(self.groups) != self.num_examples:
            raise ValueError(f"groups hold {sum(self.groups)} examples, the data set {self.num_examples}")
        if self.max_tokens is not None:
            self._num_batches = self._count_by_tokens(self.max_tokens)
        elif self.batch_size is not None:
            step = self.batch_size * self.num_replicas
            self._num_batches = self.num_examples // step if self.drop_last else -(-self.num_examples // step)
            if self._num_batches == 0:
                raise UserError(
                    f"the data set has {self.num_examples} examples, fewer than one batch of {self.batch_size} "
                    f"on each of {self.num_replicas} replicas; use a smaller batch_size or more data"
                )
        else:
            raise UserError("batches need a size: give batch_size or max_tokens")

    def _count_by_tokens(self, max_tokens: int) -> int:
        if self.lengths is None:
            raise UserError(
                "max_tokens needs examples of different lengths; this data set has one length: use batch_size"
            )
        longest = int(self.lengths.argmax())
        if self.lengths[longest] > max_tokens:
            raise UserError(
                f"example {longest} has {self.lengths[longest]} tokens, more than max_tokens {max_tokens}; "
                "raise max_tokens or lower sequence_length"
            )
        units = len(self._cuts(np.sort(self.lengths))) - 1
        batches = units // self.num_replicas if self.drop_last else -(-units // self.num_replicas)
        if batches == 0:
            raise UserError(
                f"max_tokens {max_tokens} makes {units} batches, fewer than the {self.num_replicas} replicas; "
                "lower max_tokens or use more data"
            )
        return batches

    def _lay_out(self, epoch: int) -> list[Indices]:
        """By size: one array, the order of all examples. By tokens: one array per batch."""
        order = self._shuffled_examples(epoch)
        if self.max_tokens is None:
            return [order]
        assert self.lengths is not None
        order = order[np.argsort(self.lengths[order], kind="stable")]
        cuts = self._cuts(self.lengths[order])
        batches = [order[start:stop] for start, stop in pairwise(cuts)]
        if self.shuffle:
            batches = [batches[i] for i in self._shuffled(len(batches), epoch, _BATCHES)]
        return batches

    def _cuts(self, ascending: Indices) -> list[int]:
        """Where to cut examples of ascending length so that rows x longest fits. It depends on the lengths only, not
        on the shuffle, so every epoch has the same number of batches.
        """
        assert self.max_tokens is not None
        most_rows = self.batch_size or len(ascending)
        cuts = [0]
        for i, length in enumerate(ascending.tolist()):
            rows = i + 1 - cuts[-1]
            if rows > most_rows or rows * length > self.max_tokens:
                cuts.append(i)
        return [*cuts, len(ascending)]

    def _shuffled_examples(self, epoch: int) -> Indices:
        if not self.shuffle:
            return np.arange(self.num_examples, dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum(self.groups)])
        scores = self._scores(self.num_examples, epoch, _EXAMPLES)
        pieces = []
        for group in self._shuffled(len(self.groups), epoch, _GROUPS):
            start, stop = int(starts[group]), int(starts[group + 1])
            pieces.append(start + np.argsort(scores[start:stop], kind="stable"))
        return np.concatenate(pieces).astype(np.int64)

    def _shuffled(self, num: int, epoch: int, stream: int) -> Indices:
        return np.argsort(self._scores(num, epoch, stream), kind="stable").astype(np.int64)

    def _scores(self, num: int, epoch: int, stream: int) -> NDArray[np.uint64]:
        # Raw bits sorted by value, not Generator.permutation: numpy promises the same bits in every release, not the
        # same shuffle.
        bits = np.random.PCG64(np.random.SeedSequence([self.seed, epoch, stream]))
        return np.asarray(bits.random_raw(num), dtype=np.uint64)
