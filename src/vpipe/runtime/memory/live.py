"""How many bytes of tensors are alive at once: counted operation by operation, so the figure is exact and repeatable.

Resident memory says what a process holds, with everything that an allocator keeps back. What a schedule promises is
about tensors: activations, gradients, versions. No allocator of a CPU counts these; this does, for one step at a time.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations of this thread make while it is open.

    What an operation reads and none has made here existed before, and does not count: weights, the batch.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch asks when this class is made. To keep the compiler out of this mode it imports all of it, which takes
        seconds of every rank: where no layer is compiled, there is no compiler to keep out."""
        return "torch._dynamo" in sys.modules

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._add(tensor.untyped_storage(), made=False)
        result = function(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._add(tensor.untyped_storage(), made=True)
        return result

    def _add(self, storage: UntypedStorage, made: bool) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes() if made else 0
            self.now += self._sizes[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
