"""From gradients to the next weights: replicas, tied weights, the global norm, and the optimizer.

In synchronous modes all ranks agree (``AGREE``) before the first stage of a batch updates: one exchange carries every
parameter's gradient norm and the losses. So clipping uses the norm over all stages, summed in the order of layers
whatever the partition, and a gradient that is not finite skips the update everywhere. Asynchronous modes have no such
moment: they clip and skip stage by stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from vpipe.errors import UserError
from vpipe.layer import TiedWeight
from vpipe.runtime.device import Number, floats, is_host, number, read
from vpipe.runtime.stage import Stage
from vpipe.runtime.surroundings import forget_casts
from vpipe.runtime.transport.base import Transport
from vpipe.runtime.updates import optimizing
from vpipe.runtime.updates.agreement import (
    ALL,
    REST,
    Factors,
    GroupNorms,
    LossBlocks,
    LossKey,
    NormExchange,
    Waited,
    clip,
    counted,
    divide,
    judge,
    judge_here,
    judge_there,
    norms,
    norms_there,
    told_apart,
)
from vpipe.runtime.updates.replicas import AMONG_REPLICAS, exchanges, trained
from vpipe.runtime.updates.rollback import Rollback, can_be_restored, can_be_told, step_told
from vpipe.runtime.updates.tied_gradients import TiedGradients, dense

if TYPE_CHECKING:
    from vpipe.runtime.options import PipelineOptions


@dataclass
class LossScale:
    """What losses are multiplied by so that small fp16 gradients survive; all ranks change it alike."""

    value: float = 1.0
    dynamic: bool = False
    growth_interval: int = 2000
    good_steps: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.value < inf or self.growth_interval < 1:
            raise UserError(
                f"the loss scale is {self.value}, growing after {self.growth_interval} steps; give a finite number "
                "above 0, and an interval of 1 or more"
            )

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


class Updater:
    """One rank's updates."""

    def __init__(
        self,
        transport: Transport,
        stages: Mapping[int, Stage],
        optimizers: Mapping[int, Optimizer],
        tied: Sequence[TiedWeight],
        options: PipelineOptions,
        synchronous: bool,
        loss_scale: LossScale,
        device: torch.device,
    ) -> None:
        self._device, self._options, self._synchronous = device, options, synchronous
        self.optimizers = dict(optimizers)
        self.scaler = loss_scale
        self._skipped: dict[int, Number] = {0: 0.0}
        self._all_skipped: int | None = None
        """Of all ranks, where each decides by itself."""
        self._norm: dict[int, Number] = {}
        self._transport = transport
        self._stages, self._tied = dict(stages), tuple(tied)
        flow = next(iter(stages.values())).flow
        self._layout, self._everyone = flow.layout, range(transport.num_ranks)
        self._ties = TiedGradients(transport, flow.layout, self._tied) if self._tied else None
        self._blocks = LossBlocks(flow)
        self._exchange = NormExchange(transport, self._stages, self._tied, device)
        self._losses: dict[LossKey, Number] = {}
        self._num_units = 0
        self._verdict: tuple[bool | Tensor, Factors | None] | None = None
        self._told: list[Tensor] | None = None
        """Every rank's losses, still on the device: read when the step is over."""
        self._undo: list[Rollback] = []
        self._repeats: bool | None = None
        self._start: Rollback | None = None
        self._skipped_before: Number = 0.0
        self.must_repeat = False
        """Whether some rank has made an update that it should not have made: said by all when losses are gathered."""
        self.shared_losses: dict[LossKey, float] | None = None
        self._numbers: Mapping[int, Sequence[float]] = {}
        """Stage → the numbers of its updates in this step."""
        self.learning_rate: Callable[[float], float] | None = None
        """The learning rate of update n, the same on all stages; the optimizers' own if not given."""
        self.num_updates = dict.fromkeys(stages, 0)
        self.before_update: Callable[[], None] = lambda: None
        """Called before this rank agrees on an update, or makes one: readers of weights beside training end."""

    def go_on_from(self, before: Updater, num_updates: Mapping[int, int]) -> None:
        """Count on where the updater of another layout has stopped; ``num_updates`` are those of all stages."""
        self.scaler, self.learning_rate = before.scaler, before.learning_rate
        self._skipped, self._norm, self._all_skipped = before._skipped, before._norm, before._all_skipped
        self.num_updates = {stage: num_updates[stage] for stage in self.num_updates}

    @property
    def loss_scale(self) -> float:
        return self.scaler.value

    @property
    def num_skipped(self) -> int:
        """Updates left out because a gradient was not finite, of all stages that leave them out by themselves; asking
        waits for the device."""
        if self._all_skipped is not None:
            return self._all_skipped
        read(self._skipped)
        return int(floats(self._skipped)[0])

    @property
    def last_norm(self) -> float | None:
        """The gradients' norm before the last update; asking waits for the device."""
        read(self._norm)
        return floats(self._norm).get(0)

    def begin(self, losses: dict[LossKey, Number], num_units: int, updates: Mapping[int, Sequence[float]]) -> None:
        """A step of so many units, and for each stage of updates of these numbers; one that must be repeated begins
        anew."""
        self._losses, self._num_units = losses, num_units
        self._verdict = self._told = None
        self._undo.clear()
        self.shared_losses = None
        self._start, again = None, self.must_repeat
        self.must_repeat = False
        self._skipped_before = self._skipped[0]
        if any(updates.values()) and not again and self._may_repeat():
            self._start = Rollback(self.optimizers.values(), self._stages.values())
        self._updates_before, self._numbers = dict(self.num_updates), updates

    def _may_repeat(self) -> bool:
        """Whether the ranks of an asynchronous schedule take a step back that has made an update too many: where some
        optimizer cannot be told, and all can be restored."""
        if self._synchronous or not self._skips or is_host(self._device):
            return False
        if self._repeats is None:
            everyone, optimizers = self._everyone, self.optimizers.values()
            mine = torch.tensor([not all(map(can_be_told, optimizers)), not all(map(can_be_restored, optimizers))])
            told = torch.stack(self._transport.all_gather(mine.byte(), everyone, [2 for _ in everyone]))
            self._repeats = told.any(0).tolist() == [True, False]
        return self._repeats

    def take_back(self) -> None:
        """The step has not been; it is about to be repeated."""
        assert self._start is not None, "all ranks keep what they had, or none"
        self._start.restore()
        self._start = None
        self._skipped[0], self.num_updates = self._skipped_before, self._updates_before
        forget_casts()

    def reduce(self, stage: Stage, ready: Callable[[], None]) -> None:
        """Sum over the stage's replicas; in asynchronous modes the mean of the round. ``ready`` is called when
        all have come."""
        ranks = self._layout.fellows(stage.index, self._transport.rank)
        weights = trained(stage)
        mine = torch.tensor([p.grad is not None for p in weights], dtype=torch.uint8)
        anyone = torch.stack(self._transport.all_gather(mine, ranks, [len(weights)] * len(ranks))).any(0).tolist()
        ready()
        # A parameter that no replica has used gets no gradient, as in one process: an optimizer leaves it alone.
        for together in exchanges([p for p, has in zip(weights, anyone, strict=True) if has]):
            parts = [dense(p, AMONG_REPLICAS).flatten() for p in together]
            total = torch.cat(parts)
            self._sum(total, ranks)
            if not self._synchronous:
                total.div_(len(ranks))
            begin = 0
            for parameter in together:
                parameter.grad = total[begin : begin + parameter.numel()].view_as(parameter)
                begin += parameter.numel()

    def _sum(self, gradient: Tensor, ranks: Sequence[int]) -> None:
        if not self._options.exact_reduction:
            self._transport.all_reduce(gradient, ranks)
            return
        first, *rest = self._transport.all_gather(gradient, ranks, [gradient.numel()] * len(ranks))
        total = first
        for other in rest:
            total = total + other
        gradient.copy_(total.view_as(gradient))

    def step(self, stage: Stage) -> None:
        """The stage's next weight version."""
        self.before_update()
        finite, factors = self._verdict or self._judged(stage)
        optimizer = self.optimizers[stage.index]
        stage.weights.before_update()

        def update() -> None:
            if factors is not None:
                clip(stage.weights.parameters.values(), factors)
            self._set_learning_rate(stage.index)
            optimizing.step(optimizer)

        self._step_if(finite, optimizer, update)
        optimizing.clear(optimizer)
        self.num_updates[stage.index] += 1
        stage.weights.after_update()
        forget_casts()

    def _judged(self, stage: Stage) -> tuple[bool | Tensor, Factors | None]:
        """Whether a stage updates that asks no other, and by what factors it clips."""
        assert not self._synchronous, "a synchronous program has an AGREE"
        if self.loss_scale != 1.0:
            divide(gradients_of(stage), self.loss_scale)
        if not self._judges:
            return True, None
        finite, factors = self._verdict_of(*judge_here(list(stage.weights.parameters.values())))
        self._skipped[0] = self._skipped[0] + (1.0 - finite if isinstance(finite, bool) else 1.0 - finite.double())
        return finite, factors

    def _step_if(self, finite: bool | Tensor, optimizer: Optimizer, update: Callable[[], None]) -> None:
        """``update`` if the gradients are finite; see ``rollback`` for what a device is asked."""
        if isinstance(finite, Tensor) and can_be_told(optimizer):
            step_told(finite, optimizer, update)
        elif isinstance(finite, Tensor) and self._start is not None:
            update()
        elif isinstance(finite, Tensor) and self._synchronous and can_be_restored(optimizer):
            self._undo.append(Rollback([optimizer], ()))
            update()
        elif bool(finite):
            update()

    def _set_learning_rate(self, stage: int) -> None:
        """That of the stage's next update."""
        if self.learning_rate is not None:
            place = self.num_updates[stage] - self._updates_before[stage]
            optimizing.set_rate(self.optimizers[stage], self.learning_rate(self._numbers[stage][place]))

    @property
    def _judges(self) -> bool:
        return self._skips or self._options.clip_norm is not None

    @property
    def _skips(self) -> bool:
        """Whether a gradient that is not finite skips the update."""
        return self._options.skip_nonfinite or self.scaler.dynamic

    def agree(self, waited: Waited) -> None:
        """One exchange between all ranks: whether to update, and by what factor to clip."""
        self.before_update()
        self._verdict = self._agree(waited)

    def _agree(self, waited: Waited) -> tuple[bool | Tensor, Factors | None]:
        if self._ties is not None:
            self._ties.add_up(self._stages, waited)
        if self.loss_scale != 1.0:
            for stage in self._stages.values():
                divide(gradients_of(stage), self.loss_scale)
        if not self._judges:
            return True, None
        trained = [counted(self._stages[stage], self._tied) for stage in sorted(self._stages)]
        mine = [*map(self._norms, trained)]
        everything, self._told, sorts = self._exchange.gather(mine, self.local_losses(), self._num_losses, waited)
        if not is_host(self._device):
            return self._verdict_of(*judge_there(everything, sorts))
        finite, factors = self._verdict_of(*judge(everything, sorts))
        self._learn(bool(finite))
        return finite, factors

    def _norms(self, parameters: list[Tensor]) -> Tensor:
        """Of one stage, where this rank computes; on a device of the parameters alone that have gradients."""
        if not is_host(self._device):
            return norms_there(parameters, self._device)
        return told_apart(norms(parameters), parameters)

    def _learn(self, finite: bool) -> None:
        """What the host does once it knows whether all ranks could update."""
        self._skipped[0] = self._skipped[0] + (not finite)
        self.scaler.update(finite)
        for undo in self._undo if not finite else ():
            undo.restore()
        self._undo.clear()

    def _verdict_of(self, finite: bool | Tensor, totals: GroupNorms) -> tuple[bool | Tensor, Factors | None]:
        """Whether to update, and the factors of ``torch.nn.utils.clip_grad_norm_``; on a device they stay there."""
        total = totals.pop(ALL)
        self._norm[0] = number(total)
        most = {group: group[1] for group in totals} | {REST: self._options.clip_norm}
        totals = totals or {REST: total}
        factors = {
            group: torch.clamp(limit / (totals[group] + 1e-6), max=1.0)
            for group, limit in most.items()
            if limit is not None and group in totals
        }
        return finite if self._skips else True, factors or None

    def local_losses(self) -> Tensor:
        """What this rank's layers contribute to each unit's loss, where it computes."""
        return self._blocks.written(self._losses, self._transport.rank, self._num_units, self._device)

    def _num_losses(self, rank: int) -> int:
        return self._blocks.size(rank, self._num_units)

    def gather_losses(self) -> dict[LossKey, float]:
        """Every layer's contribution to every unit's loss; exchanged here unless the agreement has done so. On a device
        this is the only wait of a step."""
        if self.shared_losses is None:
            blocks = self._read_told() if self._told is not None else self._read_and_tell()
            self.shared_losses = {}
            for rank, block in enumerate(blocks):
                self.shared_losses.update(self._blocks.read(rank, self._num_units, block))
        return self.shared_losses

    def _read_told(self) -> list[Tensor]:
        """What the agreement has exchanged; on a device its verdict too."""
        assert self._told is not None
        finite = self._verdict[0] if self._verdict is not None else True
        if isinstance(finite, bool):
            return read(self._norm, *self._told)
        *blocks, answer = read(self._norm, *self._told, finite.reshape(1))
        self._learn(bool(answer))
        return blocks

    def _read_and_tell(self) -> list[Tensor]:
        """Without an agreement ranks read their own, with whatever else there is to read, and tell each other."""
        numbers: dict[object, Number] = {"skipped": self._skipped[0]}
        numbers |= {"norm": self._norm[0]} if self._norm else {}
        (mine,) = read(numbers, self.local_losses())
        self._skipped[0] = numbers["skipped"]
        self._norm |= {0: numbers["norm"]} if self._norm else {}
        wrong = self._start is not None and self._skipped[0] != self._skipped_before
        block = torch.cat([mine, torch.tensor([wrong, numbers["skipped"]], dtype=mine.dtype)])
        sizes = [self._num_losses(rank) + 2 for rank in self._everyone]
        blocks = self._transport.all_gather(block, self._everyone, sizes)
        self.must_repeat = any(bool(block[-2]) for block in blocks)
        self._start = self._start if self.must_repeat else None
        if not self._synchronous:
            leaders = {*map(self._layout.leader, range(self._layout.num_stages))}  # replicas leave out the same ones
            self._all_skipped = int(sum(blocks[rank][-1].item() for rank in leaders))
        return [block[:-2] for block in blocks]


def gradients_of(stage: Stage) -> list[Tensor]:
    """Those that are there."""
    return [p.grad for p in stage.weights.parameters.values() if p.grad is not None]
