"""Data sets by name and option, and the loader that reads ahead."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from threading import current_thread
from typing import Any

import pytest
import torch

from vpipe.data import Batch, DataSet, Loader, dataset_names, load
from vpipe.data.dataset import options
from vpipe.errors import UserError


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
    assert dataset_names() == ["bert", "chid", "code_search_net", "synthetic", "text", "translation"]
    for name in dataset_names():
        assert "seed" not in options(name)
    assert options("code")["tokenizer"] == "auto"


@pytest.mark.parametrize(
    ("name", "extra", "words"),
    [
        ("code_serch_net", {}, "no data set 'code_serch_net'.*did you mean 'code_search_net'"),
        ("synthetic", {"vocabsize": 3}, "no option 'vocabsize'.*did you mean 'vocab_size'"),
        ("synthetic", {"vocab_size": "1k"}, r"dataset.extra.vocab_size is '1k' \(str\); it must be int"),
        ("synthetic", {"vocab_size": True}, r"vocab_size is True \(bool\)"),
        ("synthetic", {"seed": 3}, "no option 'seed'"),
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
        return data.vocab_size, len(data), len(data.valid), batch.num_tokens, batch.inputs.tolist()  # type: ignore[union-attr]

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


class Watched(DataSet):
    """Remembers which thread read what; example 13 cannot be read."""

    vocab_size = 100

    def __init__(self, bad: int = 13) -> None:
        self.threads: dict[int, str] = {}
        self.bad = bad

    def __len__(self) -> int:
        return 40

    def batch(self, indices: Sequence[int]) -> Batch:
        if self.bad in indices:
            raise UserError(f"example {self.bad} is damaged")
        for i in indices:
            self.threads[i] = current_thread().name
        tokens = torch.tensor(list(indices))
        return Batch(tokens, tokens, len(indices))


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_the_loader_gives_the_batches_of_the_order(num_workers: int) -> None:
    data = Watched(bad=-1)
    order = data.order(batch_size=4, seed=1)
    expected = [order.indices(batch, epoch) for epoch in (0, 1) for batch in range(10)]
    loader = Loader(data, order, num_workers)
    seen, states = [], []
    for _ in range(2):
        for batch in loader:
            seen.append(batch.inputs.tolist())  # type: ignore[union-attr]
            states.append(order.state())
    assert seen == expected
    assert states[0] == {"epoch": 0, "batch": 1}, "what was read ahead is not behind us"
    assert states[9] == {"epoch": 1, "batch": 0}
    assert all(name.startswith("vpipe-data") == (num_workers > 0) for name in data.threads.values())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_fault_in_a_thread_arrives(num_workers: int) -> None:
    data = Watched()
    with pytest.raises(UserError, match="example 13 is damaged"):
        list(Loader(data, data.order(batch_size=4, seed=1), num_workers))


def test_a_loader_left_early_stops_its_threads() -> None:
    data = Watched(bad=-1)
    order = data.order(batch_size=1, seed=1)
    for _ in Loader(data, order, 2):
        break
    assert order.state() == {"epoch": 0, "batch": 1}
    assert len(data.threads) <= 6
    with pytest.raises(UserError, match="num_workers is -1"):
        Loader(data, order, -1)
