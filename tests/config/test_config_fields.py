"""The fields themselves: documented, defaulted, frozen, written out and read back."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from vpipe.config import PipelineConfig, commented, load, schema
from vpipe.config.document import parse, plain
from vpipe.config.problems import expects, section_of
from vpipe.interfaces import SIZES
from vpipe.models.model import model_options

ROOT = Path(__file__).parents[2]
MINIMAL: dict[str, Any] = {"model": {"name": "gpt"}, "dataset": {"name": "text"}}


def fields(model: type[BaseModel], path: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, field in model.model_fields.items():
        found.append((f"{path}{name}", field))
        inner = section_of(field)
        if inner is not None:
            found += fields(inner, f"{path}{name}.")
    return found


def test_every_field_is_documented_and_defaulted() -> None:
    for name, field in fields(PipelineConfig):
        assert field.description, f"{name} has no documentation"
        assert len(" ".join(field.description.split())) > 8
        assert expects(field)
        required = {"model", "dataset", "model.name", "dataset.name"}
        assert field.is_required() == (name in required), name


def test_ourgpipes_defaults_are_kept() -> None:
    config = PipelineConfig.from_dict(MINIMAL)
    model, data, training, parallel = config.model, config.dataset, config.training, config.parallel
    assert SIZES == {"hidden_size": 512, "num_layers": 16, "num_heads": 16}
    assert (model.sequence_length, model.vocab_size, model.extra) == (128, -1, {})
    assert (data.batch_size, data.num_workers, data.extra) == (64, 0, {})
    assert (training.learning_rate, training.epochs, training.num_microbatches) == (1e-4, 2, 4)
    assert (training.gradient_accumulation, training.max_iterations) == (1, -1)
    assert (training.profile_iteration, training.exit_after_profile) == (-1, False)
    assert (parallel.model_parallel_size, parallel.data_parallel_size) == (4, 1)
    assert (parallel.scheduler, parallel.use_orion_scheduler) == ("async_threaded", False)


def test_a_config_is_frozen() -> None:
    config = PipelineConfig.from_dict(MINIMAL)
    with pytest.raises(ValidationError):
        config.training.epochs = 3  # type: ignore[misc]
    config.validate()


def test_round_trips() -> None:
    values = {
        "model": {
            "name": "gpt",
            "extra": {"a": "1e-4", "b": "no", "c": "010", "d": ["", " x", "é\n", "1:30"], "e": None},
        },
        "dataset": {"name": "text", "path": "1e-4"},
        "training": {
            "learning_rate": 1e-20,
            "loss_scale": 1024.0,
            "precision": "fp16",
            "optimizer_options": {"betas": [0.5, 0.25]},
        },
        "parallel": {"partition": [1, 2, 3, 4], "recompute": [0.5, 0, 0, 1.0], "replicas": [2, 1, 1, 1]},
        "launch": {
            "slurm": {"options": {"time": "01:30:00", "gres": "gpu:4"}},
            "container": {"kind": "docker", "image": "a/b:1"},
        },
    }
    config = PipelineConfig.from_dict(values)
    assert PipelineConfig.from_dict(config.to_dict()) == config
    assert PipelineConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    for comments in (False, True):
        document = parse(config.to_yaml(comments=comments))
        assert not document.problems
        assert PipelineConfig.from_dict(document.value) == config


def test_to_yaml_writes_a_file_that_loads(tmp_path: Path) -> None:
    config = PipelineConfig.from_dict(MINIMAL)
    config.to_yaml(tmp_path / "job.yaml")
    assert PipelineConfig.from_yaml(tmp_path / "job.yaml") == config


def test_the_commented_default_explains_every_key_and_loads(tmp_path: Path) -> None:
    text = commented()
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    assert load(tmp_path / "job.yaml").config == PipelineConfig.from_dict(
        {"model": {"name": "gpt"}, "dataset": {"name": "code_search_net"}}
    )
    lines = text.splitlines()
    for name, _ in fields(PipelineConfig):
        key = name.rsplit(".", 1)[-1]
        at = next(i for i, line in enumerate(lines) if line.strip().startswith(f"{key}:"))
        assert lines[at - 1].strip().startswith("#"), name
    assert max(map(len, lines)) <= 120


def test_the_json_schema_knows_every_key_and_is_closed() -> None:
    made = schema()
    assert json.dumps(made)
    assert made["additionalProperties"] is False
    parts = made["$defs"]
    assert set(parts["TrainingConfig"]["properties"]) == set(
        PipelineConfig.model_fields["training"].annotation.model_fields
    )
    assert all(
        "\n" not in each.get("description", "") for part in parts.values() for each in part["properties"].values()
    )


def test_the_reference_page_is_up_to_date() -> None:
    remedy = "run: python docs/config_page.py > docs/config.md"
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == runpy.run_path(
        str(ROOT / "docs/config_page.py")
    )["reference"](), remedy


def test_importing_the_config_needs_no_torch() -> None:
    code = (
        "import sys, vpipe.config, vpipe.registry, vpipe.interfaces\n"
        "bad = {'torch', 'numpy', 'transformers'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("1E5", 1e5), ("1.", 1.0), (".5", 0.5), ("-3", -3), ("+3", 3), ("0", 0), ("1_000", 1000),
        ("0x10", 16), ("0o10", 8), ("0b11", 3), ("1:30", "1:30"), ("01:30:00", "01:30:00"), ("no", "no"), ("on", "on"),
        ("Yes", "Yes"), ("true", True), ("False", False), ("null", None), ("~", None), ("2024-01-01", "2024-01-01"),
        ("1e", "1e"), ("e5", "e5"), ("-", "-"), (".", "."), ("1.2.3", "1.2.3"), ("gpu:4", "gpu:4"), ("_1", "_1"),
        (".inf", float("inf")),
    ],
)  # fmt: skip
def test_what_a_plain_word_means(text: str, value: object) -> None:
    assert plain(text) == value
    assert type(plain(text)) is type(value)


@pytest.mark.parametrize("text", ["010", "-07", "00", "0_1"])
def test_octal_looking_numbers_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="octal"):
        plain(text)


def test_overrides_win_over_the_file_and_are_read_like_it(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("model: {name: gpt}\ndataset: {name: text}\ntraining: {epochs: 3}\n")
    overrides = [
        "training.learning_rate=1e-3", "training.epochs=1", "training.epochs=5", "model.extra.dropout=0.1",
        "parallel.partition=[1, 2, 3, 4]", "launch.slurm.options.time=01:30:00", "checkpoint.directory=null",
        "dataset.path=w=1",
    ]  # fmt: skip
    config = load(file, overrides, scheduler="1f1b").config
    assert (config.training.learning_rate, config.training.epochs) == (1e-3, 5)
    assert config.model.extra == {"dropout": 0.1}
    assert config.parallel.partition == (1, 2, 3, 4)
    assert config.parallel.scheduler == "1f1b"
    assert config.launch.slurm.options == {"time": "01:30:00"}
    assert config.dataset.path == str(Path.cwd() / "w=1"), "a path on the command line is seen from where it is typed"


def test_paths_of_a_file_are_seen_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"partition": [2, 2, 2, 1], "recompute_ratio": [1, 0.5, 0, 0]}')
    (tmp_path / "job.yaml").write_text(
        "model: {name: gpt}\ndataset: {name: text, path: ../data}\n"
        "parallel: {partition: plan.json}\n"
        "launch: {container: {kind: apptainer, image: a.sif}}\n"
    )
    config = load(tmp_path / "job.yaml").config
    assert config.dataset.path == str(tmp_path.parent / "data")
    assert config.launch.container.image == str(tmp_path / "a.sif")
    assert (config.parallel.partition, config.parallel.recompute) == ((2, 2, 2, 1), (1, 0.5, 0, 0))
    assert load(tmp_path / "job.yaml", ["parallel.recompute=0"]).config.parallel.recompute == 0


def test_a_plan_that_says_more_stays_a_path(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"partition": [2, 2], "layers": ["keep", "swap"]}')
    (tmp_path / "job.yaml").write_text("model: {name: gpt}\ndataset: {name: text}\nparallel: {partition: plan.json}\n")
    assert load(tmp_path / "job.yaml").config.parallel.partition == str(tmp_path / "plan.json")


def test_keys_without_effect_are_warned_about(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "model: {name: gpt}\ndataset: {name: text}\ntraining: {learning_rate_degree: 2, loss_scale: 8}\n"
    )
    assert load(tmp_path / "job.yaml").warnings == (
        "training.learning_rate_degree has no effect with learning_rate_policy constant",
        "training.loss_scale has no effect with precision fp32",
    )


def test_orion_can_be_asked_for_by_the_environment(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: {name: gpt}\ndataset: {name: text}\n")
    assert load(tmp_path / "job.yaml", environment={"USE_ORION_SCHEDULER": "1"}).config.parallel.use_orion_scheduler
    assert not load(tmp_path / "job.yaml", environment={}).config.parallel.use_orion_scheduler


def test_options_for_a_builder_leave_out_sizes_it_does_not_have() -> None:
    model = PipelineConfig.from_dict({**MINIMAL, "model": {"name": "x", "num_layers": 3, "extra": {"a": 1}}}).model
    assert model_options(model, ["hidden_size"]) == {"num_layers": 3, "a": 1}, "the width is the model's own"
