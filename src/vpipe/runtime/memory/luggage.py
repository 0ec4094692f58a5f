"""What the swapped layers of a unit have saved for its backward, ready to leave.

Autograd hands every tensor that it saves to ``pack`` and asks ``unpack`` for it in the backward. Several saved tensors
may be views of one storage (the parts of a split, a weight and its transpose), so a storage is carried once and each
tensor remembers its place in it:

    graph node ── Saved ─┐
    graph node ── Saved ─┴─ Slot ── storage        after OUT the slot is empty; IN fills it

Only the graph keeps a slot alive, so memory is freed as the backward proceeds. What others hold too stays where it is:
weights and buffers, the batch, values that need no gradient. Small tensors stay as well: they are not worth a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, UntypedStorage

from vpipe.runtime.memory.swap import Parcel, worth_moving
from vpipe.runtime.transport.strides import copied


class Slot:
    """A storage, or the room for it."""

    def __init__(self, storage: UntypedStorage) -> None:
        self.storage: UntypedStorage | None = storage
        self._bytes, self._device = storage.nbytes(), storage.device

    def full(self) -> UntypedStorage:
        assert self.storage is not None, "the bytes are out: IN must come first"
        return self.storage

    def empty(self) -> None:
        self.storage = None

    def refill(self) -> UntypedStorage:
        # Memory of torch's own, so that it is aligned as that of the forward was.
        self.storage = torch.empty(self._bytes, dtype=torch.uint8, device=self._device).untyped_storage()
        return self.storage


class Saved:
    """One tensor that a backward needs: whole, or as a place in a slot.

    Autograd checks the versions of the tensors that it holds itself; of these nobody else does.
    """

    __slots__ = ("__weakref__", "_dtype", "_place", "_slot", "_tensor", "_version")

    def __init__(self, tensor: Tensor, slot: Slot | None) -> None:
        self._tensor: Tensor | None = tensor.detach()
        self._version = tensor._version
        self._slot = slot
        if slot is not None:
            self._place = (tensor.storage_offset(), tensor.shape, tensor.stride())
            self._dtype = tensor.dtype

    def leave(self) -> None:
        """Hold the slot alone; its bytes must still be those that were saved."""
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
        assert self._slot is not None
        storage = self._slot.full()
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._place)

    def _check(self) -> None:
        if self._tensor is not None and self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {tuple(self._tensor.shape)} is at version {self._tensor._version}, "
                f"but version {self._version} was saved; let the layer compute a new tensor"
            )


class Luggage:
    """All that one unit has saved in the swapped regions of a stage; ``staying`` are tensors that others hold, and
    ``note`` is told of every tensor."""

    def __init__(self, staying: Iterable[Tensor], note: Callable[[Tensor, Saved], None] | None = None) -> None:
        self._note = note
        self._staying = {tensor.untyped_storage()._cdata for tensor in staying if _is_plain(tensor)}
        self._slots: WeakValueDictionary[int, Slot] = WeakValueDictionary()
        self._saved: WeakSet[Saved] = WeakSet()
        self._leaves: list[Tensor] = []
        self._parcel: Parcel | None = None

    def pack(self, tensor: Tensor) -> Saved:
        slot = self._slot(tensor)
        saved = Saved(tensor, slot)
        if slot is not None:
            self._saved.add(saved)
        elif self._note is not None:
            self._note(tensor, saved)
        return saved

    def unpack(self, saved: Saved) -> Tensor:
        return saved.get()

    def enter(self, leaf: Tensor) -> None:
        """A leaf of the graph, which only has to gather a gradient: the layers got an alias, so its data may leave."""
        self._leaves.append(leaf)

    def _slot(self, tensor: Tensor) -> Slot | None:
        if not _is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        if storage._cdata in self._staying or not worth_moving(storage):
            return None
        slot = self._slots.get(storage._cdata)  # a slot keeps its storage alive, so the address is that of no other
        if slot is None:
            slot = self._slots[storage._cdata] = Slot(storage)
        return slot

    def leave(self) -> Parcel:
        """What goes out; the graph is left with empty slots."""
        for saved in list(self._saved):
            saved.leave()
        for leaf in self._leaves:
            leaf.data = hollow(leaf)
        self._leaves.clear()
        self._parcel = Parcel(list(self._slots.values()))
        self._slots.clear()
        return self._parcel

    def come_back(self) -> Parcel:
        """What went out."""
        parcel, self._parcel = self._parcel, None
        assert parcel is not None, "only what went out can come back"
        return parcel


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
