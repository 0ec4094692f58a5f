"""``runs/latest``: the run that began last, whatever began it, and never somebody's own directory."""

from __future__ import annotations

from pathlib import Path

from vpipe.config import PipelineConfig
from vpipe.rundir import claim

CONFIG = {"model": {"name": "gpt"}, "dataset": {"name": "synthetic"}}


def taken(runs: Path, output_dir: Path | None = None) -> Path:
    config = PipelineConfig.from_dict(CONFIG | {"observe": {"directory": str(runs)}})
    made = claim.take(config, config.to_yaml(), output_dir)
    made.release()
    return made.directory


def test_latest_is_the_run_that_began_last(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    first = taken(runs)
    assert (runs / "latest").resolve() == first
    second = taken(runs, runs / "mine")
    assert (runs / "latest").resolve() == second != first
    assert {path.name for path in runs.iterdir()} == {first.name, "mine", "latest"}, "nothing else is left there"


def test_the_runs_can_be_moved_with_their_link(tmp_path: Path) -> None:
    run = taken(tmp_path / "runs")
    moved = (tmp_path / "runs").rename(tmp_path / "elsewhere")
    assert (moved / "latest").resolve() == moved / run.name


def test_a_run_elsewhere_leaves_no_link_there(tmp_path: Path) -> None:
    taken(tmp_path / "runs", tmp_path / "mine")
    assert not (tmp_path / "latest").is_symlink()
    assert not (tmp_path / "runs" / "latest").is_symlink()


def test_a_directory_called_latest_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "runs" / "latest").mkdir(parents=True)
    run = taken(tmp_path / "runs")
    assert not (tmp_path / "runs" / "latest").is_symlink()
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {run.name, "latest"}
