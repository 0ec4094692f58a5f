"""Everything that is wrong is said at once, names of models and data sets included, before anything heavy is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from vpipe.cli.loading import KNOWN
from vpipe.config import load
from vpipe.errors import UserError


def written(tmp_path: Path, changes: dict[str, Any]) -> Path:
    values: dict[str, Any] = {
        "model": {"name": "gpt"},
        "dataset": {"name": "synthetic"},
        "training": {},
        "parallel": {},
    }
    for key, value in changes.items():
        section, name = key.split(".")
        values[section][name] = value
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def test_all_wrong_names_at_once(tmp_path: Path) -> None:
    file = written(tmp_path, {"model.name": "gptt", "dataset.name": "sinthetic", "parallel.scheduler": "nope"})
    with pytest.raises(UserError) as error:
        load(file, names=KNOWN)
    said = str(error.value)
    assert "'gptt', which is not known; did you mean 'gpt'?" in said
    assert "did you mean 'synthetic'?" in said
    assert "'nope', which is not known" in said


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.hidden_size", 2**31),
        ("model.num_layers", 2**31),
        ("model.num_heads", 2**31),
        ("model.sequence_length", 2**31),
        ("model.vocab_size", 2**31),
        ("model.extra", {"dropout": 7}),
        ("model.extra", {"dropout": float("nan")}),
        ("model.extra", {"dropout": "much"}),
    ],
)
def test_sizes_that_nothing_could_hold(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=key.replace(".", r"\.")):
        load(written(tmp_path, {key: value}), names=KNOWN)


def test_parity_with_an_unknown_schedule_answers_without_torch(tmp_path: Path) -> None:
    code = f"""
import sys
from vpipe.cli.main import main
try:
    main(["parity", {str(written(tmp_path, {}))!r}, "--scheduler", "nope"])
except SystemExit as end:
    assert end.code == 2
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "'nope', which is not known" in done.stderr
