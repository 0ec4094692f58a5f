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
from vpipe.errors import UserError

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
