"""``vpipe parity``: every family of models, synchronous and asynchronous, equal to one process; and a wrong run is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from train_runs import tiny

from vpipe.cli.parity import command
from vpipe.runtime.engine import Engine, Task

HF_LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8,
    "vocab_size": 32,
}
HF_GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8, "vocab_size": 32}
SMALL = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "sequence_length": 8}

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"model.extra": {"dropout": 0.1}},
    "gpt2 tied": {"model": {"name": "gpt2", **SMALL}},
    "llama": {"model": {"name": "llama", **SMALL, "extra": {"num_kv_heads": 1, "intermediate_size": 32}}},
    "bert": {"model": {"name": "bert", **SMALL}, "dataset.extra": {"kind": "bert", "vocab_size": 32}},
    "translation": {
        "model": {"name": "translation", **SMALL},
        "dataset.extra": {"kind": "translation", "vocab_size": 32},
    },
    "huggingface llama": {"model": {"name": "huggingface", "sequence_length": 8, "config": HF_LLAMA}},
    "huggingface gpt2 tied": {"model": {"name": "huggingface", "sequence_length": 8, "config": HF_GPT2}},
}
TIED = {"gpt2 tied", "huggingface gpt2 tied", "bert", "translation"}
"""Tied weights need a synchronous schedule; these models can be untied where their options say so."""


def parity(config: dict[str, Any], directory: Path, *words: str) -> tuple[int, dict[str, Any]]:
    file = directory / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    result = CliRunner().invoke(command, [str(file), "--json", *words], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value, json.loads(result.output.splitlines()[-1])


@pytest.mark.parametrize("scheduler", ["1f1b", "pipedream", "pipedream-2bw"])
def test_gpt(scheduler: str, tmp_path: Path) -> None:
    code, found = parity(tiny(MODELS["gpt"]), tmp_path, "--scheduler", scheduler)
    assert (code, found["equal"], found["difference"]) == (0, True, None)
    assert found["tensors"] > 50


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["zb-h1", "pipedream"])
@pytest.mark.parametrize("model", MODELS)
def test_every_model(model: str, scheduler: str, tmp_path: Path) -> None:
    changes = MODELS[model] | {"parallel.model_parallel_size": 3, "training.gradient_clipping": 1.0}
    if scheduler == "pipedream" and model in TIED:
        if model not in ("bert", "translation"):
            pytest.skip("tied weights need a synchronous schedule")
        changes = changes | {"model": {**changes["model"], "extra": {"tied": False}}}
    code, found = parity(tiny(changes), tmp_path, "--scheduler", scheduler, "--steps", "2")
    assert (code, found["difference"]) == (0, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"training.precision": "bf16", "model.extra.dropout": 0.1},
        {"parallel.data_parallel_size": 2},
        {"parallel.recompute": 1.0},
        {"training.optimizer": "lamb"},
        {"model": {"name": "gpt2", **SMALL}},
    ],
    ids=["bf16", "replicas", "recompute", "lamb", "tied"],
)
def test_settings(changes: dict[str, Any], tmp_path: Path) -> None:
    code, found = parity(tiny(changes), tmp_path, "--steps", "2")
    assert (code, found["difference"]) == (0, None)


@pytest.mark.parametrize("scheduler", ["1f1b", "pipedream"])
def test_a_wrong_sum_is_found_and_named(scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a unit whose gradient counts twice."""
    forward = Engine._forward

    def heavier(self: Engine, task: Task) -> None:
        forward(self, task)
        if task.microbatch == 1 and task.stage.is_last:
            task.stage.units[task.microbatch].weight *= 2

    monkeypatch.setattr(Engine, "_forward", heavier)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tiny()))
    result = CliRunner().invoke(command, [str(file), "--scheduler", scheduler], standalone_mode=False)
    assert result.return_value == 1
    assert result.output.startswith("not equal: step 0: grad 0."), result.output


def test_fp16_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="parity compares fp32 and bf16"):
        parity(tiny({"training.precision": "fp16"}), tmp_path)


@pytest.mark.parametrize("memory", [{}, {"parallel.recompute": 1.0}, {"parallel.swap": 1.0}])
@pytest.mark.parametrize("scheduler", ["zb-v", "interleaved", "1f1b", "hanayo"])
def test_a_split_head(scheduler: str, memory: dict[str, Any], tmp_path: Path) -> None:
    """Shards, their join and an embedding that is tied to them are layers like others."""
    extra = {"tied": True, "dropout": 0.1}
    changes = {"model.extra": extra, "model.split_head": True, "training.gradient_clipping": 0.1, **memory}
    code, found = parity(tiny(changes), tmp_path, "--scheduler", scheduler)
    assert (code, found["equal"], found["difference"]) == (0, True, None)
