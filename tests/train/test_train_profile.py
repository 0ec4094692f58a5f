"""``profile_iteration``: a trace that TensorBoard and Perfetto open, whose events are the actions of the schedule."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from train_runs import run, tiny

from vpipe.schedule.action import parse


@pytest.mark.parametrize("scheduler", ["1f1b", "zb-h1", "pipedream"])
def test_events_are_named_like_actions(scheduler: str, tmp_path: Path) -> None:
    changes = {"parallel.scheduler": scheduler, "training.profile_iteration": 2, "training.max_iterations": 3}
    found = run(tiny(changes), tmp_path)
    (file,) = (tmp_path / f"profiler_{scheduler}" / "rank0").iterdir()
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt") as stream:
        names = {event.get("name") for event in json.load(stream)["traceEvents"]}
    program = found.trainer.session.pipeline.programs.training()
    actions = {str(action) for _, action in program.actions()}
    assert actions <= names, "the actions of both ranks, which are threads of this process"
    assert all(str(parse(name)) == name for name in actions)
    assert found.summary["effective_iterations"] == 0
    assert found.summary["total_iterations"] == 3


def test_leaving_after_the_profile(tmp_path: Path) -> None:
    found = run(tiny({"training.profile_iteration": 1, "training.exit_after_profile": True}), tmp_path)
    assert found.trainer.iteration == 2
    assert found.summary["stopped"] is False
    assert found.trainer.ended.kind == "finished"
