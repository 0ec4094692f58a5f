"""What the tests of this room write their tiny data with."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vpipe.data.fairseq import MAGIC

ShardWriter = Callable[..., Path]
OWN = ("original_string", "partition")
HUB = ("whole_func_string", "split_name")


def functions(names: tuple[str, str], split: str, num: int) -> list[dict[str, str]]:
    return [
        {names[0]: f"def {split}_{i}(x):\n    return x + {i}\n", "language": "python", names[1]: split}
        for i in range(num)
    ]


def write_json_lines(path: Path, records: list[dict[str, str]]) -> None:
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def write_sentences(prefix: Path, sentences: Iterable[Sequence[int] | NDArray[Any]]) -> int:
    """Writes the pair ``<prefix>.idx``, ``<prefix>.bin`` and returns the number of sentences."""
    sizes = []
    with prefix.with_name(prefix.name + ".bin").open("wb") as data:
        for sentence in sentences:
            data.write((np.asarray(sentence, dtype=np.int64) + 1).astype("<i4").tobytes())
            sizes.append(len(sentence))
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype("<i8")
    with prefix.with_name(prefix.name + ".idx").open("wb") as index:
        index.write(struct.pack("<8s5Q", MAGIC, 1, 4, 4, len(sizes), len(sizes)))
        index.write(np.arange(len(sizes) + 1, dtype="<i8").tobytes() + offsets.tobytes())
        index.write(np.asarray(sizes, dtype="<i8").tobytes())
    return len(sizes)


def write_dictionary(symbols: Iterable[str], path: Path) -> None:
    """fairseq's ``dict.<language>.txt``; its four special symbols are not in it."""
    path.write_text("".join(f"{symbol} 1\n" for symbol in symbols), encoding="utf-8")
