"""A block: parameters whose numbers, and those of their optimizer states, lie one behind the other.

    block    parameters   p      q           r            views of ``memory``, where they lie together
             exp_avg      ──     ─────────   ──           views of one tensor, always
             step         •      •           •            views of one vector of counts, all the same

The tensors that others hold (a parameter, a state's tensor) stay the tensors they are; they are given other memory.
Somebody may give them yet another (``load_state_dict``, a move, ``p.data = …``): addresses tell.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_C: Any = torch._C
_STRIDED = torch.strided
_address = Tensor.data_ptr


class Block:
    """Parameters of one ``group`` of an optimizer whose states have the same form and the same ``counts``."""

    def __init__(
        self, group: Mapping[str, Any], parameters: Sequence[Tensor], states: Mapping[Any, Any], counts: Collection[str]
    ) -> None:
        self.group, self.parameters = group, list(parameters)
        self.memory: Tensor | None = None
        """Where the parameters lie together."""
        self._forms: list[tuple[torch.Size, tuple[int, ...], int]] = []
        begin = 0
        for parameter in self.parameters:
            self._forms.append((parameter.shape, parameter.stride(), begin))
            begin += parameter.numel()
        self._shapes = [(shape, strides) for shape, strides, _ in self._forms]
        self._dtype = self.parameters[0].dtype
        self._addresses: list[int] = []
        held = [states[parameter] for parameter in self.parameters]
        self._names = list(held[0])
        self._flat: dict[str, Tensor] = {}
        self._counts: dict[str, tuple[Tensor, Tensor]] = {}
        """Name → (the counts of all parameters, the one of them all)."""
        self._places: dict[str, list[int]] = {}
        for name in self._names:
            tensors = [state[name] for state in held]
            if name in counts:
                together = torch.stack(tensors)
                views = list(together.unbind())
                self._counts[name] = together, tensors[0].clone()
            else:
                together = joined(tensors)
                views = self.views(together)
                self._flat[name] = together
            for tensor, view in zip(tensors, views, strict=True):
                tensor.data = view
            self._places[name] = _addresses(tensors)

    def is_as_it_was(self, optimizer: Any) -> bool:
        """Whether parameters and states are still those of the block, and all gradients can be joined."""
        held = list(map(optimizer.state.get, self.parameters))
        if not any(group is self.group for group in optimizer.param_groups):
            return False
        if any(state is None or len(state) != len(self._names) for state in held):
            return False
        for name, places in self._places.items():
            tensors = [state.get(name) for state in held]
            if set(map(type, tensors)) != {Tensor} or list(map(_address, tensors)) != places:
                return False
        for counts, _ in self._counts.values():
            if len(set(counts.tolist())) > 1:
                return False
        gradients = [parameter.grad for parameter in self.parameters]
        if any(each is None or each.dtype is not self._dtype or each.layout is not _STRIDED for each in gradients):
            return False
        return [(each.shape, each.stride()) for each in self.parameters] == self._shapes

    def state(self) -> dict[str, Tensor]:
        """The state of the block as that of one parameter."""
        found = dict(self._flat)
        for name, (counts, one) in self._counts.items():
            found[name] = one.copy_(counts[0])
        return {name: found[name] for name in self._names}

    def count(self, state: Mapping[str, Tensor]) -> None:
        """What a step has made of ``state()``."""
        for name, (counts, _) in self._counts.items():
            counts.fill_(state[name])
        for name, flat in self._flat.items():
            if state[name] is not flat:
                flat.copy_(state[name])

    @property
    def is_together(self) -> bool:
        """Whether the parameters lie in ``memory``."""
        return self.memory is not None and _addresses(self.parameters) == self._addresses

    def move_together(self) -> None:
        """Give the parameters memory of their own, one behind the other, with the values that they have."""
        self.memory = self.memory.clone() if self.memory is not None and self.is_together else joined(self.parameters)
        for parameter, view in zip(self.parameters, self.views(self.memory), strict=True):
            parameter.data = view
        self._addresses = _addresses(self.parameters)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parts of a tensor in the form of the parameters."""
        return [flat.as_strided(shape, strides, begin) for shape, strides, begin in self._forms]


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """The numbers of all tensors, one behind the other, in new memory."""
    found: Tensor = _C._nn.flatten_dense_tensors([tensor.detach() for tensor in tensors])
    return found


def are_apart(tensors: Sequence[Tensor]) -> bool:
    """Whether no two of them share memory."""
    strided = {id(t): t for t in tensors if t.layout is torch.strided and t.numel()}
    spans = sorted((t.data_ptr(), _extent(t) * t.element_size()) for t in strided.values())
    return all(begin + size <= after for (begin, size), (after, _) in itertools.pairwise(spans))


def _extent(tensor: Tensor) -> int:
    """Numbers from the first to the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(_address, tensors))
