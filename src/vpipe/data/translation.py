"""Sentence pairs for an encoder–decoder: fairseq's binarised files, or two parallel text files.

The decoder reads the target one place to the right, beginning with the end-of-sentence token as fairseq does:

    source      Guten Tag </s>
    target_in   </s> Good day         inputs  = {"source", "target_in"}
    target_out  Good day </s>         targets = target_out

Sentences differ in length, so batches are made by tokens (``order(max_tokens=…)``) and each is padded to its own
longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vpipe.data.dataset import Batch, DataSet, check_vocabulary, hold_out
from vpipe.data.fairseq import Sentences, read_dictionary, read_sentences
from vpipe.data.files import existing, lines
from vpipe.data.tokenizer import EOS, PAD, choose, encode
from vpipe.errors import UserError

Sentence = NDArray[Any]


class ParallelSentences(DataSet):
    """Pairs of id sequences, each ending with the end-of-sentence token. Pairs longer than ``sequence_length`` are
    left out.
    """

    ignore_index = PAD
    pad_id = PAD

    def __init__(
        self,
        source: Sequence[Sentence],
        target: Sequence[Sentence],
        sequence_length: int,
        vocab_sizes: tuple[int, int],
        where: str,
        tokenizer: Any = None,
    ) -> None:
        sizes = np.maximum(_sizes(source), _sizes(target))
        self._members = np.flatnonzero(sizes <= sequence_length)
        if left_out := len(sizes) - len(self._members):
            self.notes = (
                f"{where}: {left_out:,} of {len(sizes):,} pairs are longer than {sequence_length} tokens and left out",
            )
        if len(self._members) == 0:
            shortest = f"the shortest has {sizes.min()} tokens" if len(sizes) else "the files are empty"
            raise UserError(
                f"{where} has no pair of sequence_length {sequence_length} or less: {shortest}; "
                "raise sequence_length or use other data"
            )
        self._source, self._target = source, target
        self.lengths = sizes[self._members]
        self.source_vocab_size, self.target_vocab_size = vocab_sizes
        self.vocab_size = max(vocab_sizes)
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self._members)

    def batch(self, indices: Sequence[int]) -> Batch:
        members = [int(self._members[i]) for i in indices]
        sources = [self._source[i] for i in members]
        targets = [self._target[i] for i in members]
        shifted = [np.concatenate([[EOS], sentence[:-1]]) for sentence in targets]
        inputs = {"source": _padded(sources), "target_in": _padded(shifted)}
        return Batch(inputs, _padded(targets))


def _sizes(sentences: Sequence[Sentence]) -> NDArray[np.int64]:
    if isinstance(sentences, Sentences):
        return sentences.sizes
    return np.fromiter(map(len, sentences), dtype=np.int64, count=len(sentences))


def _padded(sentences: Sequence[Sentence]) -> Tensor:
    rows = torch.full((len(sentences), max((len(s) for s in sentences), default=0)), PAD, dtype=torch.int64)
    for row, sentence in zip(rows, sentences, strict=True):
        row[: len(sentence)] = torch.from_numpy(np.asarray(sentence, dtype=np.int64))
    return rows


def load(
    path: Path | None,
    sequence_length: int,
    *,
    seed: int = 1024,
    source_language: str | None = None,
    target_language: str | None = None,
    tokenizer: str = "auto",
    vocab_size: int | None = None,
    test_size: float = 0.1,
) -> DataSet:
    """The pairs of a folder: binarised if it holds ``train.<src>-<tgt>.<src>.idx``, else the text of ``train.<src>``
    and ``train.<tgt>``.
    """
    root = existing(path, "translation")
    if not root.is_dir():
        raise UserError(f"{root} is a file, but parallel text is a folder with train.<language> for two languages")
    if any(root.glob("train.*-*.*.idx")):
        stem, languages = _of_stems(root, source_language, target_language)
        splits = _binarised(root, stem, languages, sequence_length)
    else:
        languages = _text_languages(root, source_language, target_language)
        texts = [_text(root, "train", language) for language in languages]
        chosen = choose(tokenizer, vocab_size, root, lambda: (line for side in texts for line in side))
        splits = _plain(root, languages, sequence_length, chosen)
    train = next(splits)
    train.valid = next(splits, None)
    if train.valid is None:
        return hold_out(train, test_size, seed)
    train.notes += train.valid.notes
    return train


def _of_stems(root: Path, source: str | None, target: str | None) -> tuple[str, tuple[str, str]]:
    """Which files, and their source and target language: those of ``train.<one>-<other>.<one>.idx``."""
    found = sorted(tuple(file.name.split(".")[1:3]) for file in root.glob("train.*-*.*.idx"))
    ways = [(stem, one, stem.removeprefix(f"{one}-")) for stem, one in found if stem.startswith(f"{one}-")]
    ways += [(stem, other, one) for stem, one, other in ways]
    fitting = [(stem, (a, b)) for stem, a, b in ways if source in (None, a) and target in (None, b)]
    if not fitting or len({stem for stem, _ in fitting}) > 1:
        raise UserError(
            f"{root} holds {' and '.join({stem: 0 for stem, _ in found})}, not {source or '?'}-{target or '?'} alone; "
            "name dataset.extra.source_language and target_language"
        )
    return fitting[0]


def _binarised(root: Path, stem: str, languages: tuple[str, str], sequence_length: int) -> Iterator[DataSet]:
    dictionaries = [read_dictionary(root / f"dict.{language}.txt") for language in languages]
    for split in ("train", "valid"):
        prefixes = [root / f"{split}.{stem}.{language}" for language in languages]
        if split == "valid" and not prefixes[0].with_name(prefixes[0].name + ".idx").exists():
            return
        sides = [read_sentences(prefix) for prefix in prefixes]
        for prefix, side, dictionary in zip(prefixes, sides, dictionaries, strict=True):
            check_vocabulary(np.asarray([side.highest] if len(side) else []), len(dictionary), f"{prefix}.bin")
        _check_equal(len(sides[0]), len(sides[1]), prefixes, "sentences")
        sizes = (len(dictionaries[0]), len(dictionaries[1]))
        yield ParallelSentences(sides[0], sides[1], sequence_length, sizes, f"the {split} split of {root}")


def _text_languages(root: Path, source: str | None, target: str | None) -> tuple[str, str]:
    found = sorted(file.name.removeprefix("train.") for file in root.glob("train.*") if file.suffix != ".gz")
    if source is None:
        source = "en" if "en" in found else next(iter(found), "?")
    if target is None:
        target = next((language for language in found if language != source), "?")
    if source not in found or target not in found or source == target:
        raise UserError(
            f"{root} has no pair train.{source}, train.{target} (it has: {', '.join(found) or 'no train.* file'}); "
            f"build one with: vpipe data build translation --out {root / 'translation'}"
        )
    return source, target


def _plain(root: Path, languages: tuple[str, str], sequence_length: int, tokenizer: Any) -> Iterator[DataSet]:
    for split in ("train", "valid"):
        if split == "valid" and not (root / f"valid.{languages[0]}").exists():
            return
        sides = [_text(root, split, language) for language in languages]
        _check_equal(len(sides[0]), len(sides[1]), [root / f"{split}.{x}" for x in languages], "lines")
        pairs = [(a, b) for a, b in zip(*sides, strict=True) if a and b]
        end = np.asarray([EOS], dtype=np.int32)
        ids = [[np.concatenate([x, end]) for x in encode(tokenizer, (pair[side] for pair in pairs))] for side in (0, 1)]
        sizes = (tokenizer.get_vocab_size(), tokenizer.get_vocab_size())
        yield ParallelSentences(ids[0], ids[1], sequence_length, sizes, f"the {split} split of {root}", tokenizer)


def _text(root: Path, split: str, language: str) -> list[str]:
    return [line.strip() for _, line in lines(existing(root / f"{split}.{language}"))]


def _check_equal(one: int, other: int, files: Sequence[Path], what: str) -> None:
    if one != other:
        raise UserError(
            f"{files[0]} has {one} {what}, {files[1]} has {other}: they are not parallel; "
            "align them or build them again"
        )
