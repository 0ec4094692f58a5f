"""Plain text: a file, or a folder of files, as one stream for a language model.

Files named after a split (``train.txt``, ``valid.txt``) are taken at their word; otherwise a share of the sequences
is held out.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from vpipe.data.dataset import DataSet, hold_out
from vpipe.data.files import existing, named_split, read_paragraphs, text_files
from vpipe.data.language_model import from_documents
from vpipe.data.token_cache import cache_for
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
    by_split = {split: [file for file in files if named_split(file) == split] for split in ("train", "valid")}
    train_files = by_split["train"] or [file for file in files if named_split(file) is None] or files

    def paragraphs(chosen_files: list[Path]) -> Iterator[str]:
        return (paragraph for file in chosen_files for paragraph in read_paragraphs(file))

    chosen = choose(tokenizer, vocab_size, root, lambda: paragraphs(train_files))

    def part(chosen_files: list[Path], where: str) -> DataSet:
        texts, cache = partial(paragraphs, chosen_files), cache_for(root, chosen_files, chosen)
        return from_documents(texts, chosen, sequence_length, pack=pack, where=where, cache=cache)

    train = part(train_files, str(root))
    if train_files is files or not by_split["valid"]:
        return hold_out(train, test_size, seed)
    train.valid = part(by_split["valid"], f"the validation text of {root}")
    return train
