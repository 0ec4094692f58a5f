"""What the swapped layers of a unit have saved for its backward, ready to leave.

Autograd hands every tensor that it saves to ``pack`` and asks ``unpack`` for it in the backward. Several saved tensors
may be views of one storage (the parts of a split, a weight and its transpose), so a storage is carried once and each
tensor remembers its place in it:

    graph node ── SavedTensor ─┐
    graph node ── SavedTensor ─┴─ Swappable ── storage        after OUT it is empty; IN fills it

Only the graph keeps a swappable alive, so memory is freed as the backward proceeds. What others hold too stays where it
is: weights and buffers, the batch, values that need no gradient. Small tensors stay as well: they are not worth a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from vpipe.runtime.crossing import copied
from vpipe.runtime.memory.swap import Swappable, worth_moving


class SavedTensor:
    """One tensor that a backward needs: whole, or as a place in a swappable.

    Autograd checks the versions of the tensors that it holds itself, and not of these.
    """

    __slots__ = ("__weakref__", "_dtype", "_place", "_swappable", "_tensor", "_version")

    def __init__(self, tensor: Tensor, swappable: Swappable | None) -> None:
        self._tensor: Tensor | None = tensor.detach()
        self._version = tensor._version
        self._swappable = swappable
        if swappable is not None:
            self._place = (tensor.storage_offset(), tensor.shape, tensor.stride())
            self._dtype = tensor.dtype

    def leave(self) -> None:
        """Hold the swappable alone; its bytes must still be those that were saved."""
        self._check()
        self._tensor = None

    def keep(self) -> None:
        """Hold a copy: the tensor is about to change, and the backward needs it as it is."""
        if self._tensor is not None and self._tensor._version == self._version:
            self._tensor = copied(self._tensor)
            self._version = self._tensor._version

    def get(self) -> Tensor:
        if self._tensor is not None:
            self._check()
            return self._tensor
        assert self._swappable is not None
        storage = self._swappable.full()
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._place)

    def _check(self) -> None:
        if self._tensor is not None and self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {tuple(self._tensor.shape)} is at version {self._tensor._version}, "
                f"but version {self._version} was saved; let the layer compute a new tensor"
            )


class SavedTensors:
    """All that one unit has saved in the swapped regions of a stage; ``staying`` are tensors that others hold, and
    ``note`` is told of every tensor."""

    def __init__(self, staying: Iterable[Tensor], note: Callable[[Tensor, SavedTensor], None] | None = None) -> None:
        self._note = note
        self._staying = {tensor.untyped_storage()._cdata for tensor in staying if _is_plain(tensor)}
        self._swappables: WeakValueDictionary[int, Swappable] = WeakValueDictionary()
        self._saved: WeakSet[SavedTensor] = WeakSet()
        self._leaves: list[Tensor] = []
        self._out: list[Swappable] | None = None

    def pack(self, tensor: Tensor) -> SavedTensor:
        swappable = self._swappable(tensor)
        saved = SavedTensor(tensor, swappable)
        if swappable is not None:
            self._saved.add(saved)
        elif self._note is not None:
            self._note(tensor, saved)
        return saved

    def unpack(self, saved: SavedTensor) -> Tensor:
        return saved.get()

    def enter(self, leaf: Tensor) -> None:
        """A leaf of the graph, which only has to gather a gradient: the layers got an alias, so its data may leave."""
        self._leaves.append(leaf)

    def _swappable(self, tensor: Tensor) -> Swappable | None:
        if not _is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        if storage._cdata in self._staying or not worth_moving(storage):
            return None
        swappable = self._swappables.get(
            storage._cdata
        )  # a swappable keeps its storage alive, so the address is that of no other
        if swappable is None:
            swappable = self._swappables[storage._cdata] = Swappable(storage)
        return swappable

    def leave(self) -> list[Swappable]:
        """What goes out; the graph is left with empty swappables."""
        for saved in list(self._saved):
            saved.leave()
        for leaf in self._leaves:
            leaf.data = hollow(leaf)
        self._leaves.clear()
        self._out = list(self._swappables.values())
        self._swappables.clear()
        return self._out

    def come_back(self) -> list[Swappable]:
        """What went out."""
        swappables, self._out = self._out, None
        assert swappables is not None, "only what went out can come back"
        return swappables


def _is_plain(tensor: Any) -> bool:
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def hollow(tensor: Tensor) -> Tensor:
    """A tensor with the same sizes and strides and no memory: all that autograd asks of a leaf when it stores its
    gradient."""
    found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    found.untyped_storage().resize_(0)
    return found
