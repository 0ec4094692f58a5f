"""What a layer's new holder need not be sent: tensors of which there is a copy that it can read itself.

In an elastic run on one machine the newest copy of every rank's layers lies in memory that all ranks share. Where a
layer moves, its old holder looks whether the copy of a tensor is still the same as the tensor, and sends its place and
the sum of its words instead of its bytes. The new holder reads the place, and must find that sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from vpipe.runtime.crossing import flatten, unflatten
from vpipe.runtime.device import is_host
from vpipe.runtime.memory.sums import word_sum
from vpipe.runtime.moves.layer_state import LayerState

LEAST = 1024
"""Bytes of a tensor for which a place is worth its words."""


class HeldTensors(Protocol):
    """Copies that all ranks of a move can read."""

    def find(self, tensor: Tensor) -> list[Any] | None:
        """Where there is a copy of a tensor of this rank, in numbers and words; ``None`` where there is none that is
        the same."""

    def read(self, place: Sequence[Any]) -> Tensor:
        """The tensor at a place, in memory of its own."""


def left_out(state: LayerState, held: HeldTensors) -> LayerState:
    """The state without the tensors that are held, and where those are."""
    tensors: list[Tensor] = []
    structure = flatten(state, tensors)
    places: dict[int, list[Any]] = {}
    for number, tensor in enumerate(tensors):
        worth = tensor.nbytes >= LEAST and is_host(tensor.device) and tensor.is_contiguous()
        place = held.find(tensor) if worth else None
        if place is not None:
            places[number] = [place, word_sum(tensor)]
            tensors[number] = torch.empty(0, dtype=tensor.dtype)
    return {"state": unflatten(structure, iter(tensors).__next__), "held": places}


def filled(found: LayerState, held: HeldTensors) -> LayerState:
    """The state that ``left_out`` was given."""
    tensors: list[Tensor] = []
    structure = flatten(found["state"], tensors)
    for number, (place, told) in found["held"].items():
        tensors[number] = held.read(place)
        if word_sum(tensors[number]) != told:
            raise RuntimeError(f"the copy at {place} is not that of the tensor that moves")
    state: LayerState = unflatten(structure, iter(tensors).__next__)
    return state
