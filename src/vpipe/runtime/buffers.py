"""Buffers that a forward changes in place and then reads: a running mean of the user's own, a codebook, a counter.

One process runs a unit's backward before the next unit's forward. A pipeline does not, so the backward would find the
buffer as a later unit has left it, and autograd would refuse it. Where a stage's forward has changed a buffer, what
autograd has saved of its buffers therefore becomes a copy at the forward's end:

    unit 0   buffer += 1; y = x * buffer      has saved the buffer; then a copy of it
    unit 1   buffer += 1; y = x * buffer      changes the buffer, not the copy

The first forward finds out; a stage whose buffers stay constant pays nothing later. One that begins to change them
afterwards is refused by autograd once, in words, if units were under way, and runs from the next step on. Statistics of
torch's own norms are left out: their kernels change them and read them as they should.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn, strided
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase

from vpipe.runtime.memory.saved_tensors import SavedTensor


class ChangingBuffers:
    """The buffers of a stage that a forward may change."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parts = {part: None for module in modules for part in module.modules() if not isinstance(part, _NormBase)}
        self._slots = [(part, slot) for part in parts for slot, _ in part.named_buffers(recurse=False)]
        self._seen = False
        self._change = False
        self._storages: frozenset[int] = frozenset()
        self._held: list[SavedTensor] = []

    @property
    def are_none(self) -> bool:
        return not self._slots

    def note(self, tensor: Tensor, saved: SavedTensor) -> None:
        """Autograd has saved a tensor; perhaps a part of a buffer."""
        if self._storages and tensor.layout is strided and tensor.untyped_storage()._cdata in self._storages:
            self._held.append(saved)

    def _pack(self, tensor: Tensor) -> SavedTensor:
        saved = SavedTensor(tensor, None)
        self.note(tensor, saved)
        return saved

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around a forward: what it saves of a changing buffer stays as it is at the end."""
        if not self._slots:
            yield
            return
        buffers = [buffer for part, slot in self._slots if (buffer := part._buffers[slot]) is not None]
        before = [buffer._version for buffer in buffers]
        try:
            if self._seen and not self._change:
                yield
            else:
                self._storages = frozenset(buffer.untyped_storage()._cdata for buffer in buffers)
                with saved_tensors_hooks(self._pack, SavedTensor.get):
                    yield
            self._seen = True
            self._change = self._change or before != [buffer._version for buffer in buffers]
            for saved in self._held if self._change else ():
                saved.keep()
        finally:
            self._held.clear()
            self._storages = frozenset()
