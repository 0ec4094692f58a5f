"""The plain reference of parity: equal where the pipeline is right, and it sees what the replay cannot."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
from test_train_parity import MODELS, parity
from train_runs import tiny

from vpipe.errors import UserError
from vpipe.runtime import surroundings
from vpipe.runtime.proof import plain

GPT: dict[str, Any] = tiny(MODELS["gpt"])


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel.scheduler": "zb-v", "training.gradient_clipping": 0.1},
        {"parallel.data_parallel_size": 2, "training.optimizer": "lamb", "training.weight_decay": 0.1},
        {"training.precision": "bf16", "training.learning_rate_policy": "cosine", "training.warmup": 2.0},
    ],
)
def test_a_plain_loop_is_equal(changes: dict[str, Any], tmp_path: Path) -> None:
    code, found = parity(tiny(MODELS["gpt"] | changes), tmp_path)
    assert (code, found["reference"], found["difference"]) == (0, "plain", None)


def test_tied_weights(tmp_path: Path) -> None:
    code, found = parity(tiny(MODELS["gpt2 tied"]), tmp_path)
    assert (code, found["reference"], found["difference"]) == (0, "plain", None)


def test_versions_need_the_replay(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has one version of the weights, but pipedream keeps several"):
        parity(GPT, tmp_path, "--scheduler", "pipedream", "--reference", "plain")
    code, found = parity(GPT, tmp_path, "--scheduler", "pipedream", "--steps", "1")
    assert (code, found["reference"]) == (0, "replay")


def test_a_mistake_that_the_replay_shares_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer of a unit draws the same mask."""
    right = surroundings.key
    monkeypatch.setattr(surroundings, "key", lambda seed, unit, layer: right(seed, unit, 0))
    assert parity(GPT, tmp_path, "--steps", "1", "--reference", "replay")[0] == 0
    code, found = parity(GPT, tmp_path, "--steps", "1")
    assert code == 1
    assert found["difference"] is not None


def test_it_imports_nothing_of_what_it_checks() -> None:
    tree = ast.parse(inspect.getsource(plain))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module is not None}
    assert {name for name in imported if name.startswith("vpipe")} == {"vpipe.layer"}
