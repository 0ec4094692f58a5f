"""run.json is one value: what the trainer writes is what a reader gets, an earlier version's too, and nothing else."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from vpipe.rundir.facts import RunFacts, RunModel, RunStage
from vpipe.rundir.journal import Journal

FACTS = RunFacts(
    run="4f2a", vpipe="0.1", torch="2.13", started="2026-11-18T00:00:00+00:00", schedule="1f1b", synchronous=True,
    num_ranks=2, num_stages=2, num_microbatches=1, microbatches_per_iteration=1, partition=(1, 2),
    program="0F0\n1F0\n", versions="newest", placement=((0,), (1,)), skips=((0, 1),),
    model=RunModel("gpt", 12, 72.0), stages=(RunStage(0, ("a",), 4, 16), RunStage(1, ("b", "c"), 8, 32)),
    hosts=("n1", "n2"), cores=2, threads=1, layout={"layers": 3}, command=("vpipe", "train"), trace=True, iterations=4,
    iterations_per_epoch=2, directory="runs/x",
)  # fmt: skip
KEYS = [
    "run", "vpipe", "torch", "started", "schedule", "synchronous", "num_ranks", "num_stages", "num_microbatches",
    "microbatches_per_iteration", "partition", "program", "versions", "placement", "skips", "model", "stages", "hosts",
    "cores", "threads", "layout", "command", "trace", "iterations", "iterations_per_epoch", "directory",
]  # fmt: skip
"""Of run.json, which others read as well: a contract."""


def written(facts: RunFacts, tmp_path: Path) -> dict[str, Any]:
    complaints: list[str] = []
    Journal(tmp_path, "4f2a", complaints.append).facts(facts)
    assert not complaints
    found: dict[str, Any] = json.loads((tmp_path / "run.json").read_text())
    return found


def test_what_is_written_is_read(tmp_path: Path) -> None:
    found = written(FACTS, tmp_path)
    assert list(found) == KEYS
    assert all(getattr(FACTS, each.name) not in (None, ()) for each in fields(FACTS)), "each fact is told above"
    assert RunFacts.parse(found) == FACTS
    assert found["model"].items() >= {"name": "gpt", "parameters": 12, "flops_per_token": 72.0}.items()
    assert found["stages"][1] == {"stage": 1, "layers": ["b", "c"], "parameters": 8, "weight_bytes": 32}


@pytest.mark.parametrize("missing", KEYS)
def test_an_earlier_version_lacks_a_fact_and_a_later_one_has_more(missing: str, tmp_path: Path) -> None:
    found = written(FACTS, tmp_path)
    del found[missing]
    read = RunFacts.parse(found | {"colour": "red"})
    assert getattr(read, missing) == getattr(RunFacts(), missing)
    assert all(getattr(read, each) == getattr(FACTS, each) for each in KEYS if each != missing)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"program": 3}, "program is 3: Input should be a valid string"),
        ({"num_ranks": True}, "num_ranks is True: Input should be a valid integer"),
        ({"partition": [1, "2"]}, "partition.1 is '2': Input should be a valid integer"),
        ({"placement": "x"}, "placement is 'x': Input should be a valid array"),
        ({"model": "gpt"}, "model is 'gpt': Input should be an object"),
        ({"stages": [{"layers": [7]}]}, "stages.0.layers.0 is 7: Input should be a valid string"),
    ],
)
def test_a_fact_of_another_kind_is_named(wrong: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        RunFacts.parse(written(FACTS, tmp_path) | wrong)
    assert str(refused.value) == says


def test_a_move_changes_what_follows_from_the_layout() -> None:
    now = RunFacts(started="later", num_microbatches=9, partition=(2, 1), program="0F0\n", placement=((1,), (0,)))
    moved = FACTS.moved(now)
    assert (moved.partition, moved.program, moved.placement) == (now.partition, now.program, now.placement)
    assert (moved.started, moved.num_microbatches, moved.run) == (FACTS.started, FACTS.num_microbatches, FACTS.run)
