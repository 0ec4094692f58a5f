"""The interface between the engine and whatever carries its messages.

A rank posts a receive before it needs the value, sends without waiting, and takes a value when it must have it.
Messages of one channel (source stage, target stage, direction) arrive in the order in which they were sent. A few
collective operations serve what concerns several ranks at once: initial weights, gradient norms, losses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from vpipe.runtime.transport.wire import Envelope


class Transport(Protocol):
    """What a rank sees of the others. Some transports have nothing to do when a program or step begins or ends."""

    rank: int
    num_ranks: int

    def begin_program(self, program: Hashable, data: Callable[[], Hashable]) -> None:
        """Called before ``begin_step`` with what tells programs apart: messages of one look alike from step to step, as
        long as ``data`` is the same on every rank."""
        return

    def begin_step(self, step: int) -> None:
        """Called once before the actions of a step; every message of the step before has been taken."""
        return

    def post(self, envelope: Envelope, source_rank: int) -> None:
        """Make room for a message that will come."""

    def take(self, envelope: Envelope) -> Any:
        """Wait for a posted message; its value, with tensors that need gradients marked so."""

    def send(self, envelope: Envelope, target_rank: int, value: Any) -> None:
        """Send a value; returns before it has arrived. The value may be changed or dropped afterwards."""

    def end_step(self) -> None:
        """Wait until everything that was sent has left."""
        return

    def all_gather(self, value: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None) -> list[Tensor]:
        """The flat tensors of all ``ranks``, in order. Every rank of the group calls it; ``sizes`` saves a round where
        they are known."""

    def all_reduce(self, value: Tensor, ranks: Sequence[int]) -> None:
        """Sum in place, in whatever order is fast."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank cannot go on."""

    def close(self) -> None:
        """Release what the transport holds."""
        return


def gather_text(transport: Transport, text: str) -> list[str]:
    """Every rank's text. All ranks call this at the same place."""
    mine = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    blocks = transport.all_gather(mine, range(transport.num_ranks))
    return [bytes(block.tolist()).decode().strip() for block in blocks]
