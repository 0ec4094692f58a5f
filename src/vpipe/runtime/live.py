"""How many bytes of tensors are alive at once: counted operation by operation, so the figure is exact and repeatable.

Resident memory says what a process holds, with everything that an allocator keeps back. What a schedule promises is
about tensors: activations, gradients, versions. On a CPU nobody counts these, so this does, for one step at a time.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations of this thread make while it is open, ``but`` for those of some tensors."""

    def __init__(self, *but: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, int] = {tensor.untyped_storage()._cdata: 0 for tensor in but}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
