"""``text``: prose of this machine or of a folder as ``train.txt``, ``valid.txt`` and ``test.txt``, for a language
model.
"""

from __future__ import annotations

from pathlib import Path

from vpipe.data import tokenizer
from vpipe.data.builders import BuiltData, Request, digest, held_out_counts, shuffled
from vpipe.data.builders.corpus import collect
from vpipe.errors import UserError


def write(folder: Path, request: Request) -> BuiltData:
    """Documents in a shuffled order, a blank line between them, and a byte-level BPE tokenizer of the training text."""
    corpus = collect(request.source, request.progress)
    documents = shuffled(corpus.documents, request.seed)[: request.limit]
    num_valid, num_test = held_out_counts(len(documents))
    if num_test == 0:
        raise UserError(
            f"{len(documents)} documents are too few for train, valid and test; "
            "name more text with --source or raise --limit"
        )
    splits = {
        "train": documents[num_valid + num_test :],
        "valid": documents[:num_valid],
        "test": documents[num_valid : num_valid + num_test],
    }
    for split, texts in splits.items():
        (folder / f"{split}.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    tokenizer.train("bpe", splits["train"]).save(str(folder / tokenizer.FILE_NAME), pretty=False)
    counts = {split: len(texts) for split, texts in splits.items()}
    return BuiltData(corpus.name, corpus.licence, digest(documents), {**counts, "characters": sum(map(len, documents))})
