"""The swap lane of a run: beside the row in records, traces and calibrated costs, and nobody's idle time."""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from vpipe import Pipeline
from vpipe.observe import trace
from vpipe.observe.bubbles import attribute
from vpipe.observe.calibrate import calibrate
from vpipe.observe.measured import Measured, join
from vpipe.rundir.facts import RunFacts
from vpipe.rundir.reader import RunDirectory
from vpipe.rundir.recorder import Recorder
from vpipe.schedule.action import Kind
from vpipe.schedule.program import to_csv
from vpipe.schedule.simulate import simulate
from vpipe.schedule.verify import verify


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """A step of two ranks that swap, written down and read again."""
    directory = tmp_path_factory.mktemp("run")
    torch.set_num_threads(1)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)]
    pipe = Pipeline(
        layers, nn.functional.mse_loss, schedule="gpipe", num_microbatches=6, num_ranks=2,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), swap=1.0,
    )  # fmt: skip
    batch = torch.randn(6 * 256, 256)
    pipe.train_step(batch, batch)
    for engine in pipe.engines:
        with closing(Recorder(directory, engine.rank)) as recorder:
            recorder.record(1, 1, pipe.trace().records[engine.rank])
    planned = pipe.trace().planned
    run = RunDirectory(directory, RunFacts(program=to_csv(planned)))
    return join(planned, run.common_steps()[0])


def test_swaps_lie_beside_the_row(step: Measured) -> None:
    assert not list(verify(step.program))
    for row, lane in zip(step.ranks, step.swaps, strict=True):
        handed = [event for event in row if event.action.kind in (Kind.OUT, Kind.IN)]
        assert [event.action for event in handed] == [event.action for event in lane]
        assert all(event.begin == event.end for event in handed)
        assert all(event.bytes > 0 and event.end > event.ready for event in lane)
        assert all(before.end <= after.ready for before, after in pairwise(lane))
        assert all(before.end <= after.begin for before, after in pairwise(row))


def test_idle_time_is_still_explained_to_the_nanosecond(step: Measured) -> None:
    found = attribute(step)
    assert [sum(part.values()) for part in found.parts] == list(found.idle)


def test_the_lane_is_calibrated_and_simulated(step: Measured) -> None:
    costs = calibrate([step])
    assert all(stage.swap > 0 for stage in costs.stages)
    assert simulate(step.program, costs).makespan > 0


def test_the_exported_trace_has_the_lane_and_reads_back(step: Measured, tmp_path: Path) -> None:
    threads = {
        each["tid"] - each["pid"]
        for each in trace.events([step])
        if each["ph"] == "X" and each["name"].endswith(("OUT0", "IN0"))
    }
    assert threads == {trace.SWAPS}
    trace.write(tmp_path / "trace.json.gz", [step])
    assert trace.programs(tmp_path / "trace.json.gz")[1] == [list(row) for row in step.program.rows]
