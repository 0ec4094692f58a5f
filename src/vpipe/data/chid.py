"""ChID: Chinese idioms to fill in, as the ``cpm`` folder of the documents prepared them for its GPT-2.

A file is ``[cand_ids, [{"sent": [ids], "truth": n}, …]]``: the last id of a sentence is the answer,
``cand_ids[truth]``. The model reads the sentence without it and is judged on that one token. The text was tokenized
long ago; the vocabulary has 30,000 ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from vpipe.data.dataset import DataSet, check_vocabulary, hold_out
from vpipe.data.files import existing, find_files, read_text, split_of
from vpipe.data.language_model import PaddedDocuments
from vpipe.data.token_cache import Tokens
from vpipe.errors import UserError

VOCAB_SIZE = 30000


def load(
    path: Path | None,
    sequence_length: int,
    *,
    seed: int = 1024,
    vocab_size: int = VOCAB_SIZE,
    pad_id: int = 0,
    test_size: float = 0.1,
) -> DataSet:
    """``train.json`` and ``dev.json`` of a folder, or one file. Sentences longer than ``sequence_length`` keep their
    end.
    """
    root = existing(path)
    files = [file for file in find_files(root, (".json",)) if file.name != "manifest.json"]
    training = [file for file in files if file == root or split_of(file, root) in (None, "train")]
    if not training:
        raise UserError(f"{root} holds no train.json; name the folder of preprocessed ChID data")
    train = _read(training, sequence_length, vocab_size, pad_id)
    held_out = [file for file in files if file != root and split_of(file, root) == "valid"]
    if not held_out:
        return hold_out(train, test_size, seed)
    train.valid = _read(held_out, sequence_length, vocab_size, pad_id)
    return train


def _read(files: list[Path], sequence_length: int, vocab_size: int, pad_id: int) -> DataSet:
    sentences = [sentence for file in files for sentence in _sentences(file, vocab_size)]
    if not sentences:
        raise UserError(f"{files[0]} has 0 sentences; preprocess ChID again")
    return PaddedDocuments(sentences, sequence_length, vocab_size, pad_id=pad_id, last_only=True)


def _sentences(file: Path, vocab_size: int) -> list[Tokens]:
    try:
        content = json.loads(read_text(file))
    except json.JSONDecodeError as error:
        raise UserError(
            f"{file}:{error.lineno}: not JSON ({error.msg} at column {error.colno}); preprocess ChID again"
        ) from None
    if not (isinstance(content, list) and len(content) == 2 and all(isinstance(part, list) for part in content)):
        raise UserError(f"{file} is not [candidate ids, sentences]; preprocess ChID again")
    candidates, items = content
    return [_sentence(item, candidates, vocab_size, f"{file}, sentence {i}") for i, item in enumerate(items)]


def _sentence(item: Any, candidates: list[Any], vocab_size: int, where: str) -> Tokens:
    ids = item.get("sent") if isinstance(item, dict) else None
    truth = item.get("truth") if isinstance(item, dict) else None
    if not (isinstance(ids, list) and len(ids) > 1 and all(type(n) is int for n in ids) and type(truth) is int):
        raise UserError(f'{where}: not {{"sent": [two ids or more], "truth": number}}; preprocess ChID again')
    if not 0 <= truth < len(candidates):
        raise UserError(
            f"{where}: its truth is {truth}, but there are {len(candidates)} candidates; preprocess ChID again"
        )
    if ids[-1] != candidates[truth]:
        raise UserError(
            f"{where}: it ends with the id {ids[-1]}, but candidate {truth} is {candidates[truth]}; "
            "preprocess ChID again"
        )
    sentence = np.asarray(ids, dtype=np.int64)
    check_vocabulary(sentence, vocab_size, where)
    return sentence.astype(np.int32)
