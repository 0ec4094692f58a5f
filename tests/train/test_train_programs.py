"""Files as schedules in a run: ``parallel.scheduler: my.csv``, ``--scheduler my.csv``, and parity of both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import yaml
from test_train_parity import parity
from train_runs import Run, tiny

from vpipe import config as configs
from vpipe.errors import UserError

BACKWARDS = "0F0,0F1,0F2,0F3,0B3,0B2,0B1,0B0\n1F0,1F1,1F2,1F3,1B3,1B2,1B1,1B0\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my order.csv").write_text(BACKWARDS)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tiny({"parallel.scheduler": "my order.csv"})))
    return tmp_path


def test_a_path_is_relative_to_the_config_or_to_where_it_was_typed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"parallel.scheduler": ["1f1b"]}
    assert configs.load(folder / "job.yaml", names=names).config.parallel.scheduler == str(folder / "my order.csv")
    monkeypatch.chdir(folder.parent)
    typed = f"{folder.name}/my order.csv"
    for words in ({"scheduler": typed}, {"overrides": [f"parallel.scheduler={typed}"]}):
        loaded = configs.load(folder / "job.yaml", names=names, **words)  # type: ignore[arg-type]
        assert loaded.config.parallel.scheduler == str(folder / "my order.csv")


def test_a_file_trains(folder: Path) -> None:
    values = configs.load(folder / "job.yaml").config.to_dict()
    run = Run(values, folder / "run")
    assert run.trainer.session.pipeline.programs.spec.entry.asynchronous is False
    run.train()
    by_name = Run(tiny({"parallel.scheduler": "gpipe"}), folder / "other")
    by_name.train()
    found, other = (each.trainer.session.pipeline.state_dict() for each in (run, by_name))
    assert all(found[name].allclose(other[name], atol=1e-4) for name in found), "updates were made"


def test_parity_follows_the_order_of_the_file(folder: Path) -> None:
    code, found = parity(tiny(), folder, "--scheduler", str(folder / "my order.csv"))
    assert (code, found["equal"]) == (0, True)


def test_numbers_that_do_not_fit_the_file(folder: Path) -> None:
    values = configs.load(folder / "job.yaml").config.to_dict()
    with pytest.raises(UserError, match=r"my order\.csv is for 4 microbatches, but there are 2"):
        Run(values | {"training": values["training"] | {"num_microbatches": 2}}, folder / "run")
    with pytest.raises(UserError, match=r"my order\.csv is for 2 ranks, but there are 4"):
        Run(values | {"parallel": values["parallel"] | {"model_parallel_size": 4}}, folder / "run")


def test_what_is_told_does_not_depend_on_which_rank_has_the_first_stage(
    tmp_path: Path, vpipe: Callable[..., CompletedProcess[str]]
) -> None:
    """Rank 0 tells, and holds the middle: it told an evaluation loss of 0, no tokens, and a part of the loss."""
    rows = [",".join([*(f"{stage}F{k}" for k in range(4)), *(f"{stage}B{k}" for k in range(4))]) for stage in (1, 0, 2)]
    (tmp_path / "swapped.csv").write_text("\n".join(rows))
    changes = {
        "training.evaluation_interval": 3,
        "training.gradient_accumulation": 2,
        "parallel.model_parallel_size": 3,
        "parallel.scheduler": "gpipe",
    }
    told = Run(tiny(changes), tmp_path / "threads").train()
    swapped = {"parallel.scheduler": str(tmp_path / "swapped.csv"), "parallel.transport": "auto"}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tiny(changes | swapped)))
    done = vpipe("train", str(tmp_path / "job.yaml"), "--output-dir", str(tmp_path / "ranks"))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "ranks" / "metrics.jsonl").read_text().splitlines()]
    keys = ("kind", "iteration", "loss", "tokens")
    assert [[line.get(key) for key in keys] for line in lines] == [
        [line.get(key) for key in keys] for line in told.metrics
    ]
    summary = json.loads((tmp_path / "ranks" / "summary.json").read_text())
    counts = ("total_tokens", "effective_tokens", "iterations_done", "final_loss")
    assert {key: summary[key] for key in counts} == {key: told.summary[key] for key in counts}
    assert summary["samples_per_second"] > 0
