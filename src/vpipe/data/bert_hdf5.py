"""BERT pre-training examples in NVIDIA's HDF5 shards. All shards of a folder are one data set.

Masking was done when the shards were written. A shard stores the masked places as a list of positions that a 0 ends;
here they become one label per token, -1 where nothing is to be predicted. Shards are read whole, because they are
compressed: a row alone costs as much as its neighbours. What does not fit the memory budget is read shard by shard
(``groups`` tells the order to do so).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vpipe.data.dataset import Batch, DataSet, check_vocabulary, hold_out
from vpipe.data.files import existing, find_files, lines, require, split_of, unreadable
from vpipe.errors import UserError

SUFFIXES = (".hdf5", ".h5")
STRANGE = (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
"""What h5py raises over a damaged file."""
FIELDS = ("input_ids", "input_mask", "segment_ids", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels")
NVIDIA_VOCAB_SIZE = 30522
MEMORY = 512 * 2**20
"""Bytes of shards that a data set keeps."""

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Shard:
    """One file: its examples, tokens per example, and size in memory."""

    path: Path
    num_examples: int
    length: int
    num_bytes: int


class BertShards(DataSet):
    """The examples of all ``shards``, one after the other.

    ``inputs`` are ``tokens``, ``segments`` and ``mask`` (True where there is a token); ``targets`` are
    ``masked_labels`` and ``next_sentence`` (1: the second segment is a random one).
    """

    ignore_index = -1
    pad_id = 0

    def __init__(self, shards: Sequence[Shard], vocab_size: int, memory: int = MEMORY) -> None:
        self._shards, self._memory = list(shards), memory
        self._starts = np.concatenate([[0], np.cumsum([shard.num_examples for shard in shards])]).astype(np.int64)
        self._kept: OrderedDict[int, Arrays] = OrderedDict()
        self.vocab_size = vocab_size
        if sum(shard.num_bytes for shard in shards) > memory:
            self.groups = tuple(shard.num_examples for shard in shards)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def batch(self, indices: Sequence[int]) -> Batch:
        wanted = np.asarray(indices, dtype=np.int64)
        homes = np.searchsorted(self._starts, wanted, side="right") - 1
        rows: Arrays = {}
        for home in np.unique(homes):
            here = homes == home
            arrays = self._read(int(home))
            for name, values in arrays.items():
                part = values[wanted[here] - self._starts[home]]
                rows.setdefault(name, np.zeros((len(wanted), *part.shape[1:]), dtype=np.int64))[here] = part
        labels = torch.from_numpy(rows["labels"])
        inputs = {
            "tokens": torch.from_numpy(rows["input_ids"]),
            "segments": torch.from_numpy(rows["segment_ids"]),
            "mask": torch.from_numpy(rows["input_mask"]).bool(),
        }
        targets = {"masked_labels": labels, "next_sentence": torch.from_numpy(rows["next_sentence_labels"])}
        return Batch(inputs, targets)

    def _read(self, home: int) -> Arrays:
        if home in self._kept:
            self._kept.move_to_end(home)
            return self._kept[home]
        shard = self._shards[home]
        arrays = _arrays(shard.path, self.vocab_size)
        if len(arrays["input_ids"]) != shard.num_examples:
            raise UserError(
                f"{shard.path} had {shard.num_examples} examples and has {len(arrays['input_ids'])} now; "
                "do not write to it"
            )
        self._kept[home] = arrays
        while len(self._kept) > 2 and sum(self._shards[i].num_bytes for i in self._kept) > self._memory:
            self._kept.popitem(last=False)
        return arrays


def load(
    path: Path | None,
    sequence_length: int,
    *,
    seed: int = 1024,
    vocab_size: int | None = None,
    test_size: float = 0.1,
) -> DataSet:
    """The shards under ``path``: those named ``training`` train, those named ``test`` or ``valid`` are held out.

    The vocabulary is ``vocab_size``, or the lines of a ``vocab.txt`` with the shards, or that of NVIDIA's shards.
    """
    root = existing(path, "bert")
    files = find_files(root, SUFFIXES)
    if not files:
        raise UserError(
            f"{root} holds no {' or '.join(SUFFIXES)} file; "
            f"build shards with: vpipe data build bert --out {root / 'bert'}"
        )
    held_out = [file for file in files if file != root and split_of(file, root) in ("valid", "test")]
    training = [file for file in files if file not in held_out]
    if not training:
        raise UserError(
            f"{root} holds {len(held_out)} held-out shards and none to train on; their names must contain 'training'"
        )
    size = vocab_size or _stored_vocab_size(root if root.is_dir() else root.parent) or NVIDIA_VOCAB_SIZE
    train = BertShards(_open_all(training, sequence_length), size)
    if not held_out:
        return hold_out(train, test_size, seed)
    train.valid = BertShards(_open_all(held_out, sequence_length), size)
    return train


def _stored_vocab_size(root: Path) -> int | None:
    file = root / "vocab.txt"
    return sum(1 for _ in lines(file)) if file.is_file() else None


def _open_all(files: Sequence[Path], sequence_length: int) -> list[Shard]:
    shards = [shard for shard in map(_open, files) if shard.num_examples > 0]
    if not shards:
        raise UserError(f"{files[0]} and the other {len(files) - 1} shards have 0 examples; build them from more text")
    for shard in shards:
        if shard.length > sequence_length:
            raise UserError(
                f"{shard.path} has {shard.length} tokens per example, but sequence_length is {sequence_length}; "
                f"set sequence_length: {shard.length}"
            )
        if shard.length != shards[0].length:
            raise UserError(
                f"{shard.path} has {shard.length} tokens per example, {shards[0].path} has {shards[0].length}; "
                "keep shards of one length in a folder"
            )
    return shards


def _shapes(path: Path, file: Any) -> tuple[dict[str, tuple[int, ...]], int]:
    """The shapes of the fields, and their bytes."""
    for name in FIELDS:
        if name not in file:
            names = ", ".join(repr(each) for each in file) or "nothing"
            raise UserError(f"{path} has no {name!r}, only {names}; it is not a BERT shard in NVIDIA's format")
    fields = {name: file[name] for name in FIELDS}
    for name, field in fields.items():
        kind = str(field.dtype) if hasattr(field, "dtype") and hasattr(field, "shape") else "none: it holds no array"
        if not kind.startswith(("int", "uint")):
            raise UserError(f"{path} has {name!r} of type {kind}, not whole numbers; build it again")
    shapes = {name: tuple(int(size) for size in field.shape) for name, field in fields.items()}
    return shapes, sum(int(field.nbytes) for field in fields.values())


def _open(path: Path) -> Shard:
    """Checks the header and the shapes, reads no examples."""
    with _file(path) as file:
        try:
            shapes, num_bytes = _shapes(path, file)
        except STRANGE as error:
            raise _damaged(path, error) from None
    num, length = (*shapes["input_ids"], 0)[:2]
    num_masked = (*shapes["masked_lm_positions"], 0, 0)[1]
    expected = ((num, length),) * 3 + ((num, num_masked),) * 2 + ((num,),)
    for name, shape in zip(FIELDS, expected, strict=True):
        if shapes[name] != shape:
            raise UserError(
                f"{path} has {name!r} of shape {shapes[name]}, but its other fields need {shape}; build it again"
            )
    return Shard(path, num, length, num_bytes)


def _file(path: Path) -> Any:
    h5py = require("h5py")
    try:
        path.open("rb").close()
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path} ({path.stat().st_size} bytes) is cut short or damaged ({error}); copy it again, or build it again"
    )


def _arrays(path: Path, vocab_size: int) -> Arrays:
    """A shard's examples, the masked positions turned into one label per token."""
    with _file(path) as file:
        try:
            raw = {name: np.asarray(file[name]) for name in FIELDS}
        except STRANGE as error:
            raise _damaged(path, error) from None
    tokens, positions, answers = raw["input_ids"], raw["masked_lm_positions"], raw["masked_lm_ids"]
    check_vocabulary(tokens, vocab_size, str(path))
    check_vocabulary(answers, vocab_size, str(path))
    for name, most in {"input_mask": 1, "segment_ids": 1, "next_sentence_labels": 1}.items():
        values = raw[name]
        if values.size and not 0 <= int(values.min()) <= int(values.max()) <= most:
            raise UserError(
                f"{path} has {name!r} from {int(values.min())} to {int(values.max())}, but it must be 0 or {most}; "
                "build it again"
            )
    if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < tokens.shape[1]:
        raise UserError(
            f"{path} masks position {int(positions.max())} (lowest {int(positions.min())}) of examples of "
            f"{tokens.shape[1]} tokens; "
            "build it again"
        )
    used = np.cumprod(positions != 0, axis=1).astype(bool)
    rows, columns = np.nonzero(used)
    labels = np.full(tokens.shape, -1, dtype=np.int32)
    labels[rows, positions[rows, columns]] = answers[rows, columns]
    kept = ("input_ids", "input_mask", "segment_ids", "next_sentence_labels")
    return {**{name: raw[name] for name in kept}, "labels": labels}
