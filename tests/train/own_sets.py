"""Data sets as users write them, each with its own way to be read differently by two processes: a plugin of jobs."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vpipe.interfaces import DatasetInterface
from vpipe.registry import DATASET_REGISTRY

LENGTH, SIZE = 8, 30


class Rows(DatasetInterface):
    """64 rows of a few token ids; masks are drawn by ``draw`` where a batch is made, as torch users do."""

    def load_dataset(self) -> Any:
        return [(torch.arange(LENGTH + 1) + i) % SIZE for i in range(64)]

    def get_vocab_size(self) -> int:
        return 32

    def draw(self, shape: Any) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bool)

    def process_batch(self, batch: Any) -> Any:
        tokens = torch.stack(list(batch))
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        mask = self.draw(inputs.shape)
        return {"inputs": inputs.masked_fill(mask, 31), "labels": labels.masked_fill(mask, -100)}


@DATASET_REGISTRY.register("drawn")
class Drawn(Rows):
    """Random numbers of torch, numpy and Python at once; its rows are drawn too."""

    def load_dataset(self) -> Any:
        first = random.randrange(8) + int(np.random.randint(8)) + int(torch.randint(8, ()))
        return [(torch.arange(LENGTH + 1) + i + first) % SIZE for i in range(64)]

    def draw(self, shape: Any) -> torch.Tensor:
        mine = torch.tensor(np.random.rand(*shape)) + random.random() + torch.rand(shape)
        return mine < 1.0


@DATASET_REGISTRY.register("noted")
class Noted(Rows):
    """Each process writes down what it makes units of (samples are of one row). No two rows begin alike."""

    def load_dataset(self) -> Any:
        return [(torch.arange(LENGTH + 1) + i) % SIZE for i in range(SIZE)]

    def process_batch(self, batch: Any) -> Any:
        if len(batch) > 1 or self.config.batch_size == 1:
            with (Path(self.config.extra["seen"]) / f"seen.{os.getpid()}").open("a") as file:
                file.write(f"{[int(row[0]) for row in batch]}\n")
        return super().process_batch(batch)


@DATASET_REGISTRY.register("clock")
class Clock(Rows):
    """A generator with a seed of its own, another one in each process."""

    def draw(self, shape: Any) -> torch.Tensor:
        return torch.tensor(np.random.default_rng(os.getpid() + time.monotonic_ns()).random(shape)) < 0.3


@DATASET_REGISTRY.register("set_order")
class SetOrder(Rows):
    """The rows in an order that differs by process, as that of a set of words does (forked ones have one)."""

    def load_dataset(self) -> Any:
        words = sorted({f"{i:03}" for i in range(64)}, key=lambda word: hash((word, os.getpid())))
        return [(torch.arange(LENGTH + 1) + int(word)) % SIZE for word in words]


@DATASET_REGISTRY.register("streamed")
class Streamed(Drawn):
    """A generator, which has no length."""

    def load_dataset(self) -> Iterator[Any]:
        for i in range(40):
            yield (torch.arange(LENGTH + 1) + i + random.randrange(3)) % SIZE


@DATASET_REGISTRY.register("empty_stream")
class EmptyStream(Rows):
    def load_dataset(self) -> Any:
        return iter(())


@DATASET_REGISTRY.register("unlabelled")
class Unlabelled(Rows):
    """No label counts in the second batch."""

    def process_batch(self, batch: Any) -> Any:
        made = super().process_batch(batch)
        ignored = torch.tensor([int(row[0]) % 30 >= 8 for row in batch])
        return made | {"labels": made["labels"].masked_fill(ignored[:, None], -100)}
