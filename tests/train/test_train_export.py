"""Weights that leave and come back: Hugging Face's names where the model came from there, layer by layer otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file
from train_runs import Run, equal, run, tiny

from vpipe.cli.export import command
from vpipe.config import PipelineConfig
from vpipe.errors import UserError
from vpipe.train.session import load_model

KEPT = {"training.max_iterations": 2, "checkpoint.interval": 0}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "llama": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
}


def export(where: Path, out: Path) -> str:
    result = CliRunner().invoke(command, [str(where), "--out", str(out)], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.output


def test_layers_keep_their_numbers(tmp_path: Path) -> None:
    found = run(tiny(KEPT), tmp_path / "run")
    told = export(tmp_path / "run", tmp_path / "out")
    assert "tensors with <layer>.<name> names" in told
    assert equal(load_file(tmp_path / "out" / "model.safetensors"), found.weights)
    assert yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["model"]["vocab_size"] == 32
    again = export(tmp_path / "run" / "checkpoints" / "iteration-000002", tmp_path / "again")
    assert "iteration-000002" in again


def test_nothing_to_export(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is nothing at"):
        export(tmp_path / "no", tmp_path / "out")
    with pytest.raises(UserError, match="holds no checkpoint"):
        export(tmp_path, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_round_trip_with_hugging_face(kind: str, tmp_path: Path) -> None:
    """Trained here, read by the library, the same answers; read here again, the same weights."""
    from transformers import AutoModelForCausalLM

    section = {"name": "huggingface", "sequence_length": 8, "config": {"model_type": kind, **CONFIGS[kind]}}
    found = run(tiny(KEPT | {"model": section}), tmp_path / "run")
    assert "with Hugging Face's names" in export(tmp_path / "run", tmp_path / "out")

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True).eval()
    session = found.trainer.session
    tokens = session.data.batch(range(8)).inputs
    assert isinstance(tokens, torch.Tensor)
    session.prepare()
    with torch.no_grad():
        assert torch.allclose(theirs(tokens).logits, session.pipeline.forward(tokens), atol=1e-6)

    directory = {"name": "huggingface", "sequence_length": 8, "directory": str(tmp_path / "out")}
    back = Run(tiny(KEPT | {"model": directory}), tmp_path / "back")
    assert equal(back.weights, found.weights)


def test_a_split_head_leaves_whole(tmp_path: Path) -> None:
    """As the same model does that was never split, in numbers too, but for the order of additions."""
    changes = KEPT | {"model.extra": {"tied": True}, "parallel.scheduler": "zb-v", "training.num_microbatches": 4}
    for name, split in (("shards", True), ("whole", False)):
        run(tiny(changes | {"model.split_head": split}), tmp_path / name)
        export(tmp_path / name, tmp_path / f"{name} out")
    shards, whole = (load_file(tmp_path / f"{name} out" / "model.safetensors") for name in ("shards", "whole"))
    assert shards.keys() == whole.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(shards[name], tensor, rtol=1e-3, atol=1e-5)
    assert yaml.safe_load((tmp_path / "shards out" / "config.yaml").read_text())["model"]["split_head"] is False


def test_a_run_goes_on_with_as_many_shards(tmp_path: Path) -> None:
    changes = KEPT | {"model.split_head": True, "parallel.scheduler": "zb-v", "training.num_microbatches": 4}
    run(tiny(changes), tmp_path / "run")
    with pytest.raises(UserError, match="layers"):
        Run(tiny(changes | {"model.split_head": False}), tmp_path / "other", resume=tmp_path / "run")


def test_auto_splits_a_head_that_outweighs_the_layers(tmp_path: Path) -> None:
    base = {
        "parallel.scheduler": "zb-v",
        "training.num_microbatches": 4,
        "model.split_head": "auto",
        "model.num_layers": 8,
    }
    for vocab_size, shards in ((4096, 2), (8, 0)):
        config = PipelineConfig.from_dict(tiny(base | {"dataset.extra.vocab_size": vocab_size}))
        assert load_model(config, vocab_size).num_shards == shards
    config = PipelineConfig.from_dict(tiny(base | {"parallel.scheduler": "1f1b"}))
    assert load_model(config, 4096).num_shards == 0
