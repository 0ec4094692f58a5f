"""The contract between data and training: a data set answers ``batch(indices)``; and the data sets by name.

It is a map from example numbers to tensors and nothing else. What comes in which order is ``BatchOrder``'s business,
and how a batch is cut into microbatches is the caller's: ``batch`` is pure, so the units of a step are ``batch`` of
parts of the indices.

``load`` is the one place where a config's ``dataset`` section meets a reader. A reader's keyword arguments are the
options that ``dataset.extra`` may hold. They are checked here against its signature, so that a misspelt or ill-typed
option is a sentence before anything is read.
"""

from __future__ import annotations

import random
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vpipe.data.order import BatchOrder, Indices
from vpipe.errors import UserError
from vpipe.registry import DATASET_REGISTRY, check_options

if TYPE_CHECKING:
    from torch import Tensor

    Tensors: TypeAlias = Tensor | dict[str, Tensor]

IGNORE = -100
"""The target of a position that has no label, where a data set does not say otherwise: what torch's cross entropy
skips.
"""


class Batch(NamedTuple):
    """Some examples as tensors; the first dimension of each is the example."""

    inputs: Tensors
    """What the first stage reads: a tensor, or a dict whose keys are the names that the model's layers read."""
    targets: Tensors
    """What the last stage's loss reads. How many of them count, the model says."""


class DataSet(ABC):
    """Examples by number, with what a model must know about them."""

    vocab_size: int
    """Token ids are below this."""
    ignore_index: int = IGNORE
    """The target value that the loss must skip."""
    pad_id: int | None = None
    """The id that fills short inputs; None where all examples have one length."""
    tokenizer: Any = None
    """A ``tokenizers.Tokenizer``, or None where the data came as numbers."""
    lengths: Indices | None = None
    """Tokens per example, where batches can be made by tokens."""
    groups: tuple[int, ...] | None = None
    """Sizes of consecutive runs that are cheap to read together; see ``BatchOrder``."""
    draws: bool = False
    """Whether ``batch`` may draw random numbers: from torch's, numpy's and Python's generators."""
    notes: tuple[str, ...] = ()
    """What a reader has to say, such as how much is left out."""
    valid: DataSet | None = None
    """Held-out examples with the same vocabulary; None where there are too few to hold any out."""

    @abstractmethod
    def __len__(self) -> int:
        """How many examples there are; of a stream ``ENDLESS``."""

    @abstractmethod
    def batch(self, indices: Sequence[int]) -> Batch:
        """The named examples, in this order. Reads nothing but its argument: the same indices give the same tensors."""

    def first(self, count: int) -> Batch:
        """The first examples, ``count`` or as many as there are."""
        return self.batch(range(min(len(self), count)))

    def order(
        self,
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> BatchOrder:
        """The order of this data set's batches, by its lengths and groups where it has them."""
        return BatchOrder(
            len(self) if self.lengths is None else self.lengths,
            batch_size=batch_size,
            max_tokens=max_tokens,
            seed=seed,
            groups=self.groups,
            shuffle=shuffle,
        )

    def split(self, test_size: float = 0.1, seed: int = 1024) -> tuple[DataSet, DataSet]:
        """Two disjoint parts drawn by ``seed``: the larger, and about ``test_size`` of the examples (at least one)."""
        if not 0.0 < test_size < 1.0:
            raise UserError(f"the held-out share is {test_size}; it must lie between 0 and 1, for example 0.1")
        if len(self) < 2:
            raise UserError(f"{len(self)} examples cannot be split in two; use more data or a shorter sequence_length")
        num_held_out = min(len(self) - 1, max(1, round(len(self) * test_size)))
        (drawn,) = BatchOrder(len(self), batch_size=len(self), seed=seed)
        return Subset(self, drawn[num_held_out:]), Subset(self, drawn[:num_held_out])


class Subset(DataSet):
    """Some examples of another data set, in its order."""

    def __init__(self, whole: DataSet, members: Indices) -> None:
        self._whole, self._members = whole, np.sort(members)
        self.vocab_size, self.ignore_index = whole.vocab_size, whole.ignore_index
        self.pad_id, self.tokenizer, self.notes = whole.pad_id, whole.tokenizer, whole.notes
        self.lengths = None if whole.lengths is None else whole.lengths[self._members]
        if whole.groups is not None:
            ends = np.searchsorted(self._members, np.cumsum(whole.groups))
            self.groups = tuple(int(n) for n in np.diff(ends, prepend=0) if n > 0)

    def __len__(self) -> int:
        return len(self._members)

    def batch(self, indices: Sequence[int]) -> Batch:
        return self._whole.batch([int(i) for i in self._members[np.asarray(indices, dtype=np.int64)]])


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Within, what torch's, numpy's and Python's own generators draw follows from ``numbers``; afterwards they go on as
    if nothing had been drawn."""
    import torch

    words = np.random.SeedSequence(list(numbers)).generate_state(4)
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(int(words[0]) << 31 | int(words[1]) >> 1)
    np.random.seed(words)
    random.seed(words.tobytes())
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def hold_out(whole: DataSet, test_size: float = 0.1, seed: int = 1024) -> DataSet:
    """The training part of ``whole`` with the rest as its ``valid``, for data that come in one piece."""
    if len(whole) < 2 or test_size == 0:
        return whole
    train, valid = whole.split(test_size, seed)
    train.valid = valid
    return train


def check_vocabulary(ids: NDArray[Any], vocab_size: int, where: str) -> None:
    """Token ids outside the vocabulary would be an index error deep in an embedding; say it here, with the place."""
    if ids.size == 0:
        return
    if ids.dtype.kind not in "iu":
        raise UserError(f"{where} has token ids of type {ids.dtype}, which are no whole numbers; build the data again")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise UserError(
            f"{where} has the token id {bad}, but the vocabulary has {vocab_size} (ids 0 to {vocab_size - 1}); "
            "set vocab_size to that of the tokenizer that wrote the data, or build the data again"
        )


def options(name: str) -> dict[str, Any]:
    """The options of a data set with their defaults: what ``dataset.extra`` may hold beside ``path``."""
    parameters = signature(_reader(name)).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is Parameter.KEYWORD_ONLY and p.name != "seed"}


def load(
    name: str,
    *,
    path: Path | str | None = None,
    sequence_length: int = 128,
    seed: int = 1024,
    extra: Mapping[str, Any] | None = None,
) -> DataSet:
    """A data set ready to train on; its ``valid`` is the held-out part.

    ``path`` is where the data lie (``extra["path"]`` says the same). ``seed`` draws the held-out examples where the
    data have none of their own. ``extra`` are the options of the named data set; ``options(name)`` lists them.
    """
    given = dict(extra or {})
    place = given.pop("path", None) if path is None else path
    if place is not None and not isinstance(place, str | Path):
        raise UserError(f"dataset.extra.path is {place!r}; it must be the path of a folder or a file")
    reader = _reader(name)
    check_options(name, reader, given, "dataset.extra", ["path", *options(name)])
    return typing.cast("DataSet", reader(None if place is None else Path(place), sequence_length, seed=seed, **given))


def _reader(name: str) -> Callable[..., Any]:
    reader: Callable[..., Any] = DATASET_REGISTRY.get(DATASET_REGISTRY.meant(name))
    return reader
