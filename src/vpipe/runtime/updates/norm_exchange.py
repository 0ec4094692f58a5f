"""The norms of all ranks' gradients, put together in the order of layers whatever the partition.

A rank sends one number for each of its parameters, stage by stage, and whoever reads them must know which is which. So
ranks tell each other once how many parameters their layers have. A parameter without a gradient must not count at all,
as in one process: the host sends a number that says so, and takes it out of what it has read. A device sends only what
there is, because nobody reads there; hosts know how many those are, and tell each other each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from vpipe.layer import TiedWeight
from vpipe.runtime.device import is_host
from vpipe.runtime.stage import Stage
from vpipe.runtime.transport.base import Transport

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128)


class NormExchange:
    """One rank's part."""

    def __init__(
        self, transport: Transport, stages: Mapping[int, Stage], tied: Sequence[TiedWeight], device: torch.device
    ) -> None:
        self._transport, self._stages, self._tied, self._device = transport, stages, tied, device
        self._known: list[list[tuple[int, int, int]]] | None = None

    def gather(
        self, mine: list[Tensor], losses: Tensor | None, num_losses: Callable[[int], int]
    ) -> tuple[Tensor, list[Tensor] | None, torch.dtype]:
        """All norms in the order of layers, every rank's losses if they go along, and the dtype to add norms in."""
        order = self._order()
        counts = [[count for _, count, _ in each] for each in order] if is_host(self._device) else self._held(order)
        rows = [num_losses(rank) if losses is not None else 0 for rank in range(len(order))]
        sizes = [sum(each) + more for each, more in zip(counts, rows, strict=True)]
        block = torch.cat(mine if losses is None else [*mine, losses])
        found = self._transport.all_gather(block, range(self._transport.num_ranks), sizes)
        by_layer: dict[int, Tensor] = {}
        told = []
        for block, layers, numbers in zip(found, order, counts, strict=True):
            at = 0
            for (layer, _, _), count in zip(layers, numbers, strict=True):
                by_layer.setdefault(layer, block[at : at + count])  # replicas agree: the first will do
                at += count
            told.append(block[at:])
        dtype = promoted([_FLOATS[code] for counts in order for _, _, code in counts])
        empty = torch.empty(0, dtype=torch.float64, device=self._device)
        norms = torch.cat([by_layer[layer] for layer in sorted(by_layer)] or [empty])
        return norms, told if losses is not None else None, dtype

    def _order(self) -> list[list[tuple[int, int, int]]]:
        """Per rank, (layer, number of parameters, their dtype) in the order of its block; asked once."""
        if self._known is None:
            dtypes: dict[int, list[torch.dtype]] = {}
            for layer, parameter in self._parameters():
                dtypes.setdefault(layer, []).append(parameter.dtype)
            mine = [
                number
                for layer, found in dtypes.items()
                for number in (layer, len(found), _FLOATS.index(promoted(found)))
            ]
            told = self._transport.all_gather(torch.tensor(mine, dtype=torch.int64), range(self._transport.num_ranks))
            self._known = [[(int(a), int(b), int(c)) for a, b, c in block.view(-1, 3)] for block in told]
        return self._known

    def _held(self, order: list[list[tuple[int, int, int]]]) -> list[list[int]]:
        """Per rank, how many parameters of each of its layers have a gradient."""
        mine = {layer: 0 for layer, _, _ in order[self._transport.rank]}
        for layer, parameter in self._parameters():
            mine[layer] += parameter.grad is not None
        block = torch.tensor(list(mine.values()), dtype=torch.int64)
        told = self._transport.all_gather(block, range(len(order)), [len(each) for each in order])
        return [each.tolist() for each in told]

    def _parameters(self) -> list[tuple[int, Tensor]]:
        """(layer, parameter) of all that count, stage by stage."""
        stages = [self._stages[index] for index in sorted(self._stages)]
        return [
            (int(name.split(".", 1)[0]), stage.weights.parameters[name])
            for stage in stages
            for name in _named(stage, self._tied)
        ]


def promoted(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype in which torch would add up norms of these."""
    return reduce(torch.promote_types, dtypes) if dtypes else torch.float32


def _named(stage: Stage, tied: Sequence[TiedWeight]) -> list[str]:
    """The parameters that count towards the norm: a tied weight counts once, where it is first."""
    later = {f"{layer}.{name}" for tie in tied for layer, name in tie.owners[1:]}
    return [name for name in stage.weights.parameters if name not in later]


def counted(stage: Stage, tied: Sequence[TiedWeight]) -> list[Tensor]:
    return [stage.weights.parameters[name] for name in _named(stage, tied)]
