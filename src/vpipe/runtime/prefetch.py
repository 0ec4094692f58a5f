"""Batches on their way to a device: through pinned memory, by a stream of their own, one unit ahead of the compute.

A copy from ordinary memory makes the host wait; one from pinned memory does not. So each unit is pinned and sent while
the unit before it is computed, and the compute stream waits for the event of the unit that it is about to read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from vpipe.runtime.device import compute_stream, share, tensors_of


class Sent(NamedTuple):
    """A unit on the device, or soon."""

    value: Any
    pinned: list[Tensor]
    arrived: torch.Event


class Prefetch:
    """One kind of a step's data (inputs or targets), for one rank. ``order`` is that of the rank's forwards."""

    def __init__(self, get: Callable[[int], Any], order: Sequence[int], device: torch.device, stream: torch.Stream):
        self._get, self._order, self._device, self._stream = get, order, device, stream
        self._read: dict[int, Any] = {}
        self._following = dict(pairwise(order))
        self._ahead: dict[int, Sent] = {}
        self._underway: list[tuple[list[Tensor], torch.Event]] = []
        """Pinned memory, until it has been copied. What is on the device is its reader's alone: where the copies lag
        behind the host, all units that were read would else be there at once."""

    def __call__(self, microbatch: int) -> Any:
        """The data of a unit, ready for the compute stream; the next unit sets out."""
        found = self._ahead.pop(microbatch, None) or self._send(microbatch)
        following = self._following.get(microbatch)
        if following is not None and following not in self._ahead:
            self._ahead[following] = self._send(following)
        compute = compute_stream(self._device)
        compute.wait_event(found.arrived)
        share(tensors_of(found.value), compute)
        self._underway.append((found.pinned, found.arrived))
        self._underway = [each for each in self._underway if not each[1].query()]
        return found.value

    def forms(self) -> list[tuple[int, list[tuple[Any, ...]]]]:
        """The shapes of all units; they are read now, once, and kept until they are sent."""
        for microbatch in self._order:
            self._read[microbatch] = self._get(microbatch)
        return [
            (microbatch, [(t.dtype, tuple(t.shape), t.stride()) for t in tensors_of(value)])
            for microbatch, value in self._read.items()
        ]

    def _send(self, microbatch: int) -> Sent:
        pinned: list[Tensor] = []

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.device == self._device:
                return leaf
            source = leaf if leaf.is_pinned() else leaf.pin_memory()
            pinned.append(source)
            return source.to(self._device, non_blocking=True)

        value = self._read.pop(microbatch) if microbatch in self._read else self._get(microbatch)
        with self._stream:
            moved = tree_map(move, value)
            return Sent(moved, pinned, self._stream.record_event())
