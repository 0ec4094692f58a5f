"""``text``: prose of this machine or of a folder as ``train.txt``, ``valid.txt`` and ``test.txt``, for a language
model.
"""

from __future__ import annotations

from pathlib import Path

from vpipe.data import tokenizer
from vpipe.data.builders import BuiltData, Request, dealt, digest, letters, shuffled
from vpipe.data.builders.corpus import collect


def write(folder: Path, request: Request) -> BuiltData:
    """Documents in a shuffled order, a blank line between them, and a byte-level BPE tokenizer of the training text."""
    corpus = collect(request.source, request.progress)
    documents = shuffled(corpus.documents, request.seed)[: request.limit]
    splits = dealt(documents, "documents")
    apart = {letters(part) for split in ("valid", "test") for text in splits[split] for part in text.split("\n\n")}
    rest = ("\n\n".join(p for p in text.split("\n\n") if letters(p) not in apart) for text in splits["train"])
    splits["train"] = [text for text in rest if text]
    for split, texts in splits.items():
        (folder / f"{split}.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    tokenizer.train("bpe", splits["train"]).save(str(folder / tokenizer.FILE_NAME), pretty=False)
    counts = {split: len(texts) for split, texts in splits.items()}
    return BuiltData(corpus.name, corpus.licence, digest(documents), {**counts, "characters": sum(map(len, documents))})
