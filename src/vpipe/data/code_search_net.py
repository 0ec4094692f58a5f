"""CodeSearchNet: functions of real programs, one JSON object per line.

The corpus exists under two sets of field names (its own and the Hub's) and three containers (``.jsonl``,
``.jsonl.gz``, parquet). A directory of any of them loads here, without the ``datasets`` library; ``vpipe data build
code`` writes one from the standard library.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from vpipe.data.dataset import DataSet, hold_out
from vpipe.data.files import SPLITS, existing, find_files, json_lines, split_of
from vpipe.data.language_model import from_documents
from vpipe.data.token_cache import cache_for
from vpipe.data.tokenizer import choose
from vpipe.errors import UserError

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
_CODE = ("original_string", "whole_func_string", "code", "func_code_string")
_SPLIT = ("partition", "split_name")
_HUB_CACHE = Path(".cache") / "huggingface" / "hub"
_HUB_NAMES = ("datasets--code_search_net", "datasets--code-search-net--code_search_net")


def load(
    path: Path | None,
    sequence_length: int,
    *,
    seed: int = 1024,
    language: str | None = None,
    tokenizer: str = "auto",
    vocab_size: int | None = None,
    pack: bool = True,
    limit: int | None = None,
    test_size: float = 0.1,
) -> DataSet:
    """The functions of ``path``, or of the Hub's cache if no path is given and the corpus is there.

    ``language`` keeps one programming language. ``limit`` keeps the first so many functions of each split. ``pack``
    joins functions into full sequences; without it each function is one padded example. Data without a validation
    split hold out ``test_size``.
    """
    root = existing(path or hub_cache(), "code")
    files = find_files(root, SUFFIXES)
    if not files:
        raise UserError(
            f"{root} holds no {', '.join(SUFFIXES)} file; name the folder of a CodeSearchNet corpus, "
            f"or build one with: vpipe data build code --out {root / 'code'}"
        )

    if limit is not None and limit < 1:
        raise UserError(f"dataset.extra.limit is {limit}; it must be 1 or more")

    def functions(split: str) -> Iterator[str]:
        return islice(read_functions(files, root, split, language), limit)

    chosen = choose(tokenizer, vocab_size, root, lambda: functions("train"))

    def part(split: str) -> DataSet:
        where = f"the {split} split of {root}"
        cache = cache_for(root, files, chosen, split, language, limit)
        return from_documents(partial(functions, split), chosen, sequence_length, pack=pack, where=where, cache=cache)

    train = part("train")
    if next(functions("valid"), None) is None:
        return hold_out(train, test_size, seed)
    train.valid = part("valid")
    return train


def read_functions(files: list[Path], root: Path, split: str, language: str | None = None) -> Iterator[str]:
    """The source text of each function of one split. A file's name or folder says its split, or else each record; a
    record that says nothing, or a word that names no split, belongs to ``train``.
    """
    for file in files:
        named = split_of(file, root)
        if named not in (None, split):
            continue
        for number, record in _records(file):
            if (named or _field(record, _SPLIT) or "train") != split:
                continue
            if language is not None and record.get("language", language) != language:
                continue
            code = _field(record, _CODE)
            if code is None:
                raise UserError(
                    f"{file}:{number}: no field {' or '.join(_CODE)}, only {', '.join(sorted(record)[:6])}; "
                    "this is not CodeSearchNet's format"
                )
            yield code


def hub_cache(home: Path | None = None) -> Path | None:
    """Where the Hub's library keeps the corpus, if it was ever downloaded by this user."""
    cache = (home or Path.home()) / _HUB_CACHE
    for name in _HUB_NAMES:
        snapshots = cache / name / "snapshots"
        if snapshots.is_dir() and find_files(snapshots, SUFFIXES):
            return snapshots
    return None


def _field(record: dict[str, Any], names: tuple[str, ...]) -> str | None:
    for name in names:
        value = record.get(name)
        if isinstance(value, str):
            return SPLITS.get(value.lower(), "train") if names is _SPLIT else value
    return None


def _records(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    if file.suffix != ".parquet":
        yield from json_lines(file)
        return
    try:
        import pyarrow.parquet as parquet  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise UserError(
            f"{file} is a parquet file, which needs the library pyarrow; "
            "install it with: pip install pyarrow, or use .jsonl files"
        ) from None
    row = 0
    try:
        for batch in parquet.ParquetFile(file).iter_batches():
            for record in batch.to_pylist():
                row += 1
                yield row, record
    except (ValueError, OSError) as error:  # pyarrow's own exceptions derive from these
        raise UserError(f"{file} is damaged behind row {row} ({error}); copy it again") from None
