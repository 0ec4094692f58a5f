"""What ranks tell each other before an update: the losses of all units and the norms of all gradients, in one message.

*Losses.* A rank's block has a row for each of its layers and a column for each unit of the step; the rank of the last
stage adds a row for the loss itself and one for the units' shares of the batch. On a device the block is put together
there, so that no host waits for the numbers before the step is over.

*Norms* say how much to clip, and whether an update may be made. A gradient may be finite and its norm not (the square
of 1e20 is no float32). Such an update is made, as torch makes it; only a gradient that is itself not finite skips one.
Sparse gradients count by the values that they hold.

*Order.* Norms are put together in the order of layers, whatever the partition. A rank sends one number for each of its
parameters, stage by stage, and their reader must know which is which. So ranks tell each other once how many
parameters their layers have. A parameter without a gradient must not count at all, as in one process: the host sends a
number that says so, and takes it out of what it has read. A device sends only what there is, because no host reads
there; hosts know how many those are, and tell each other each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, reduce
from itertools import chain
from math import isfinite, isinf
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from vpipe.layer import TiedWeight
from vpipe.runtime.device import HOST, Number, beside, is_host
from vpipe.runtime.flow import Flow
from vpipe.runtime.stage import Stage
from vpipe.runtime.transport.base import Transport
from vpipe.runtime.updates.optimizing import CLIP

LossKey = tuple[int, int]
"""(layer, microbatch)."""
Group = tuple[int, float]
"""A number, and the norm to which gradients are clipped by their own; see ``optimizing.CLIP``."""
REST, ALL = (0, 0.0), (-1, 0.0)
Sort = tuple[torch.dtype, Group]
"""Of a parameter: its dtype, and the group by whose norm it is clipped."""
GroupNorms = dict[Group, Tensor]
Factors = dict[Group, Tensor]
NO_GRADIENT = -1.0
OVERFLOWED = -2.0
"""Stands for the norm of a finite gradient that is infinite in the gradient's own precision."""
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128)


class LossBlocks:
    """The layout of every rank's block."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._rows: dict[int, list[int]] = {}
        self._pinned: Tensor | None = None
        """What a device may still copy from, until the next step writes its own."""

    def rows(self, rank: int) -> list[int]:
        """The layers of a rank, and after the last of all what ``Result.losses`` has of its ends."""
        if rank not in self._rows:
            self._rows[rank] = self._found_rows(rank)
        return self._rows[rank]

    def _found_rows(self, rank: int) -> list[int]:
        bounds, stages = self._flow.bounds, self._flow.layout.stages_of(rank)
        rows = [layer for stage in stages for layer in range(*bounds[stage])]
        end = len(self._flow.layers)
        first, last = (stage in stages for stage in (0, len(bounds) - 1))
        return rows + [end, end + 1] * last + [end + 2] * first + [end + 3] * last

    def size(self, rank: int, num_units: int) -> int:
        return len(self.rows(rank)) * num_units

    def written(self, losses: Mapping[LossKey, Number], rank: int, num_units: int, device: torch.device) -> Tensor:
        """A rank's block, where the rank computes; numbers of the host go there through pinned memory."""
        rows = {layer: row for row, layer in enumerate(self.rows(rank))}
        places = {rows[layer] * num_units + microbatch: value for (layer, microbatch), value in losses.items()}
        known = [0.0] * (len(rows) * num_units)
        for place, value in places.items():
            known[place] = 0.0 if isinstance(value, Tensor) else value
        block = torch.tensor(known, dtype=torch.float64)
        if is_host(device):
            return block
        self._pinned = block.pin_memory()
        block = self._pinned.to(device, non_blocking=True)
        there = {place: value for place, value in places.items() if isinstance(value, Tensor)}
        parts, begin = [], 0
        for place in sorted(there):
            parts += [block[begin:place], there[place].reshape(1)]
            begin = place + 1
        return torch.cat([*parts, block[begin:]])

    def read(self, rank: int, num_units: int, block: Tensor) -> dict[LossKey, float]:
        """Those of a block, now on the host, that are not zero: of a stage's replicas, each knows its own units."""
        rows = self.rows(rank)
        return {(rows[at // num_units], at % num_units): value for at, value in enumerate(block.tolist()) if value}


def norms(parameters: Sequence[Tensor]) -> Tensor:
    """The norm of each parameter's gradient, or ``NO_GRADIENT``; where the gradients are."""
    held = [values_of(p.grad) for p in parameters if p.grad is not None]
    known = torch._foreach_norm(held) if held else []
    if known and len(known) == len(parameters) and len({norm.dtype for norm in known}) == 1:
        return torch.stack(list(known)).double()  # most are alike: converted at once
    found = iter(known)
    sizes = [
        next(found).double()
        if p.grad is not None
        else torch.full((), NO_GRADIENT, dtype=torch.float64, device=p.device)
        for p in parameters
    ]
    return torch.stack(sizes) if sizes else torch.empty(0, dtype=torch.float64)


def norms_there(parameters: Sequence[Tensor], device: torch.device) -> Tensor:
    """The norms of those gradients that are there, on a device, told apart where the norm alone is infinite; the host
    does not wait."""
    held = [values_of(p.grad) for p in parameters if p.grad is not None]
    if not held:
        return torch.empty(0, dtype=torch.float64, device=device)
    found = torch.stack([norm.double() for norm in torch._foreach_norm(held)])
    finite = torch.isfinite(torch.stack(torch._foreach_norm(held, torch.inf)))
    return torch.where(found.isinf() & finite, OVERFLOWED, found)


def values_of(gradient: Tensor) -> Tensor:
    """The numbers of a gradient."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def told_apart(found: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """The norms, now on the host: of those that are infinite, which gradients are not."""
    for place, size in enumerate(found.tolist()):  # one operation: in a process that has slept each takes long
        gradient = parameters[place].grad if isinf(size) else None
        if gradient is not None and bool(torch.isfinite(values_of(gradient)).all()):
            found[place] = OVERFLOWED
    return found


def judge(found: Tensor, sorts: Sequence[Sort]) -> tuple[bool, GroupNorms]:
    """Whether all gradients are finite, and the norms of all: as ``torch.nn.utils.get_total_norm`` adds them."""
    sizes = found.tolist()
    if NO_GRADIENT in sizes:
        found = found[found != NO_GRADIENT]
        sorts = [sort for sort, size in zip(sorts, sizes, strict=True) if size != NO_GRADIENT]
    return all(map(isfinite, sizes)), _totals(found, sorts)


def judge_there(found: Tensor, sorts: Sequence[Sort]) -> tuple[Tensor, GroupNorms]:
    """The same of numbers on a device, where both answers stay; all of them are norms."""
    return torch.isfinite(found).all(), _totals(found, sorts)


def judge_here(parameters: Sequence[Tensor]) -> tuple[bool | Tensor, GroupNorms]:
    """The same of one stage; on a device both answers stay there."""
    device = parameters[0].device if parameters else HOST
    if is_host(device):
        return judge(told_apart(norms(parameters), parameters), [sort_of(p) for p in parameters])
    return judge_there(norms_there(parameters, device), [sort_of(p) for p in parameters if p.grad is not None])


def sort_of(parameter: Tensor) -> Sort:
    return parameter.dtype, getattr(parameter, CLIP, REST)


def _totals(found: Tensor, sorts: Sequence[Sort]) -> GroupNorms:
    """The norm of all, and of each group that is clipped by its own, where there are several."""
    told: GroupNorms = {ALL: _total(found, [dtype for dtype, _ in sorts])}
    groups = {group for _, group in sorts}
    for group in groups if groups != {REST} else ():
        places = [place for place, (_, of) in enumerate(sorts) if of == group]
        told[group] = _total(found[places], [sorts[place][0] for place in places])
    return told


def clip(parameters: Iterable[Tensor], factors: Factors) -> None:
    """Multiply each gradient by its group's factor."""
    held: dict[Group, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            held.setdefault(sort_of(parameter)[1], []).append(parameter.grad)
    for group, gradients in held.items():
        if (factor := factors.get(group)) is not None:
            multiply(gradients, beside(factor, gradients[0]))


def _total(found: Tensor, dtypes: Sequence[torch.dtype]) -> Tensor:
    """The norm of these norms; torch adds those of one dtype after the other, in an order of its own."""
    dtype = promoted(dtypes)
    if not len(found):
        return torch.zeros((), dtype=dtype, device=found.device)
    if len(set(dtypes)) > 1:
        found = found[_order_of(tuple(dtypes))]
    total: Tensor = torch.linalg.vector_norm(torch.where(found == OVERFLOWED, torch.inf, found).to(dtype))
    return total


@lru_cache(maxsize=16)
def _order_of(dtypes: tuple[torch.dtype, ...]) -> list[int]:
    alike = _group_tensors_by_device_and_dtype([[torch.empty(0, dtype=dtype) for dtype in dtypes]], with_indices=True)
    return [place for _, places in alike.values() for place in places]


def multiply(gradients: Sequence[Tensor], factor: Tensor | float) -> None:
    """In place, sparse gradients too."""
    _change(gradients, torch._foreach_mul_, Tensor.mul_, factor)


def divide(gradients: Sequence[Tensor], divisor: float) -> None:
    """In place, sparse gradients too."""
    _change(gradients, torch._foreach_div_, Tensor.div_, divisor)


def _change(gradients: Sequence[Tensor], change_all: Any, change: Any, number: Tensor | float) -> None:
    if dense := [gradient for gradient in gradients if not gradient.is_sparse]:
        change_all(dense, number)
    for gradient in gradients:
        if gradient.is_sparse:
            change(gradient, number)


ParameterSorts = list[list[tuple[int, list[Sort]]]]
"""Per rank (layer, the sorts of its parameters)."""
Waited = Callable[[int], None]
"""Told that all others have come, and since when (``perf_counter_ns``) this rank has waited for them."""


class NormExchange:
    """One rank's part."""

    def __init__(
        self,
        transport: Transport,
        stages: Mapping[int, Stage],
        tied: Sequence[TiedWeight],
        device: torch.device,
    ) -> None:
        self._transport, self._ranks = transport, range(transport.num_ranks)
        self._stages, self._tied, self._device = stages, tied, device
        self._known: ParameterSorts | None = None

    def gather(
        self, mine: list[Tensor], losses: Tensor, num_losses: Callable[[int], int], waited: Waited
    ) -> tuple[Tensor, list[Tensor], list[Sort]]:
        """All norms in the order of layers, every rank's losses, and the sorts of the gradients."""
        since = perf_counter_ns()
        here = is_host(self._device)
        order = self._order() if here else self._held(self._order())
        sizes = [sum(len(sorts) for _, sorts in each) + num_losses(rank) for rank, each in enumerate(order)]
        block = torch.cat([*mine, losses])
        found = self._transport.all_gather(block, self._ranks, sizes)
        waited(since)
        by_layer: dict[int, tuple[Any, list[Sort]]] = {}
        told = []
        for block, layers in zip(found, order, strict=True):
            at, known = 0, block.tolist() if here else block  # numbers of the host need no operation for each layer
            for layer, sorts in layers:
                begin, at = at, at + len(sorts)
                by_layer.setdefault(layer, (known[begin:at], sorts))  # replicas agree: the first will do
            told.append(block[at:])
        parts = [by_layer[layer][0] for layer in sorted(by_layer)]
        all_sorts = [sort for layer in sorted(by_layer) for sort in by_layer[layer][1]]
        empty = torch.empty(0, dtype=torch.float64, device=self._device)
        norms = torch.tensor([*chain(*parts)], dtype=torch.float64) if here else torch.cat(parts or [empty])
        return norms, told, all_sorts

    def _order(self) -> ParameterSorts:
        """Per rank, in the order of its block, the layers and the sorts of their parameters; asked once."""
        if self._known is None:
            sorts = [(layer, *sort_of(p)) for layer, p in self._parameters()]
            mine = [number for layer, dtype, group in sorts for number in (layer, _FLOATS.index(dtype), *group)]
            told = self._transport.all_gather(torch.tensor(mine, dtype=torch.float64), self._ranks)
            self._known = [_by_layer(block.view(-1, 4).tolist()) for block in told]
        return self._known

    def _held(self, order: ParameterSorts) -> ParameterSorts:
        """The same of the parameters that have a gradient."""
        mine = torch.tensor([p.grad is not None for _, p in self._parameters()], dtype=torch.int64)
        told = self._transport.all_gather(mine, self._ranks, [sum(len(sorts) for _, sorts in each) for each in order])
        found = []
        for block, layers in zip(told, order, strict=True):
            has = iter(block.tolist())
            found.append([(layer, [sort for sort in sorts if next(has)]) for layer, sorts in layers])
        return found

    def _parameters(self) -> list[tuple[int, Tensor]]:
        """(layer, parameter) of all that count, stage by stage."""
        stages = [self._stages[index] for index in sorted(self._stages)]
        return [
            (int(name.split(".", 1)[0]), stage.weights.parameters[name])
            for stage in stages
            for name in _named(stage, self._tied)
        ]


def _by_layer(numbers: Sequence[tuple[float, float, float, float]]) -> list[tuple[int, list[Sort]]]:
    found: dict[int, list[Sort]] = {}
    for layer, code, group, most in numbers:
        found.setdefault(int(layer), []).append((_FLOATS[int(code)], (int(group), most)))
    return list(found.items())


def promoted(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype in which torch would add up norms of these: that of their real parts."""
    return reduce(torch.promote_types, [dtype.to_real() for dtype in dtypes]) if dtypes else torch.float32


def _named(stage: Stage, tied: Sequence[TiedWeight]) -> list[str]:
    """The parameters that count towards the norm: a tied weight counts once, where it is first."""
    later = {f"{layer}.{name}" for tie in tied for layer, name in tie.owners[1:]}
    return [name for name in stage.weights.parameters if name not in later]


def counted(stage: Stage, tied: Sequence[TiedWeight]) -> list[Tensor]:
    return [stage.weights.parameters[name] for name in _named(stage, tied)]
