"""What ranks must know of each other outside a step: a few words, gathered from all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vpipe.runtime.pipeline import Pipeline


def alone(pipeline: Pipeline) -> bool:
    """Whether all ranks are in this process."""
    return len(pipeline.engines) == pipeline.placement.num_ranks


def gather_text(pipeline: Pipeline, text: str) -> list[str]:
    """Every process's text, by rank; the ranks of one process share one. All ranks call this at the same place."""
    if alone(pipeline):
        return [text]
    transport = pipeline.engines[0].transport
    mine = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    blocks = transport.all_gather(mine, range(transport.num_ranks))
    return [bytes(block.tolist()).decode().strip() for block in blocks]


def first_text(pipeline: Pipeline, text: str) -> str:
    """The first text that is not empty, the same on every rank."""
    return next((each for each in gather_text(pipeline, text) if each), "")


def gather_numbers(pipeline: Pipeline, numbers: Sequence[float]) -> list[list[float]]:
    """As many numbers of every process, by rank."""
    if alone(pipeline):
        return [list(numbers)]
    transport = pipeline.engines[0].transport
    mine = torch.tensor(list(numbers), dtype=torch.float64)
    blocks = transport.all_gather(mine, range(transport.num_ranks), [len(numbers)] * transport.num_ranks)
    return [block.tolist() for block in blocks]
