"""The peer: the same layers under torch.distributed.pipelining, with the schedule that corresponds to ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

ONE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
TWO_STAGES = {"interleaved": ScheduleInterleaved1F1B, "zb-v": ScheduleZBVZeroBubble}


def held_stages(schedule: str, rank: int, num_ranks: int) -> list[int]:
    if schedule in ONE_STAGE:
        return [rank]
    return [rank, 2 * num_ranks - 1 - rank] if schedule == "zb-v" else [rank, rank + num_ranks]


class TorchPipeline:
    """``train_step(inputs, targets)`` as ours has it: accumulate, step, zero."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        loss: Callable[[Any, Any], Tensor],
        schedule: str,
        num_microbatches: int,
        partition: Sequence[int],
        optimizer: Callable[[Any], torch.optim.Optimizer],
    ) -> None:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        held = held_stages(schedule, rank, num_ranks)
        bounds = [sum(partition[:s]) for s in range(len(partition) + 1)]
        modules = [nn.Sequential(*layers[bounds[s] : bounds[s + 1]]) for s in held]
        device = torch.device("cpu")
        stages = [PipelineStage(m, s, len(partition), device) for m, s in zip(modules, held, strict=True)]
        if schedule in ONE_STAGE:
            self.schedule: Any = ONE_STAGE[schedule](stages[0], num_microbatches, loss_fn=loss)
        else:
            self.schedule = TWO_STAGES[schedule](stages, num_microbatches, loss_fn=loss)
        self.optimizer = optimizer([p for m in modules for p in m.parameters()])
        self.first, self.last = 0 in held, len(partition) - 1 in held

    def train_step(self, inputs: Tensor, targets: Tensor) -> None:
        losses: list[Tensor] = []
        arguments = (inputs,) if self.first else ()
        if self.last:
            self.schedule.step(*arguments, target=targets, losses=losses)
        else:
            self.schedule.step(*arguments)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
