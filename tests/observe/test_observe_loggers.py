"""TensorBoard reads back what was logged; a missing package is one sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vpipe.errors import UserError
from vpipe.observe.loggers import TensorBoard, scalars

LINE = {"kind": "train", "iteration": 3, "loss": 1.5, "learning_rate": 0.25, "seconds": 0.5, "tokens_per_second": 8.0,
        "gradient_norm": None, "time": 1.79e9}  # fmt: skip


def test_scalars_are_what_a_line_measures() -> None:
    assert scalars(LINE) == {
        "train/loss": 1.5,
        "train/learning rate": 0.25,
        "train/seconds per iteration": 0.5,
        "train/tokens per second": 8.0,
    }
    assert scalars({"kind": "evaluation", "loss": 2.0, "seconds": 1.0}) == {"evaluation/loss": 2.0}


def test_tensorboard_reads_back(tmp_path: Path) -> None:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs vpipe[tensorboard]"
    )
    logger = TensorBoard(tmp_path)
    logger.log(LINE)
    logger.log({**LINE, "iteration": 4, "loss": 1.25})
    logger.close()
    found = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("train/loss")] == [(3, 1.5), (4, 1.25)]


def test_a_missing_package_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match="pip install"):
        TensorBoard(tmp_path)
