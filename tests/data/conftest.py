"""Tiny data sets, written by the tests that read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from data_writing import OWN, ShardWriter, functions, write_json_lines


@pytest.fixture
def code_folder(tmp_path: Path) -> Path:
    """CodeSearchNet's own layout: 40 training functions in two files, 8 for validation."""
    root = tmp_path / "code"
    for number in (0, 1):
        write_json_lines(
            root / "python/final/jsonl/train" / f"python_train_{number}.jsonl.gz", functions(OWN, "train", 20)
        )
    write_json_lines(root / "python/final/jsonl/valid/python_valid_0.jsonl.gz", functions(OWN, "valid", 8))
    return root


@pytest.fixture
def write_shard() -> ShardWriter:
    """Writes a BERT shard: example i is all ``first + i``, masks positions 1 and 3, and is random if i is odd."""

    def write(path: Path, num: int, first: int = 10, length: int = 16, **replaced: Any) -> Path:
        tokens = np.zeros((num, length), dtype=np.int32)
        tokens[:, :8] = first + np.arange(num)[:, None]
        fields = {
            "input_ids": tokens,
            "input_mask": (tokens > 0).astype(np.int8),
            "segment_ids": np.repeat([[0] * 4 + [1] * 4 + [0] * (length - 8)], num, axis=0).astype(np.int8),
            "masked_lm_positions": np.repeat([[1, 3, 0, 5]], num, axis=0).astype(np.int32),
            "masked_lm_ids": np.repeat([[7, 8, 0, 9]], num, axis=0).astype(np.int32),
            "next_sentence_labels": (np.arange(num) % 2).astype(np.int8),
            **replaced,
        }
        with h5py.File(path, "w") as file:
            for name, values in fields.items():
                if values is not None:
                    file.create_dataset(name, data=values, compression="gzip")
        return path

    return write
