"""Input that is well-formed and still wrong: one sentence with the place, never a traceback, never taken in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vpipe.data import token_cache
from vpipe.data.bert_hdf5 import FIELDS
from vpipe.data.bert_hdf5 import load as load_bert
from vpipe.data.dataset import check_vocabulary
from vpipe.data.files import json_lines
from vpipe.errors import UserError

h5py = pytest.importorskip("h5py")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "a number too long"),
        ('{"a": "\\ud800"}', "half of a surrogate pair"),
        ('{"a": {"\\udfff": 1}}', "half of a surrogate pair"),
    ],
    ids=["deep", "long number", "surrogate", "surrogate in a key"],
)
def test_json_that_python_cannot_use(line: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"a": "\\ud83d\\ude00"}\n' + line + "\n")
    with pytest.raises(UserError, match=rf"x\.jsonl:2: .*{said}"):
        list(json_lines(file))


def shard(path: Path, **changes: Any) -> Path:
    """Four examples of eight tokens."""
    whole = {
        "input_ids": np.ones((4, 8), dtype=np.int32),
        "input_mask": np.ones((4, 8), dtype=np.int8),
        "segment_ids": np.zeros((4, 8), dtype=np.int8),
        "masked_lm_positions": np.ones((4, 2), dtype=np.int32),
        "masked_lm_ids": np.ones((4, 2), dtype=np.int32),
        "next_sentence_labels": np.zeros(4, dtype=np.int8),
    }
    with h5py.File(path, "w") as file:
        for name, values in (whole | changes).items():
            if values is None:
                file.create_group(name)
            else:
                file[name] = values
    return path


def test_a_good_shard_loads(tmp_path: Path) -> None:
    data = load_bert(shard(tmp_path / "training.hdf5"), 8, vocab_size=16, test_size=0.0)
    assert len(data.batch([0, 1]).inputs["tokens"]) == 2


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("kind", ["float", "text", "group", "compound"])
def test_wrong_kinds_in_a_shard_are_named(name: str, kind: str, tmp_path: Path) -> None:
    shape = (4,) if name == "next_sentence_labels" else (4, 2) if "masked" in name else (4, 8)
    values = {
        "float": np.ones(shape, dtype=np.float32),
        "text": np.full(shape, b"word"),
        "group": None,
        "compound": np.zeros(shape, dtype=[("a", "i4"), ("b", "f4")]),
    }[kind]
    file = shard(tmp_path / "training.hdf5", **{name: values})
    with pytest.raises(UserError, match=name):
        load_bert(file, 8, vocab_size=16, test_size=0.0).batch([0])


def test_a_field_that_is_a_type_is_named(tmp_path: Path) -> None:
    file = shard(tmp_path / "training.hdf5", segment_ids=np.dtype("i4"))
    with pytest.raises(UserError, match="segment_ids"):
        load_bert(file, 8, vocab_size=16, test_size=0.0)


def test_no_byte_of_a_shard_can_be_changed_into_a_traceback(tmp_path: Path) -> None:
    """Names, links and addresses of a damaged file made h5py raise whatever it liked."""
    file = shard(tmp_path / "training.hdf5")
    whole, refused = file.read_bytes(), 0
    for place in range(0, len(whole), 41):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0xA5]) + whole[place + 1 :])
        try:
            load_bert(file, 8, vocab_size=16, test_size=0.0).batch([0, 3])
        except UserError:
            refused += 1
    assert refused > 10


@pytest.mark.parametrize(("name", "value"), [("input_mask", 2), ("segment_ids", -1), ("next_sentence_labels", 7)])
def test_impossible_labels_are_named(name: str, value: int, tmp_path: Path) -> None:
    shape = (4,) if name == "next_sentence_labels" else (4, 8)
    file = shard(tmp_path / "training.hdf5", **{name: np.full(shape, value, dtype=np.int8)})
    with pytest.raises(UserError, match=rf"{name}.*from {value} to {value}, but it must be 0 or 1"):
        load_bert(file, 8, vocab_size=16, test_size=0.0).batch([0])


def test_ids_are_whole_numbers_of_the_vocabulary() -> None:
    with pytest.raises(UserError, match="float32, which are no whole numbers"):
        check_vocabulary(np.ones(3, dtype=np.float32), 8, "x")
    with pytest.raises(UserError, match="token id -1"):
        check_vocabulary(np.array([-1, 3]), 8, "x")


def test_a_flipped_token_in_the_cache_is_noticed(tmp_path: Path) -> None:
    cache = token_cache.TokenCache(tmp_path / "a" / "x.tokens")
    ids = np.arange(1000, dtype=np.int32)
    made = []

    def make() -> list[Any]:
        made.append(1)
        return [ids[:400], ids[400:]]

    assert (cache.stream(make) == ids).all()
    assert (cache.stream(make) == ids).all()
    assert len(made) == 1
    path = tmp_path / "a" / "x.tokens"
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)
    assert (cache.stream(make) == ids).all()
    assert len(made) == 2, "made anew"
