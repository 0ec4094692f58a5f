"""Where ranks meet, waiting is waiting: a deliberately late rank shows for whom the others wait, and not as their work.
No time is asserted, only what came before what, and that a long wait is longer than a little work."""

from __future__ import annotations

import json
from dataclasses import replace
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vpipe import Pipeline
from vpipe.layer import TiedWeight
from vpipe.observe.bubbles import attribute
from vpipe.observe.measured import Measured, from_simulation
from vpipe.observe.meetings import meetings
from vpipe.rundir.reader import Event
from vpipe.rundir.recorder import _Step, _summary
from vpipe.schedule.action import Kind
from vpipe.schedule.catalog import build
from vpipe.schedule.lower import agree, lower, swap
from vpipe.schedule.replicas import replicate
from vpipe.schedule.simulate import simulate
from vpipe.schedule.timeline import uniform

WIDTH, LATE = 8, 0.3


class Late(torch.autograd.Function):
    """The backward of rows that begin with a positive number takes long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.late = bool(x[0, 0] > 0)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        sleep(LATE if ctx.late else 0)
        return gradient


class Slow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Late.apply(x.requires_grad_()))


def pipeline(layers: list[nn.Module], **more: Any) -> Pipeline:
    return Pipeline(
        layers,
        nn.functional.mse_loss,
        num_microbatches=2,
        num_ranks=2,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        **more,
    )


def step_of(pipe: Pipeline, inputs: Tensor) -> tuple[Measured, list[dict[str, Any]]]:
    """A second step, when everybody knows everybody: as observe reads it, and the ranks' short lines."""
    for _ in range(2):
        pipe.train_step(inputs.clone(), torch.zeros(len(inputs), WIDTH))
    trace = pipe.trace()
    rows = [trace.records[rank] for rank in range(pipe.placement.num_ranks)]
    origin = min(row[0].begin for row in rows)
    ranks = tuple(
        tuple(Event(each.action, each.begin - origin, each.ready - origin, each.end - origin) for each in row)
        for row in rows
    )
    lines = [json.loads(_summary(_Step(1, 1, row, None, 0, 0.0, None, True))) for row in rows]
    return Measured(trace.planned, ranks), lines


def of_kind(step: Measured, kind: Kind) -> list[Event]:
    """Of each rank, the first action of a kind."""
    return [next(event for event in row if event.action.kind is kind) for row in step.ranks]


def check(step: Measured, lines: list[dict[str, Any]], early: Event, late: Event, rank: int) -> None:
    """The early rank waited until the late one came: in its record, in its short line, in the table of bubbles."""
    apart = late.begin - early.begin
    assert apart > 0
    assert early.ready - early.begin > early.end - early.ready, "it waited longer than it worked"
    assert late.ready - late.begin < apart, "the last one waits for messages alone"
    assert lines[rank]["waited"] >= early.ready - early.begin
    assert lines[rank]["busy"] <= lines[rank]["span"] - lines[rank]["waited"]
    assert step.busy[rank] <= step.span - (early.ready - early.begin)
    assert attribute(step).busy[rank] == step.busy[rank]


def test_at_a_reduce() -> None:
    pipe = pipeline([Slow(WIDTH, WIDTH)], replicas=2)
    inputs = torch.ones(4, WIDTH) * torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    step, lines = step_of(pipe, inputs)
    events = of_kind(step, Kind.REDUCE)
    early, late = sorted((0, 1), key=lambda rank: events[rank].begin)
    assert events[early].ready >= events[late].begin, "nobody is ready before the last has come"
    check(step, lines, events[early], events[late], early)
    met = meetings(step)
    place = (early, step.ranks[early].index(events[early]))
    assert (met[place].last, met[place].came) == (late, events[late].begin)


@pytest.mark.parametrize("tied", [False, True])
def test_at_an_agreement(tied: bool) -> None:
    """Stage 0 comes last, its backward is slow. Owners of a tied weight meet before all do."""
    ties = [TiedWeight(((0, "weight"), (1, "weight")))] if tied else []
    pipe = pipeline([Slow(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)], clip_norm=1.0, tied=ties)
    step, lines = step_of(pipe, torch.ones(4, WIDTH))
    late, early = of_kind(step, Kind.AGREE)
    check(step, lines, early, late, 1)


def test_without_an_exchange_nobody_meets() -> None:
    """Nothing is clipped and no update skipped: who comes to AGREE early leaves early."""
    pipe = pipeline([Slow(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)], skip_nonfinite=False)
    step, _ = step_of(pipe, torch.ones(4, WIDTH))
    late, early = of_kind(step, Kind.AGREE)
    assert early.end < late.begin
    assert not meetings(step)


@pytest.mark.parametrize("swapped", [(), (0,)])
def test_what_a_simulation_swaps(swapped: tuple[int, ...]) -> None:
    planned = agree(lower(replicate(swap(build("interleaved", 2, 4, 2), swapped), 2)))
    costs = uniform(planned.placement)
    costs = replace(costs, stages=tuple(replace(each, reduce=0.5, swap=0.25) for each in costs.stages))
    drawn = from_simulation(simulate(planned, costs))
    found = {event.action.kind for lane in drawn.swaps for event in lane}
    assert found == ({Kind.OUT, Kind.IN} if swapped else set())
    assert all(
        event.action.stage in planned.placement.stages_of[rank]
        for rank, lane in enumerate(drawn.swaps)
        for event in lane
    )
    places = {drawn.ranks[rank][index].action for rank, index in meetings(drawn)}
    assert places
