"""From gradients to the next weights: replicas, tied weights, the global norm, and the optimizer.

In synchronous modes all ranks agree (``AGREE``) before the first stage of a batch updates: one exchange carries every
parameter's gradient norm and the losses. So clipping uses the norm over all stages, summed in the order of layers
whatever the partition, and a gradient that is not finite skips the update everywhere. Asynchronous modes have no such
moment: they clip and skip stage by stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from torch.optim import Optimizer

from vpipe.errors import UserError
from vpipe.layer import TiedWeight
from vpipe.runtime.device import Number, beside, floats, found_inf, number, read
from vpipe.runtime.modes import forget_casts
from vpipe.runtime.stage import Stage
from vpipe.runtime.transport.base import Transport
from vpipe.runtime.updates.norms import divide, judge, judge_here, multiply, norms, told_apart
from vpipe.schedule.placement import Placement

BUCKET = 1 << 20
"""Numbers that replicas exchange at a time."""
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128)


@dataclass
class LossScale:
    """What losses are multiplied by so that small fp16 gradients survive; all ranks change it alike."""

    value: float = 1.0
    dynamic: bool = False
    growth_interval: int = 2000
    good_steps: int = 0

    def update(self, finite: bool) -> None:
        if not self.dynamic:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value = max(1.0, self.value / 2)
        elif self.good_steps == self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0


def checked_scale(scale: LossScale | None, synchronous: bool) -> LossScale:
    """The user's scale, or none."""
    if scale is not None and scale.dynamic and not synchronous:
        raise UserError(
            "a dynamic loss scale needs a synchronous schedule, where all stages agree; "
            "give LossScale(value) or use bf16"
        )
    return scale or LossScale()


@dataclass(frozen=True)
class UpdateOptions:
    """How gradients become updates."""

    synchronous: bool = True
    clip_norm: float | None = None
    skip_nonfinite: bool = True
    exact_reduction: bool = True
    """Add replicas' gradients in their order; otherwise in whatever order is fast."""


class Updater:
    """One rank's updates."""

    def __init__(
        self,
        transport: Transport,
        placement: Placement,
        stages: Mapping[int, Stage],
        optimizers: Mapping[int, Optimizer],
        tied: Sequence[TiedWeight] = (),
        options: UpdateOptions | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.options = options or UpdateOptions()
        self.optimizers = dict(optimizers)
        self.scaler = loss_scale or LossScale()
        self._skipped: dict[int, Number] = {0: 0.0}
        self._norm: dict[int, Number] = {}
        self._transport = transport
        self._placement = placement
        self._stages = dict(stages)
        self._tied = tuple(tied)
        self._flow = next(iter(stages.values())).flow
        self._losses: dict[tuple[int, int], Number] = {}
        self._num_units = 0
        self._verdict: tuple[bool, Tensor | None] | None = None
        self.shared_losses: dict[tuple[int, int], float] | None = None
        self._counts: list[list[tuple[int, int, int]]] | None = None
        self.learning_rate: Callable[[int], float] | None = None
        """The learning rate of update n, the same on all stages; the optimizers' own if not given."""
        self.num_updates = dict.fromkeys(stages, 0)

    def go_on_from(self, before: Updater, num_updates: Mapping[int, int]) -> None:
        """Count on where the updater of another layout has stopped; ``num_updates`` are those of all stages."""
        self.scaler, self.learning_rate = before.scaler, before.learning_rate
        self._skipped, self._norm = before._skipped, before._norm
        self.num_updates = {stage: num_updates[stage] for stage in self.num_updates}

    @property
    def loss_scale(self) -> float:
        return self.scaler.value

    @property
    def num_skipped(self) -> int:
        """Updates left out because a gradient was not finite; asking waits for the device."""
        read(self._skipped)
        return int(floats(self._skipped)[0])

    @property
    def last_norm(self) -> float | None:
        """The gradients' norm before the last update; asking waits for the device."""
        read(self._norm)
        return floats(self._norm).get(0)

    def begin(self, losses: dict[tuple[int, int], Number], num_units: int) -> None:
        self._losses, self._num_units = losses, num_units
        self._verdict = None
        self.shared_losses = None

    def reduce(self, stage: Stage) -> None:
        """Sum over the stage's replicas; in asynchronous modes the mean of the round."""
        ranks = self._placement.ranks_of[stage.index]
        trained = [p for p in stage.weights.parameters.values() if p.requires_grad]
        mine = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8)
        anyone = torch.stack(self._transport.all_gather(mine, ranks, [len(trained)] * len(ranks))).any(0).tolist()
        # A parameter that no replica has used gets no gradient, as in one process: an optimizer leaves it alone.
        for bucket in _buckets([p for p, has in zip(trained, anyone, strict=True) if has]):
            parts = [_dense(p, "between the replicas of a stage").flatten() for p in bucket]
            total = torch.cat(parts)
            self._sum(total, ranks)
            if not self.options.synchronous:
                total.div_(len(ranks))
            begin = 0
            for parameter in bucket:
                parameter.grad = total[begin : begin + parameter.numel()].view_as(parameter)
                begin += parameter.numel()

    def _sum(self, gradient: Tensor, ranks: Sequence[int]) -> None:
        if not self.options.exact_reduction:
            self._transport.all_reduce(gradient, ranks)
            return
        first, *rest = self._transport.all_gather(gradient, ranks, [gradient.numel()] * len(ranks))
        total = first
        for other in rest:
            total = total + other
        gradient.copy_(total.view_as(gradient))

    def step(self, stage: Stage) -> None:
        """The stage's next weight version."""
        assert self._verdict is not None or not self.options.synchronous, "a synchronous program has an AGREE"
        gradients = [p.grad for p in stage.weights.parameters.values() if p.grad is not None]
        finite: bool | Tensor
        if self._verdict is not None:
            finite, factor = self._verdict
        else:
            if self.loss_scale != 1.0:
                divide(gradients, self.loss_scale)
            parameters = list(stage.weights.parameters.values())
            dtype = _promoted([p.dtype for p in parameters])
            finite, factor = self._verdict_of(*judge_here(parameters, dtype)) if self._judges else (True, None)
            self._skipped[0] = self._skipped[0] + (1.0 - finite if isinstance(finite, bool) else 1.0 - finite.double())
        stage.weights.before_update()
        with found_inf(self.optimizers[stage.index], finite) as steps:
            if steps:
                if factor is not None and gradients:
                    multiply(gradients, beside(factor, gradients[0]))
                self._set_learning_rate(stage.index)
                self.optimizers[stage.index].step()
        self.optimizers[stage.index].zero_grad(set_to_none=True)
        self.num_updates[stage.index] += 1
        stage.weights.after_update()
        forget_casts()

    def _set_learning_rate(self, stage: int) -> None:
        if self.learning_rate is not None:
            rate = self.learning_rate(self.num_updates[stage])
            for group in self.optimizers[stage].param_groups:
                group["lr"] = rate

    @property
    def _judges(self) -> bool:
        return self._skips or self.options.clip_norm is not None

    @property
    def _skips(self) -> bool:
        """Whether a gradient that is not finite skips the update."""
        return self.options.skip_nonfinite or self.scaler.dynamic

    def agree(self) -> None:
        """One exchange between all ranks: whether to update, and by what factor to clip."""
        self._verdict = self._agree()

    def _agree(self) -> tuple[bool, Tensor | None]:
        self._sum_tied()
        if self.loss_scale != 1.0:
            for stage in self._stages.values():
                divide([p.grad for p in stage.weights.parameters.values() if p.grad is not None], self.loss_scale)
        if not self._judges:
            return True, None
        order = self._parameter_order()
        counted = [_counted(self._stages[stage], self._tied) for stage in sorted(self._stages)]
        mine = read(self._losses, *map(norms, counted))  # the only wait of a synchronous step
        mine = list(map(told_apart, mine, counted))
        losses = self.local_losses()
        sizes = [sum(count for _, count, _ in counts) + self._num_losses(rank) for rank, counts in enumerate(order)]
        everyone = range(self._transport.num_ranks)
        found = self._transport.all_gather(torch.cat([*mine, losses]), everyone, sizes)
        self.shared_losses = {}
        by_layer: dict[int, Tensor] = {}
        for rank, (block, counts) in enumerate(zip(found, order, strict=True)):
            at = 0
            for layer, count, _ in counts:
                by_layer.setdefault(layer, block[at : at + count])  # replicas agree: the first will do
                at += count
            self.shared_losses.update(self._read_losses(rank, block[at:]))
        dtype = _promoted([_FLOATS[code] for counts in order for _, _, code in counts])
        everything = [by_layer[layer] for layer in sorted(by_layer)] or [torch.empty(0, dtype=torch.float64)]
        finite, factor = self._verdict_of(*judge(torch.cat(everything), dtype))
        assert isinstance(finite, bool), "what all ranks have said is on the host"
        self._skipped[0] = self._skipped[0] + (not finite)
        self.scaler.update(finite)
        return finite, factor

    def _verdict_of(self, finite: bool | Tensor, total: Tensor) -> tuple[bool | Tensor, Tensor | None]:
        """Whether to update, and the factor of ``torch.nn.utils.clip_grad_norm_``; on a device they stay there."""
        self._norm[0] = number(total)
        finite = finite if self._skips else True
        if self.options.clip_norm is None:
            return finite, None
        return finite, torch.clamp(self.options.clip_norm / (total + 1e-6), max=1.0)

    def _parameter_order(self) -> list[list[tuple[int, int, int]]]:
        """Per rank, (layer, number of parameters, their dtype) in the order of its block; asked once."""
        if self._counts is None:
            mine: list[int] = []
            for index in sorted(self._stages):
                dtypes: dict[int, list[torch.dtype]] = {}
                for name in _named(self._stages[index], self._tied):
                    parameter = self._stages[index].weights.parameters[name]
                    dtypes.setdefault(int(name.split(".", 1)[0]), []).append(parameter.dtype)
                for layer, found_dtypes in dtypes.items():
                    mine += [layer, len(found_dtypes), _FLOATS.index(_promoted(found_dtypes))]
            found = self._transport.all_gather(torch.tensor(mine, dtype=torch.int64), range(self._transport.num_ranks))
            self._counts = [[(int(a), int(b), int(c)) for a, b, c in block.view(-1, 3)] for block in found]
        return self._counts

    def _sum_tied(self) -> None:
        """Add the gradients of tied parameters, the latest owner's first as in autograd; every owner gets the sum."""
        for tie in self._tied:
            by_stage = {layer: stage for stage in self._stages.values() for layer in stage.owned}
            ranks = self._ranks_of(tie)
            owned = [(by_stage[layer], f"{layer}.{name}") for layer, name in tie.owners if layer in by_stage]
            if not owned:
                continue
            parameters = [stage.weights.parameters[name] for stage, name in owned]
            own = [_dense(p, "between the owners of a tied weight") for p in parameters]
            blocks = (
                self._transport.all_gather(torch.cat([g.flatten() for g in own]), ranks) if len(ranks) > 1 else None
            )
            total = self._sum_owners(tie, ranks, own, blocks)
            for parameter in parameters:
                parameter.grad = total.clone()

    def _sum_owners(
        self, tie: TiedWeight, ranks: Sequence[int], own: list[Tensor], blocks: list[Tensor] | None
    ) -> Tensor:
        if blocks is None:
            parts = own
        else:
            owners = {
                rank: [owner for owner in tie.owners if rank in self._holders(owner[0])] for rank in ranks
            }  # what a rank sends is what it owns, in this order: more than what it is the first home of
            held = {
                rank: dict(zip(owners[rank], block.view(-1, *own[0].shape), strict=True))
                for rank, block in zip(ranks, blocks, strict=True)
            }
            parts = [held[self._holders(owner[0])[0]][owner] for owner in tie.owners]
        order = sorted(range(len(parts)), key=lambda place: -tie.owners[place][0])
        total = parts[order[0]]
        for place in order[1:]:
            total = total + parts[place]
        return total

    def _holders(self, layer: int) -> tuple[int, ...]:
        """The ranks that hold a layer, replica 0 first."""
        return self._placement.ranks_of[self._flow.stage_of(("", layer))]

    def _ranks_of(self, tie: TiedWeight) -> list[int]:
        stages = {self._flow.stage_of(("", layer)) for layer, _ in tie.owners}
        return sorted({rank for stage in stages for rank in self._placement.ranks_of[stage]})

    def local_losses(self) -> Tensor:
        """What this rank's layers contribute to each unit's loss, as ``_read_losses`` reads it."""
        rows = {layer: row for row, layer in enumerate(self._loss_rows(self._transport.rank))}
        values = [0.0] * (len(rows) * self._num_units)
        read(self._losses)
        for (layer, unit), value in floats(self._losses).items():
            values[rows[layer] * self._num_units + unit] = value
        return torch.tensor(values, dtype=torch.float64)

    def _loss_rows(self, rank: int) -> list[int]:
        """The layers of a rank; after the last of all come the loss and the unit's share."""
        bounds = self._flow.bounds
        rows = [layer for stage in self._placement.stages_of[rank] for layer in range(*bounds[stage])]
        end = len(self._flow.layers)
        return [*rows, end, end + 1] if len(bounds) - 1 in self._placement.stages_of[rank] else rows

    def _num_losses(self, rank: int) -> int:
        return len(self._loss_rows(rank)) * self._num_units

    def _read_losses(self, rank: int, block: Tensor) -> dict[tuple[int, int], float]:
        """Those that are not zero: of a stage's replicas, each knows its own units."""
        rows, places = self._loss_rows(rank), block.nonzero().flatten()
        found = zip(places.tolist(), block[places].tolist(), strict=True)
        return {(rows[place // self._num_units], place % self._num_units): value for place, value in found}

    def gather_losses(self) -> dict[tuple[int, int], float]:
        """Every layer's contribution to every unit's loss; exchanged here unless the agreement has done so."""
        if self.shared_losses is None:
            everyone = range(self._transport.num_ranks)
            sizes = [self._num_losses(rank) for rank in everyone]
            blocks = self._transport.all_gather(self.local_losses(), everyone, sizes)
            self.shared_losses = {}
            for rank, block in enumerate(blocks):
                self.shared_losses.update(self._read_losses(rank, block))
        return self.shared_losses


def _promoted(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype in which torch would add up norms of these."""
    return reduce(torch.promote_types, dtypes) if dtypes else torch.float32


def _buckets(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbours of one dtype, as many as are worth one exchange."""
    found: list[list[Tensor]] = []
    room = 0
    for parameter in parameters:
        room -= parameter.numel()
        if not found or room < 0 or parameter.dtype != found[-1][-1].dtype:
            found.append([])
            room = BUCKET - parameter.numel()
        found[-1].append(parameter)
    return found


def _named(stage: Stage, tied: Sequence[TiedWeight]) -> list[str]:
    """The parameters that count towards the norm: a tied weight counts once, where it is first."""
    later = {f"{layer}.{name}" for tie in tied for layer, name in tie.owners[1:]}
    return [name for name in stage.weights.parameters if name not in later]


def _counted(stage: Stage, tied: Sequence[TiedWeight]) -> list[Tensor]:
    return [stage.weights.parameters[name] for name in _named(stage, tied)]


def _dense(parameter: Tensor, why: str) -> Tensor:
    """A gradient that can be exchanged."""
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    if parameter.grad.is_sparse:
        raise UserError(f"a sparse gradient cannot be exchanged {why}; make the embedding with sparse=False")
    return parameter.grad
