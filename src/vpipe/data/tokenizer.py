"""Text to numbers, by the ``tokenizers`` library: characters, or byte-level BPE.

The first and the last stage are different processes, perhaps on different machines, and must agree on every id. A
tokenizer is therefore a function of the training text alone: the alphabet is fixed before training, so ties between
pairs do not depend on the order of a hash table, and a test compares the result of two processes.

All share fairseq's first four ids, so that padding is 1 everywhere.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vpipe.data.files import read_text, require
from vpipe.errors import UserError, nearest

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
BOS, PAD, EOS, UNKNOWN = range(4)
KINDS = ("auto", "char", "bpe")
DEFAULT_VOCAB_SIZE = 4096
FILE_NAME = "tokenizer.json"


def choose(choice: str, vocab_size: int | None, root: Path, texts: Callable[[], Iterable[str]]) -> Any:
    """The tokenizer of a data set in ``root`` whose training text is ``texts()``.

    ``auto`` takes the ``tokenizer.json`` that lies with the data if it fits ``vocab_size``, and trains byte-level BPE
    otherwise; ``char`` and ``bpe`` train; anything else is the path of a ``tokenizer.json``.
    """
    stored = (root if root.is_dir() else root.parent) / FILE_NAME
    if choice == "auto" and stored.is_file():
        tokenizer = load(stored)
        if vocab_size in (None, tokenizer.get_vocab_size()):
            return tokenizer
    if choice in KINDS:
        return train("char" if choice == "char" else "bpe", texts(), vocab_size)
    if choice.endswith(".json"):
        return load(Path(choice))
    raise UserError(
        f"there is no tokenizer {choice!r}: use {', '.join(KINDS)} or the path of a "
        f"tokenizer.json{nearest(choice, KINDS)}"
    )


def train(kind: str, texts: Iterable[str], vocab_size: int | None = None) -> Any:
    """A tokenizer learnt from ``texts``. ``vocab_size`` is the most ids it may use, special tokens included."""
    tokenizers = require("tokenizers")
    if kind == "char":
        counts = Counter(character for text in texts for character in text)
        if not counts:
            raise _empty()
        by_count = sorted(counts, key=lambda character: (-counts[character], character))
        known = sorted(by_count[: None if vocab_size is None else max(vocab_size - len(SPECIAL), 1)])
        vocabulary = {token: i for i, token in enumerate((*SPECIAL, *known))}
        # BPE without merges is one token per character, and four times as fast as a word-level model behind a splitter.
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token=SPECIAL[UNKNOWN]))
        tokenizer.add_special_tokens(list(SPECIAL))
        tokenizer.decoder = tokenizers.decoders.Fuse()
        return _plain(tokenizer)
    vocab_size = DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
    smallest = len(SPECIAL) + 256
    if vocab_size < smallest:
        raise UserError(
            f"byte-level BPE needs a vocab_size of {smallest} or more, not {vocab_size}; or use tokenizer: char"
        )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    some = (text for text in texts if text)
    first = next(some, None)
    if first is None:
        raise _empty()
    tokenizer.train_from_iterator(chain([first], some), trainer)
    return _plain(tokenizer)


def load(path: Path) -> Any:
    """A ``tokenizer.json`` of the ``tokenizers`` library."""
    tokenizers = require("tokenizers")
    text = read_text(path)
    try:
        json.loads(text)
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise UserError(
            f"{path} is not a tokenizer of the tokenizers library ({error}); train one with tokenizer: bpe"
        ) from None
    return _plain(tokenizer)


def end_of_text(tokenizer: Any) -> int | None:
    """The id that separates documents, in our tokenizers and in GPT-2's; None in others."""
    for token in ("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "[SEP]"):
        number = tokenizer.token_to_id(token)
        if number is not None:
            return int(number)
    return None


def padding(tokenizer: Any) -> int:
    """The id that fills short examples: the padding token, or the end of a text where there is none."""
    for token in ("<pad>", "[PAD]"):
        number = tokenizer.token_to_id(token)
        if number is not None:
            return int(number)
    return end_of_text(tokenizer) or 0


def encode(tokenizer: Any, texts: Iterable[str], chunk: int = 512) -> Iterator[NDArray[np.int32]]:
    """The ids of each text, without special tokens."""
    source = iter(texts)
    while piece := list(islice(source, chunk)):
        for encoding in tokenizer.encode_batch_fast(piece, add_special_tokens=False):
            yield np.asarray(encoding.ids, dtype=np.int32)


def _plain(tokenizer: Any) -> Any:
    """A text that happens to contain ``</s>`` is a text: only we may end one."""
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()  # a file may say how others cut and pad; documents are cut into sequences here
    tokenizer.no_padding()
    return tokenizer


def _empty() -> UserError:
    return UserError(
        "the training text is empty: 0 characters; check the path of the data, or build it with a larger --limit"
    )
