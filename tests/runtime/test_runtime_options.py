"""What a pipeline is told, as plain keywords; and what it says of itself."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

from vpipe import Pipeline, UserError
from vpipe.runtime import assembly
from vpipe.runtime.options import PipelineOptions, PlainKeywords
from vpipe.schedule.catalog import ScheduleSpec
from vpipe.schedule.placement import Seat, loop


def make(**told: Any) -> Pipeline:
    torch.manual_seed(0)
    return Pipeline([nn.Linear(4, 4) for _ in range(5)], nn.functional.mse_loss, **told)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_a_schedule_that_is_chosen_already_keeps_its_program() -> None:
    spec = ScheduleSpec("gpipe", 2, 2)
    pipe = make(schedule=spec, num_ranks=2)
    assert pipe.programs.spec is spec
    assert pipe.programs.author is spec.program
    for other in ({"num_ranks": 1}, {"num_ranks": 2, "num_microbatches": 4}, {"num_ranks": 2, "replicas": 2}):
        with pytest.raises(UserError, match=r"chosen with all its numbers \(gpipe on 2 ranks\)"):
            make(schedule=spec, **other)


def test_every_field_is_a_keyword_and_no_other() -> None:
    assert PlainKeywords.__annotations__.keys() == {f.name for f in fields(PipelineOptions)} - {"schedule", "seed"}
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'num_microbatch'.*num_microbatches"):
        make(num_microbatch=3)


def test_a_pipeline_says_who_it_is() -> None:
    pipe = make(num_ranks=2, optimizer=sgd)
    assert pipe.layout.with_counts([1, 4]).placement == loop(2) == pipe.placement
    assert (pipe.rank, pipe.ranks, pipe.is_leader, pipe.in_process) == (0, [0, 1], True, True)
    assert pipe.gather("a") == ["a"]
    assert pipe.gather_first("") == ""
    batch = torch.randn(4, 4)
    pipe.train_step(batch, batch)
    assert pipe.stats.num_updates == 1
    assert pipe.stats.gradient_norm is not None
    assert pipe.weights_of(1) == {"weights": 20 * 4 * pipe.partition[1], "versions": 1, "optimizer": 0}
    assert [held.layer for held in pipe.held_layers()] == [0, 1, 2, 3, 4]


def test_seats_are_those_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    told = ['["one", "cuda:0"]', '["one", "cuda:1"]', '["two", "cuda:0"]']
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(assembly, "under_launcher", lambda: True)
    monkeypatch.setattr(assembly, "join", lambda timeout, wanted: 3)
    monkeypatch.setattr(assembly, "between_processes", lambda *_, **__: None)
    monkeypatch.setattr(assembly, "gather_text", lambda transport, text: told)
    wires = assembly.connect(PipelineOptions(num_ranks=3), threads=False, blocking=False)
    assert wires.seats == (Seat("one", "cuda:0"), Seat("one", "cuda:1"), Seat("two", "cuda:0"))
    assert not wires.in_process


def test_nobody_outside_the_runtime_reaches_through_to_the_engines() -> None:
    from pathlib import Path

    import vpipe

    house = Path(vpipe.__file__).parent
    reaching = [
        path.relative_to(house)
        for path in house.rglob("*.py")
        if path.relative_to(house).parts[0] != "runtime" and ".engines" in path.read_text(encoding="utf-8")
    ]
    assert not reaching
