"""What tells one set of data from another: kept by a checkpoint, and compared by ranks that read by themselves.

    {"examples": 4126, "held out": 458, "vocabulary": 4096, "sequence length": 128,
     "tokenizer": "5d41402a", "files": "3 of 1,204,332 bytes, 7d793037", "sample": "9a3bc2f1"}

The sample is of a few examples from the first to the last, as they are trained on. What is not the same when it is read
twice says nothing and is left out, and so is what a stream does not know.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vpipe.data.dataset import DataSet, seeded
from vpipe.data.files import find_files
from vpipe.data.order import ENDLESS

SAMPLED = 16
"""Examples of the sample."""
OF_A_RANK = ("examples", "held out", "vocabulary", "tokenizer", "sample")
"""What is the same for all ranks of a run; a machine may have a file more than another."""

Facts = Mapping[str, str]


def facts_of(data: DataSet, sequence_length: int, root: Path | None, sampled: bool = True) -> Facts:
    """All of it; ``root`` is where the files are, ``sampled`` whether examples may be read."""
    found = {"vocabulary": f"{data.vocab_size:,}", "sequence length": f"{sequence_length:,}"}
    if len(data) != ENDLESS:
        found["examples"] = f"{len(data):,}"
        found["held out"] = f"{len(data.valid) if data.valid is not None else 0:,}"
        sample = _sample(data) if sampled else ""
        found |= {"sample": sample} if sample and sample == _sample(data) else {}
    if text := tokenizer_text(data.tokenizer):
        found["tokenizer"] = _digest(text.encode())
    if root is not None and root.exists():
        folder = root.parent if root.is_file() else root
        sizes = [(str(file.relative_to(folder)), file.stat().st_size) for file in find_files(root, ("",))]
        total = sum(size for _, size in sizes)
        found["files"] = f"{len(sizes)} of {total:,} bytes, {_digest(repr(sizes).encode())}"
    return found


def differences(before: Facts, now: Facts, names: tuple[str, ...] = ()) -> list[str]:
    """What both know and is not the same, with both values; of these ``names``, or of all."""
    both = [name for name in before if name in now and (not names or name in names)]
    return [f"{name} {before[name]} → {now[name]}" for name in both if before[name] != now[name]]


def tokenizer_text(tokenizer: Any) -> str:
    """The ``tokenizer.json`` of a tokenizer of the tokenizers library, or of transformers; empty for others."""
    inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
    return str(inner.to_str(pretty=True)) if hasattr(inner, "to_str") else ""


def tensors_of(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a value, with its place there."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping | list | tuple):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from tensors_of(part, f"{name}.{key}")


def bytes_of(tensor: Tensor) -> memoryview:
    """Its numbers as they lie in memory."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data


def _sample(data: DataSet) -> str:
    """A digest of some examples; of data in groups, which are read whole, those at both ends."""
    count = min(SAMPLED, len(data))
    spread = np.linspace(0, len(data) - 1, count, dtype=np.int64).tolist()
    ends = [*range(count // 2), *range(len(data) - (count + 1) // 2, len(data))]
    total = hashlib.sha256()
    for example in ends if data.groups else spread:
        with seeded(example):
            for name, tensor in tensors_of(data.batch([example]), ""):
                total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
                total.update(bytes_of(tensor))
    return total.hexdigest()[:8]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]
