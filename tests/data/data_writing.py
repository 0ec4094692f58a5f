"""What the tests of this room write their tiny data with."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

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
