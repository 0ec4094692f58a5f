"""The shipped configs fit the models, data sets and schedules they name: a job fails here, not on the cluster."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from vpipe.config import load
from vpipe.data import dataset as data
from vpipe.models import model as models
from vpipe.models.model import model_options
from vpipe.registry import MODEL_REGISTRY
from vpipe.schedule import catalog as schedules

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs").glob("*.y*ml"))
VPIPE = [f"bert_{stages}{kind}" for stages in (4, 8) for kind in ("vpipe", "gpipe", "pipedream")]
OURGPIPE = ["gpt_small", "gpt_8stage", "gpt_16stage", "llama_small"]
OURGPIPE += [f"gpt_{name}" for name in ("naive", "async_threaded", "1f1b", "zerobubble", "hanayo")]


def test_every_promised_config_is_there_with_its_small_twin() -> None:
    names = {file.name for file in FILES}
    for name in [*OURGPIPE, "translation", "cpm-medium", "cpm-large"]:
        assert {f"{name}.yaml", f"{name}_cpu.yaml"} <= names
    for name in VPIPE:
        assert {f"{name}.yml", f"{name}_cpu.yml"} <= names
    assert "default.yaml" in names


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_model_data_and_schedule_accept_what_the_config_says(file: Path) -> None:
    config = load(file, environment={}).config
    entry = schedules.get(config.parallel.scheduler)
    num_ranks = config.parallel.model_parallel_size
    num_stages = num_ranks * (config.parallel.stages_per_rank or entry.stages_per_rank)
    entry.build(num_ranks, config.training.num_microbatches)

    known = inspect.signature(MODEL_REGISTRY.get(config.model.name)).parameters
    model = models.build(config.model.name, model_options(config.model, known), vocab_size=2048)
    assert len(model.layers) >= num_stages
    if config.parallel.partition != "auto":
        assert len(config.parallel.partition) == num_stages
        assert sum(config.parallel.partition) == len(model.layers)

    assert set(config.dataset.extra) <= set(data.options(config.dataset.name))
    if config.dataset.name == "synthetic":
        assert config.dataset.extra["vocab_size"] == config.model.vocab_size
        assert model.num_parameters < 1_000_000


def test_the_three_plans_of_the_documents() -> None:
    plans = {
        kind: json.loads((ROOT / f"configs/bert/vgpus=4/{kind}.json").read_text())
        for kind in ("vpipe", "gpipe", "pipedream")
    }
    assert plans["vpipe"] == {"partition": [12, 13, 13, 11], "recompute_ratio": [0.3, 0, 0, 0]}
    assert plans["gpipe"] == {"partition": [13, 13, 13, 10], "recompute_ratio": [1, 1, 1, 1]}
    assert plans["pipedream"] == {"partition": [13, 13, 13, 10], "recompute_ratio": [0, 0, 0, 0]}
