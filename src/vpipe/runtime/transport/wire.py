"""What travels between stages: any tuple, list or dict of tensors, numbers, strings and ``None``, as one block of
bytes.

A message describes itself, because shapes may change from microbatch to microbatch and because two ranks that disagree
must say so in words instead of computing with each other's garbage:

    ┌ prefix ─────────────────────────────────┬ layout ┬ pad ┬ tensor 0 ┬ pad ┬ tensor 1 …
    │ magic, step, stages, microbatch, sizes  │ JSON   │     │ raw bytes, aligned to 64
    └─────────────────────────────────────────┴────────┴─────┴──────────┴─────┴──────────

The layout is plain JSON, never pickle: reading a message can run no code. Layouts repeat, so both sides keep them in a
cache.

Words: docs/glossary.md.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from ctypes import Array, c_char, memmove, string_at
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vpipe.runtime.crossing import (
    LINE,
    NAMED,
    ValueForm,
    default_strides,
    fill,
    flatten,
    kept_strides,
    name_of,
    shift,
    span,
    unflatten,
)

ALIGN = LINE
MOST_LAYOUTS = 1024
_PREFIX = struct.Struct("<8sqiiiiqq")
_MAGIC = b"vpipe\x00\x00\x01"
ByteArray = Array[c_char]
"""Some bytes, where they are."""


class Envelope(NamedTuple):
    """Which message this is. ``backward`` is 1 for gradients."""

    step: int
    source: int
    target: int
    microbatch: int
    backward: int

    def __str__(self) -> str:
        if self.source < 0:
            return f"numbers of all ranks after step {self.step} begins"
        what = "gradients" if self.backward else "activations"
        return f"{what} of step {self.step}, microbatch {self.microbatch}, stage {self.source} → {self.target}"


class TensorFacts(NamedTuple):
    """What must be known of a tensor before its bytes come."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    needs_grad: bool
    strides: tuple[int, ...]
    """How the copy lies in memory: kernels add in another order where strides differ, and crossing a boundary must
    change no bit."""
    shift: int
    """After how many elements of a line of memory it begins."""

    @classmethod
    def of(cls, tensor: Tensor) -> TensorFacts:
        needs_grad, strides = tensor.requires_grad, kept_strides(tensor)
        return cls(tensor.dtype, tuple(tensor.shape), needs_grad, strides, shift(tensor))

    @property
    def span(self) -> int:
        """Elements of memory from the beginning of its line to its end."""
        return self.shift + span(self.shape, self.strides)


class MessageLayout(NamedTuple):
    """The form of a message: its structure, its tensors, and where their bytes lie."""

    structure: ValueForm
    facts: tuple[TensorFacts, ...]
    offsets: tuple[int, ...]
    text: bytes
    num_bytes: int
    copying: tuple[tuple[Tensor, int, int, TensorFacts, bool], ...]
    """Per tensor a template of its form and of no memory, as it lies in memory (``empty_like`` of it takes less than
    half of what ``empty`` takes), where its bytes begin, how many they are, its facts, and whether it lies as its
    dimensions are named, without gaps."""


@lru_cache(maxsize=MOST_LAYOUTS)
def layout_of(structure: ValueForm, facts: tuple[TensorFacts, ...]) -> MessageLayout:
    """The form of messages of this structure."""
    tensors = [[name_of(fact.dtype), *fact[1:]] for fact in facts]
    text = json.dumps([structure, tensors], separators=(",", ":")).encode()
    offset = _aligned(_PREFIX.size + len(text))
    offsets, copying = [], []
    for fact in facts:
        offsets.append(offset)
        dense = not fact.shift and fact.strides == default_strides(fact.shape)
        template = torch.empty((), dtype=fact.dtype).expand(fact.shape if dense else (fact.span,))
        copying.append((template, offset, fact.dtype.itemsize * template.numel(), fact, dense))
        offset = _aligned(offset + fact.dtype.itemsize * fact.span)
    return MessageLayout(structure, facts, tuple(offsets), text, offset, tuple(copying))


@lru_cache(maxsize=MOST_LAYOUTS)
def parsed(text: bytes) -> MessageLayout:
    """The form that a text describes."""
    structure, tensors = json.loads(text)
    facts = tuple(
        TensorFacts(NAMED[name], tuple(shape), bool(needs_grad), tuple(strides), shift)
        for name, shape, needs_grad, strides, shift in tensors
    )
    return layout_of(_hashable(structure), facts)


def _hashable(structure: Any) -> Any:
    return tuple(_hashable(part) for part in structure) if isinstance(structure, list) else structure


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN


class Packed(NamedTuple):
    """A message ready to go: its form, and the function that writes it into a block of ``layout.num_bytes``."""

    envelope: Envelope
    layout: MessageLayout
    tensors: list[Tensor]

    def laid(self) -> Iterator[tuple[Tensor, int, int]]:
        """Of each tensor memory whose bytes lie as they travel (its own, or a copy), where in the message they begin,
        and how many they are."""
        for tensor, (template, begin, num_bytes, fact, dense) in zip(self.tensors, self.layout.copying, strict=True):
            if not dense or not tensor.is_cpu or tensor.is_conj() or tensor.is_neg():
                copy = torch.empty_like(template, memory_format=torch.contiguous_format)
                fill(copy.as_strided(fact.shape, fact.strides, fact.shift), tensor)
                tensor = copy
            yield tensor, begin, num_bytes

    def write(self, address: int) -> None:
        """The whole message into memory."""
        head = self.head()
        memmove(address, head, len(head))
        self.write_tensors(address)

    def write_tensors(self, address: int) -> None:
        """The tensors alone, where they lie in a message that begins at ``address``."""
        for tensor, begin, num_bytes in self.laid():
            memmove(address + begin, tensor.data_ptr(), num_bytes)

    def memory(self) -> list[ByteArray]:
        """The tensors' bytes one after the other, where they are."""
        parts = []
        for tensor, _, num_bytes in self.laid():
            if num_bytes:
                part = (c_char * num_bytes).from_address(tensor.data_ptr())
                part.tensor = tensor  # type: ignore[attr-defined]  # the bytes keep their memory
                parts.append(part)
        return parts

    def head(self) -> bytes:
        """The prefix and the layout: what a message begins with."""
        layout = self.layout
        return _PREFIX.pack(_MAGIC, *self.envelope, len(layout.text), layout.num_bytes) + layout.text


def pack(envelope: Envelope, value: Any) -> Packed:
    """Describe a value; nothing is copied yet."""
    tensors: list[Tensor] = []
    structure = flatten(value, tensors)
    layout = _latest.get(structure)
    if layout is None or not all(map(_fits, layout.facts, tensors)):
        facts = tuple(map(TensorFacts.of, tensors))
        if len(_latest) >= MOST_LAYOUTS:
            _latest.clear()
        layout = _latest[structure] = layout_of(structure, facts)
    return Packed(envelope, layout, tensors)


_latest: dict[ValueForm, MessageLayout] = {}
"""Structure → the last layout that had it: most messages look like the one before."""


def _fits(fact: TensorFacts, tensor: Tensor) -> bool:
    """Whether a tensor is as a layout describes it; others are described anew."""
    return (
        tensor.shape == fact.shape
        and tensor.dtype is fact.dtype
        and tensor.requires_grad is fact.needs_grad
        and tensor.stride() == fact.strides
        and (not fact.shift if tensor.data_ptr() % LINE == 0 else shift(tensor) == fact.shift)
    )


def mismatch(expected: Envelope, found: Envelope) -> RuntimeError:
    """The error of a receiver that got another message than the next one of its program."""
    return RuntimeError(f"expected {expected}, but received {found}: the ranks run different programs or steps")


def unpack_head(block: Tensor, expected: Envelope) -> MessageLayout:
    """The form of the message that begins in ``block``; an error in words where it is not the expected one."""
    address, room = block.data_ptr(), block.numel()
    prefix = string_at(address, _PREFIX.size) if room >= _PREFIX.size else bytes(_PREFIX.size)
    magic, *numbers, length, _ = _PREFIX.unpack(prefix)
    if magic != _MAGIC or not 0 <= length <= room - _PREFIX.size:
        raise RuntimeError(
            f"expected {expected}, but the bytes that came are no vpipe message: do all ranks run the same vpipe?"
        )
    if (envelope := Envelope(*numbers)) != expected:
        raise mismatch(expected, envelope)
    return parsed(string_at(address + _PREFIX.size, length))


def unpack(block: Tensor, layout: MessageLayout, base: int = 0) -> Any:
    """The value whose tensors lie in ``block``, before which the message has ``base`` bytes. The tensors are views;
    those that need a gradient are marked so."""
    tensors = []
    for fact, offset in zip(layout.facts, layout.offsets, strict=True):
        # Blocks, and places in them, are multiples of a line, and so of every dtype's size.
        begin = (block.storage_offset() + offset - base) // fact.dtype.itemsize + fact.shift
        view = block.view(fact.dtype).as_strided(fact.shape, fact.strides, begin)
        tensors.append(view.requires_grad_(fact.needs_grad))
    return unflatten(layout.structure, tensors)


def rooms(layout: MessageLayout) -> Iterator[tuple[Tensor, Tensor, int, int]]:
    """A new tensor for each of a message, the memory to which its bytes are to be copied, where in the message these
    begin, and how many they are."""
    for template, begin, num_bytes, fact, dense in layout.copying:
        memory = torch.empty_like(template, memory_format=torch.contiguous_format)
        tensor = memory if dense else memory.as_strided(fact.shape, fact.strides, fact.shift)
        yield tensor.requires_grad_() if fact.needs_grad else tensor, memory, begin, num_bytes
