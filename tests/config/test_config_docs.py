"""The migration pages: every old name is there, every new key exists, the example runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vpipe.compat.vpipe_keys import KEYS
from vpipe.config import DatasetConfig, ModelConfig, PipelineConfig
from vpipe.config.problems import field_at
from vpipe.interfaces import registered_dataset, registered_model
from vpipe.models.model import run
from vpipe.registry import DATASET_REGISTRY, MODEL_REGISTRY

DOCS = Path(__file__).parents[2] / "docs"
OLD_NAMES = re.findall(
    r"\w+",
    """
StageRuntime receive_tensors_forward run_forward send_tensors_forward receive_tensors_backward run_backward
send_tensors_backward run_training_iteration CommunicationHandler send recv wait OptimizerWithWeightStashing
load_old_params load_new_params step num_versions latest_version current_version module_to_stage_map stage_to_rank_map
stage_to_depth_map mp_size send_ranks receive_ranks tensor_tags num_warmup_minibatches forward_stats backward_stats
""",
)


@pytest.mark.parametrize("name", [*OLD_NAMES, *KEYS])
def test_every_name_of_vpipe_is_explained(name: str) -> None:
    assert re.search(rf"`[^`]*\b{name}\b[^`]*`", (DOCS / "from-vpipe.md").read_text(encoding="utf-8")), name


@pytest.mark.parametrize("page", ["from-vpipe.md", "from-ourgpipe.md"])
def test_every_key_that_a_page_names_exists(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    keys = re.findall(r"`(?:--set )?((?:model|dataset|training|parallel|checkpoint|observe|launch)\.[a-z_.]+)", text)
    assert len(keys) > 10
    for key in keys:
        path = tuple(key.rstrip(".").split("."))
        assert field_at(PipelineConfig, path)[0] == path, key


@pytest.mark.parametrize(
    "name", ["naive", "async_threaded", "1f1b", "zerobubble", "hanayo", "ModelInterface", "StageInterface",
             "DatasetInterface", "get_stage_partition", "prepare_input", "create_sub_model", "MODEL_REGISTRY",
             "SCHEDULE_REGISTRY", "gradient_accumulation", "max_iterations", "profile_iteration"],
)  # fmt: skip
def test_every_name_of_ourgpipe_is_explained(name: str) -> None:
    assert name in (DOCS / "from-ourgpipe.md").read_text(encoding="utf-8")


def test_the_example_of_the_page_runs() -> None:
    page = (DOCS / "from-ourgpipe.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    try:
        exec(compile(code, "from-ourgpipe.md", "exec"), {"__name__": "example"})  # noqa: S102
        data = registered_dataset(DatasetConfig(name="letters"), sequence_length=8)
        model = registered_model(ModelConfig(name="next_letter", hidden_size=8, num_layers=2), data.vocab_size)
        batch = data.batch([0, 1, 2])
        loss = model.loss(run(model.layers, model.build(), batch.inputs), batch.targets)
        assert 2 < float(loss.detach()) < 5
    finally:
        MODEL_REGISTRY._entries.pop("next_letter", None)
        DATASET_REGISTRY._entries.pop("letters", None)
