"""What a message between devices looks like, so that its receiver can make room before it comes.

A device's backend carries bytes whose number both ends must know. The form of a message says it: its structure, and of
every tensor what ``TensorFacts`` says. It travels by the host's transport when it is new, with those tensors that are
on the host anyway (a unit's share); the others travel as bytes from device to device, each as it lies in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vpipe.runtime.crossing import ValueForm, check_tensor, fill, flatten
from vpipe.runtime.device import is_host
from vpipe.runtime.transport.wire import TensorFacts, layout_of, parsed


class Form(NamedTuple):
    """What must be known of a message."""

    structure: ValueForm
    facts: tuple[TensorFacts, ...]
    there: tuple[bool, ...]
    """Per tensor, whether it is on a device."""

    def __str__(self) -> str:
        return ", ".join(f"{str(fact.dtype).removeprefix('torch.')}{list(fact.shape)}" for fact in self.facts)

    @property
    def moving(self) -> Iterator[TensorFacts]:
        """Of the tensors that go from device to device."""
        return (fact for fact, there in zip(self.facts, self.there, strict=True) if there)

    @property
    def brings_numbers(self) -> bool:
        """Whether a part of the message is on the host, so that the host's transport carries it every time."""
        return not all(self.there)

    def described(self) -> tuple[str, tuple[bool, ...]]:
        """Itself as a value that the host's transport carries."""
        return layout_of(self.structure, self.facts).text.decode(), self.there

    @classmethod
    def understood(cls, text: str, there: tuple[bool, ...]) -> Form:
        layout = parsed(text.encode())
        return cls(layout.structure, layout.facts, there)


def form_of(value: Any) -> tuple[Form, list[Tensor]]:
    """The form of a message, and its tensors."""
    tensors: list[Tensor] = []
    structure = flatten(value, tensors)
    for tensor in tensors:
        check_tensor(tensor)
    return Form(structure, tuple(map(TensorFacts.of, tensors)), tuple(not is_host(t.device) for t in tensors)), tensors


def room(facts: TensorFacts, device: torch.device) -> Tensor:
    """Bytes for a tensor."""
    return torch.empty(facts.span * facts.dtype.itemsize, dtype=torch.uint8, device=device)


def seen(memory: Tensor, facts: TensorFacts) -> Tensor:
    """The tensor that lies in these bytes."""
    return memory.view(facts.dtype).as_strided(facts.shape, facts.strides, facts.shift)


def snapshot(tensor: Tensor, facts: TensorFacts) -> Tensor:
    """The bytes of a tensor as they are now for the compute stream."""
    memory = room(facts, tensor.device)
    fill(seen(memory, facts), tensor)
    return memory
