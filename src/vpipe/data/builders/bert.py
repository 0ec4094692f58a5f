"""``bert``: pre-training examples in NVIDIA's HDF5 shards, with a WordPiece vocabulary learnt from the same text.

    [CLS]  first segment  [SEP]  second segment  [SEP]  0 0 …          128 places
           every seventh token or so is to be guessed: of these, 80 % read [MASK], 10 % a random token, 10 % themselves

The second segment follows the first in its document (label 0) or comes from another one (label 1), half and half: of a
sentence that is alone, the second half follows the first.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import punctuation
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vpipe.data.builders import BuiltData, Request, dealt, digest, shuffled
from vpipe.data.builders.corpus import collect
from vpipe.data.files import require
from vpipe.data.tokenizer import FILE_NAME, encode
from vpipe.errors import UserError

LENGTH, MOST_MASKED = 128, 20
VOCAB_SIZE = 8192
SHARD_SIZE = 8192
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_UNKNOWN, _CLS, _SEP, _MASK = 1, 2, 3, 4
_ALPHABET = 1000
_MASKED_SHARE = 0.15
_SHORT_SHARE = 0.1
"""Share of examples that are made short, so that a model meets short inputs too."""

TokenLists = list[list[int]]


@dataclass(frozen=True)
class Example:
    tokens: list[int]
    segments: list[int]
    positions: list[int]
    answers: list[int]
    is_random: bool


def write(folder: Path, request: Request) -> BuiltData:
    """``vpipe_training_<n>.hdf5``, ``vpipe_validation_<n>.hdf5``, ``vocab.txt`` and ``tokenizer.json``."""
    require("h5py")
    corpus = collect(request.source, request.progress)
    texts = shuffled(corpus.documents, request.seed)[: request.limit]
    num_valid = len(dealt(texts, "documents")["valid"])
    tokenizer = train_word_pieces(texts[num_valid:], VOCAB_SIZE)
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in vocabulary), encoding="utf-8")
    tokenizer.save(str(folder / FILE_NAME), pretty=False)
    documents = [document for text in texts if (document := _sentences(text, tokenizer))]
    num_valid = min(num_valid, len(documents) - 1)
    counts, done = {"documents": len(documents), "vocabulary": len(vocabulary)}, 0
    for split, part in (("validation", documents[:num_valid]), ("training", documents[num_valid:])):
        chance = random.Random(f"{request.seed} {split}")
        pending: list[Example] = []
        tally = Counter[bool]()
        counts[split] = num_shards = 0
        for position, document in enumerate(part):
            pending += _examples(part, position, document, len(vocabulary), chance, tally)
            done += 1
            if done % 100 == 0 or position == len(part) - 1:
                request.progress(done, len(documents))
            while len(pending) >= SHARD_SIZE or (pending and position == len(part) - 1):
                _write_shard(folder / f"vpipe_{split}_{num_shards:03}.hdf5", pending[:SHARD_SIZE])
                counts[split] += len(pending[:SHARD_SIZE])
                del pending[:SHARD_SIZE]
                num_shards += 1
    if not counts["training"] or not counts["validation"]:
        raise UserError(
            f"{len(documents)} documents gave {counts['training']} training examples; name more text with --source"
        )
    return BuiltData(corpus.name, corpus.licence, digest(texts), counts)


def train_word_pieces(texts: list[str], vocab_size: int) -> Any:
    """An uncased WordPiece tokenizer.

    The library numbers the pieces that continue a word as it meets them in a hash table, and breaks ties by number,
    so two runs differ. Declaring all of them beforehand, sorted, makes the result a function of the text.
    """
    tokenizers = require("tokenizers")
    normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    counts = Counter(
        character for text in texts for character in normalizer.normalize_str(text) if not character.isspace()
    )
    most = sorted(sorted(counts), key=lambda character: -counts[character])[:_ALPHABET]
    alphabet = sorted(most)
    continuing = [f"##{character}" for character in alphabet if character not in punctuation]
    learner = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    learner.normalizer = normalizer
    learner.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=max(vocab_size, len(SPECIAL) + 2 * len(alphabet) + 1),
        special_tokens=[*SPECIAL, *continuing],
        initial_alphabet=alphabet,
        limit_alphabet=max(len(alphabet), 1),
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    vocabulary = learner.get_vocab()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, learner.pre_tokenizer
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.encode_special_tokens = True
    return tokenizer


def _sentences(text: str, tokenizer: Any) -> TokenLists:
    parts = [" ".join(part.split()) for part in re.split(r"(?<=[.!?:;])\s+|\n\n+", text)]
    return [ids.tolist() for ids in encode(tokenizer, (part for part in parts if part)) if len(ids)]


def _examples(
    part: list[TokenLists],
    position: int,
    document: TokenLists,
    vocab_size: int,
    chance: random.Random,
    tally: Counter[bool],
) -> Iterator[Example]:
    """Consecutive runs of sentences that fill an example, each cut in two at a sentence's end; ``tally`` counts the
    labels."""
    room = LENGTH - 3
    target = chance.randint(2, room) if chance.random() < _SHORT_SHARE else room
    start = 0
    while start < len(document):
        stop = start + 1
        while stop < len(document) and sum(map(len, document[start:stop])) < target:
            stop += 1
        cut = chance.randint(start + 1, stop - 1) if stop - start > 1 else stop
        first = [token for sentence in document[start:cut] for token in sentence]
        is_random = chance.random() < 0.5 if tally[True] == tally[False] else tally[True] < tally[False]
        if is_random and len(part) > 1:
            other = chance.randrange(len(part) - 1)
            stranger = part[other + (other >= position)]
            begin = chance.randrange(len(stranger))
            second = [token for sentence in stranger[begin:] for token in sentence][: max(1, target - len(first))]
            start = cut  # the sentences behind the cut were not used: they begin the next example
        else:
            second, is_random = [token for sentence in document[cut:stop] for token in sentence], False
            if cut == stop:
                first, second = first[: len(first) // 2], first[len(first) // 2 :]
            start = stop
        while len(first) + len(second) > room:
            longer = first if len(first) > len(second) else second
            longer.pop(0 if chance.random() < 0.5 else -1)
        if first and second:
            tally[is_random] += 1
            yield _masked(first, second, is_random, vocab_size, chance)


def _masked(first: list[int], second: list[int], is_random: bool, vocab_size: int, chance: random.Random) -> Example:
    tokens = [_CLS, *first, _SEP, *second, _SEP]
    segments = [0] * (len(first) + 2) + [1] * (len(second) + 1)
    places = [i for i, token in enumerate(tokens) if token not in (_CLS, _SEP)]
    num = min(MOST_MASKED, max(1, round(len(tokens) * _MASKED_SHARE)), len(places))
    positions = sorted(chance.sample(places, num))
    answers = [tokens[i] for i in positions]
    for i in positions:
        draw = chance.random()
        if draw < 0.8:
            tokens[i] = _MASK
        elif draw < 0.9:
            tokens[i] = chance.randrange(len(SPECIAL), vocab_size)
    return Example(tokens, segments, positions, answers, is_random)


def _write_shard(path: Path, examples: list[Example]) -> None:
    num = len(examples)
    fields: dict[str, NDArray[Any]] = {
        "input_ids": np.zeros((num, LENGTH), dtype=np.int32),
        "input_mask": np.zeros((num, LENGTH), dtype=np.int8),
        "segment_ids": np.zeros((num, LENGTH), dtype=np.int8),
        "masked_lm_positions": np.zeros((num, MOST_MASKED), dtype=np.int32),
        "masked_lm_ids": np.zeros((num, MOST_MASKED), dtype=np.int32),
        "next_sentence_labels": np.asarray([example.is_random for example in examples], dtype=np.int8),
    }
    for row, example in enumerate(examples):
        fields["input_ids"][row, : len(example.tokens)] = example.tokens
        fields["input_mask"][row, : len(example.tokens)] = 1
        fields["segment_ids"][row, : len(example.segments)] = example.segments
        fields["masked_lm_positions"][row, : len(example.positions)] = example.positions
        fields["masked_lm_ids"][row, : len(example.answers)] = example.answers
    # Made in memory and written by Python: on a full disk HDF5 itself prints tracebacks and then crashes the process.
    with require("h5py").File(path.name, "w", driver="core", backing_store=False) as file:
        for name, values in fields.items():
            file.create_dataset(name, data=values, compression="gzip")
        file.flush()
        image = file.id.get_file_image()
    path.write_bytes(image)
