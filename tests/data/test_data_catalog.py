"""Data sets by name and option, and the loader that reads ahead."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from vpipe.data import load
from vpipe.data.dataset import options
from vpipe.errors import UserError
from vpipe.registry import DATASET_REGISTRY


def test_importing_the_room_loads_nothing_heavy() -> None:
    program = (
        "import sys, vpipe.data, vpipe.data.dataset\n"
        "from vpipe.data import BatchOrder, Batch, DataSet, build, Manifest\n"
        "import vpipe.data.builders.bert, vpipe.data.builders.code, vpipe.data.builders.text\n"
        "import vpipe.data.builders.translation\n"
        "print(sorted({'torch', 'h5py', 'tokenizers', 'datasets'} & set(sys.modules)))\n"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


def test_names_and_options() -> None:
    assert [*DATASET_REGISTRY.built_in] == ["bert", "chid", "code_search_net", "synthetic", "text", "translation"]
    for name in DATASET_REGISTRY.built_in:
        assert "seed" not in options(name)
    assert options("code")["tokenizer"] == "auto"


@pytest.mark.parametrize(
    ("name", "extra", "words"),
    [
        ("code_serch_net", {}, "no dataset 'code_serch_net'.*did you mean 'code_search_net'"),
        ("synthetic", {"vocabsize": 3}, "vocabsize is not an option of 'synthetic'.*did you mean 'vocab_size'"),
        ("synthetic", {"vocab_size": "1k"}, r"dataset.extra.vocab_size is '1k' \(str\); it must be int"),
        ("synthetic", {"vocab_size": True}, r"vocab_size is True \(bool\)"),
        ("synthetic", {"seed": 3}, "seed is not an option"),
        ("synthetic", {"kind": "bart"}, "no synthetic data for 'bart'.*did you mean 'bert'"),
        ("synthetic", {"num_examples": 0}, "num_examples is 0"),
        ("text", {"path": 3}, "path is 3"),
        ("text", {"test_size": "a"}, "test_size is 'a'"),
    ],
)
def test_bad_names_and_options(name: str, extra: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load(name, extra=extra)


def test_every_option_changes_something(code_folder: Any) -> None:
    """No option is accepted and forgotten: each one, set to another value, changes what is loaded."""

    def look(extra: dict[str, Any]) -> tuple[Any, ...]:
        data = load("code", path=code_folder, sequence_length=8, extra=extra)
        assert data.valid is not None
        batch = data.batch([0])
        return data.vocab_size, len(data), len(data.valid), batch.targets.tolist(), batch.inputs.tolist()  # type: ignore[union-attr]

    plain = look({})
    for extra in ({"tokenizer": "char"}, {"vocab_size": 270}, {"pack": False}, {"limit": 5}):
        assert look(extra) != plain, extra
    with pytest.raises(UserError):
        look({"language": "go"})
    assert set(options("code")) == {"tokenizer", "vocab_size", "pack", "limit", "language", "test_size"}


def test_the_share_held_out() -> None:
    data = load("synthetic", sequence_length=4, extra={"num_examples": 100})
    train, test = data.split(0.2, seed=7)
    assert (len(train), len(test)) == (80, 20)
    rows = {tuple(part.batch([i]).inputs[0].tolist()) for part in (train, test) for i in range(len(part))}  # type: ignore[index]
    assert len(rows) == 100
    assert torch.equal(train.batch([3]).inputs, data.split(0.2, seed=7)[0].batch([3]).inputs)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"share is 1\.5"):
        data.split(1.5)
