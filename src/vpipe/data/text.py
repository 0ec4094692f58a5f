"""Plain text: a file, or a folder of files, as one stream for a language model.

Files named after a split (``train.txt``, ``valid.txt``) are taken at their word; otherwise a share of the sequences
is held out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vpipe.data.dataset import DataSet, hold_out
from vpipe.data.files import existing, read_paragraphs, split_of, text_files
from vpipe.data.language_model import from_documents
from vpipe.data.tokenizer import choose


def load(
    path: Path | None,
    sequence_length: int,
    *,
    seed: int = 1024,
    tokenizer: str = "auto",
    vocab_size: int | None = None,
    pack: bool = True,
    test_size: float = 0.1,
) -> DataSet:
    """The text under ``path``. A document is a paragraph: what stands between blank lines."""
    root = existing(path, "text")
    files = text_files(root)
    by_split = {split: [file for file in files if split_of(file, root) == split] for split in ("train", "valid")}
    train_files = by_split["train"] or [file for file in files if split_of(file, root) is None] or files

    def paragraphs(chosen: list[Path]) -> Iterator[str]:
        return (paragraph for file in chosen for paragraph in read_paragraphs(file))

    chosen = choose(tokenizer, vocab_size, root, lambda: paragraphs(train_files))
    train = from_documents(paragraphs(train_files), chosen, sequence_length, pack=pack, where=str(root))
    if train_files is files or not by_split["valid"]:
        return hold_out(train, test_size, seed)
    where = f"the validation text of {root}"
    train.valid = from_documents(paragraphs(by_split["valid"]), chosen, sequence_length, pack=pack, where=where)
    return train
