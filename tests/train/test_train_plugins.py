"""A model, a data set and a schedule of one's own train through ``vpipe train``; the documented examples are these."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from train_runs import run, tiny

from vpipe.cli import train as cli
from vpipe.interfaces import DatasetInterface, ModelInterface, StageInterface
from vpipe.registry import DATASET_REGISTRY, MODEL_REGISTRY, SCHEDULE_REGISTRY, STAGE_REGISTRY

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """What a test registers is gone after it."""
    every = (MODEL_REGISTRY, DATASET_REGISTRY, SCHEDULE_REGISTRY, STAGE_REGISTRY)
    before = [dict(registry._entries) for registry in every]
    yield
    for registry, entries in zip(every, before, strict=True):
        registry._entries = entries


def code_blocks(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


class Numbers(DatasetInterface):
    """Sixteen numbers a row; the label is their double."""

    def load_dataset(self) -> Sequence[Any]:
        generator = torch.Generator().manual_seed(0)
        return list(torch.randn(40, 16, generator=generator))

    def process_batch(self, batch: Any) -> Mapping[str, Any]:
        rows = torch.stack(batch)
        return {"inputs": rows, "labels": rows.abs() * 2}

    def get_vocab_size(self) -> int:
        return 1


class Squares(StageInterface):
    def compute_loss(self, output: Any, labels: Any) -> torch.Tensor:
        loss: torch.Tensor = nn.functional.mse_loss(output, labels)
        return loss


def train(config: dict[str, Any], directory: Path) -> list[float]:
    """Through the command line, in this process."""
    file = directory / "job.yaml"
    file.write_text(yaml.safe_dump(config))
    assert cli.command.main([str(file), "--output-dir", str(directory / "run")], standalone_mode=False) == 0
    lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_the_documented_schedule_trains(tmp_path: Path) -> None:
    (schedule,) = (block for block in code_blocks("CONTRIBUTING.md") if "SCHEDULE_REGISTRY" in block)
    exec(compile(schedule, "CONTRIBUTING.md", "exec"), {})  # noqa: S102 - our own page
    found = train(tiny({"parallel.scheduler": "one-at-a-time"}), tmp_path)
    expected = run(tiny({"parallel.scheduler": "1f1b"}), tmp_path / "1f1b")
    assert found == expected.losses, "another order, the same numbers"


def test_the_documented_model_trains(tmp_path: Path) -> None:
    (model,) = (block for block in code_blocks("CONTRIBUTING.md") if "MODEL_REGISTRY" in block)
    exec(compile(model, "CONTRIBUTING.md", "exec"), {})  # noqa: S102 - our own page
    DATASET_REGISTRY.register("numbers")(Numbers)
    STAGE_REGISTRY.register("mlp")(Squares)
    config = tiny(
        model={"name": "mlp", "num_layers": 3, "hidden_size": 16},
        dataset={"name": "numbers", "extra": {}},
        training={"epochs": 8},
    )
    losses = train(config, tmp_path)
    assert losses[-1] < losses[0]


def test_the_documented_data_set_trains(tmp_path: Path) -> None:
    (data,) = (block for block in code_blocks("CONTRIBUTING.md") if "DATASET_REGISTRY" in block)
    exec(compile(data, "CONTRIBUTING.md", "exec"), {})  # noqa: S102 - our own page
    losses = train(tiny(dataset={"name": "counting", "extra": {}}, training={"epochs": 12}), tmp_path)
    assert losses[-1] < 0.7 * losses[0], "counting can be learnt"


def test_a_model_says_where_it_is_cut(tmp_path: Path) -> None:
    @MODEL_REGISTRY.register("uneven")
    class Uneven(ModelInterface):
        def get_model_config(self) -> dict[str, dict[str, Any]]:
            return {f"layer_{index}": {} for index in range(4)}

        def create_layer(self, layer_type: str, params: dict[str, Any]) -> nn.Module:
            return nn.Linear(16, 16)

        def get_stage_partition(self, num_stages: int) -> list[list[int]]:
            return [[0, 1, 2], [3]]

    DATASET_REGISTRY.register("numbers")(Numbers)
    STAGE_REGISTRY.register("uneven")(Squares)
    found = run(tiny(model={"name": "uneven"}, dataset={"name": "numbers", "extra": {}}), tmp_path)
    assert found.trainer.session.pipeline.partition == [3, 1]


def test_documents_are_python() -> None:
    for document in ("CONTRIBUTING.md", "docs/training.md"):
        for block in code_blocks(document):
            compile(block, document, "exec")
    assert sys.version_info >= (3, 11)
