"""TensorBoard and Weights & Biases read back what was logged; a missing package is one sentence."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vpipe.errors import UserError
from vpipe.observe.loggers import LOGGERS, TensorBoard, WeightsAndBiases, scalars

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
    logger = TensorBoard(tmp_path, {})
    logger.log(LINE)
    logger.log({**LINE, "iteration": 4, "loss": 1.25})
    logger.close()
    found = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("train/loss")] == [(3, 1.5), (4, 1.25)]


def wandb_records(data: bytes) -> Iterator[bytes]:
    """A log of LevelDB's form: after 7 bytes, each record has 4 bytes of checksum, 2 of length and 1 of kind."""
    at = 7
    while at < len(data):
        length, kind = struct.unpack_from("<HB", data, at + 4)
        assert kind == 1, "a record that lies in one block"
        yield data[at + 7 : at + 7 + length]
        at += 7 + length


def test_weights_and_biases_reads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs vpipe[wandb]")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.chdir(tmp_path)
    logger = WeightsAndBiases(tmp_path, {"seed": 7})
    logger.log(LINE)
    logger.log({**LINE, "iteration": 4, "loss": 1.25})
    logger.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found, config = [], {}
    for data in wandb_records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        config |= {item.key: item.value_json for item in record.run.config.update}
        values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        if "train/loss" in values:
            found.append((int(values["_step"]), float(values["train/loss"])))
    assert found == [(3, 1.5), (4, 1.25)]
    assert config["seed"] == "7"


@pytest.mark.parametrize("name", LOGGERS)
def test_a_missing_package_is_one_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [module for module in sys.modules if module.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match="pip install"):
        LOGGERS[name](tmp_path, {})
