"""Data that cannot be used: one sentence with the file, the place, both values and the remedy; never a traceback."""

from __future__ import annotations

import builtins
import gzip
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_writing import OWN, ShardWriter, functions, write_dictionary, write_json_lines, write_sentences

from vpipe.data import load
from vpipe.data.files import find_files, lines, require
from vpipe.errors import UserError


def sentence(name: str, path: Path | None, **extra: Any) -> str:
    """What the user reads."""
    with pytest.raises(UserError) as caught:
        load(name, path=path, sequence_length=16, extra=extra)
    said = str(caught.value)
    assert "\n" not in said
    assert said.strip()
    return said


@pytest.mark.parametrize(
    ("name", "builder"),
    [("code_search_net", "code"), ("bert", "bert"), ("translation", "translation"), ("text", "text")],
)
def test_a_missing_directory_says_how_to_build_it(tmp_path: Path, name: str, builder: str) -> None:
    missing = tmp_path / "nothing"
    assert sentence(name, missing).endswith(f"build it with: vpipe data build {builder} --out {missing}")


def test_no_directory_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert "vpipe data build code --out data/code" in sentence("code_search_net", None)
    assert "vpipe data build bert --out data/bert" in sentence("bert", None)


@pytest.mark.parametrize("name", ["code_search_net", "bert", "translation", "text", "chid"])
def test_an_empty_directory(tmp_path: Path, name: str) -> None:
    assert str(tmp_path) in sentence(name, tmp_path)


def test_a_line_that_is_not_json(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    write_json_lines(file, functions(OWN, "train", 2))
    file.write_text(file.read_text() + '{"original_string": "def f\n')
    said = sentence("code_search_net", tmp_path)
    assert said.startswith(f"{file}:3: not JSON")
    assert "column" in said
    file.write_text("[1, 2]\n")
    assert f"{file}:1: a JSON list" in sentence("code_search_net", tmp_path)
    file.write_text('{"text": "def f(): pass"}\n')
    assert f"{file}:1: no field original_string" in sentence("code_search_net", tmp_path)


def test_a_gzip_file_cut_short(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl.gz"
    write_json_lines(file, functions(OWN, "train", 200))
    file.write_bytes(file.read_bytes()[:-20])
    assert f"{file} is not a whole gzip file" in sentence("code_search_net", tmp_path)
    file.write_bytes(b"plain text")
    assert f"{file} is not a whole gzip file" in sentence("code_search_net", tmp_path)
    raw = bytearray(gzip.compress(b'{"code": "x"}\n' * 999))
    raw[30:40] = b"\xff" * 10
    file.write_bytes(bytes(raw))
    assert f"{file} is not a whole gzip file" in sentence("code_search_net", tmp_path)


def test_parquet_without_pyarrow(tmp_path: Path) -> None:
    if importlib.util.find_spec("pyarrow") is not None:
        pytest.skip("pyarrow is installed")
    (tmp_path / "train-0.parquet").write_bytes(b"PAR1")
    assert "pip install pyarrow" in sentence("code_search_net", tmp_path)


def test_empty_corpora(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("\n \n")
    assert "0 characters" in sentence("text", tmp_path)
    (tmp_path / "train.txt").write_text("four")
    said = sentence("text", tmp_path, tokenizer="char")
    assert "5 tokens" in said
    assert "17" in said
    (tmp_path / "train.jsonl").write_text("")
    assert "0 characters" in sentence("code_search_net", tmp_path)


def test_a_binary_file_among_texts(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"good line\nbad \x00 line\n")
    assert f"{file} is a binary file, not text (byte 0x00 at 14)" in sentence("text", tmp_path)
    file.write_bytes(b"good line\nlatin \xe9\n")
    assert f"{file} is not UTF-8 text (byte 0xe9 at 16)" in sentence("text", tmp_path)


def test_a_symbolic_link_that_leads_back(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    loop = tmp_path / "folder"
    loop.symlink_to(tmp_path, target_is_directory=True)
    assert f"{loop} is a symbolic link that leads back to itself" in sentence("text", tmp_path)
    loop.unlink()
    loop.symlink_to(loop)
    assert f"{loop} is a symbolic link that leads back to itself" in sentence("text", tmp_path)
    assert f"{loop} is a symbolic link that leads back to itself" in sentence("text", loop)


def test_a_link_to_another_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a.txt").write_text("words")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "there")
    assert find_files(tmp_path / "here", (".txt",)) == [tmp_path / "here" / "link" / "a.txt"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "a.txt").chmod(0)
    assert "Permission denied" in sentence("text", tmp_path)


Damage = Callable[[bytes], bytes]


@pytest.mark.parametrize("damage", [lambda raw: raw[: len(raw) // 2], lambda raw: b"", lambda raw: b"text" * 99])
def test_a_truncated_shard(tmp_path: Path, write_shard: ShardWriter, damage: Damage) -> None:
    shard = write_shard(tmp_path / "a_training_0.hdf5", 50)
    shard.write_bytes(damage(shard.read_bytes()))
    said = sentence("bert", tmp_path)
    assert said.startswith(f"{shard} ({shard.stat().st_size} bytes) is cut short or damaged")


def test_a_shard_damaged_inside(tmp_path: Path, write_shard: ShardWriter) -> None:
    """The header is whole and a compressed chunk is not: found when it is read, and still said in one sentence."""
    tokens = np.random.default_rng(0).integers(5, 99, size=(500, 16)).astype(np.int32)
    shard = write_shard(tmp_path / "a_training_0.hdf5", 500, input_ids=tokens)
    raw = bytearray(shard.read_bytes())
    start = raw.index(b"\x78\x5e") if b"\x78\x5e" in raw else raw.index(b"\x78\x9c")
    raw[start + 40 : start + 80] = b"\0" * 40
    shard.write_bytes(bytes(raw))
    data = load("bert", path=tmp_path, sequence_length=16)
    with pytest.raises(UserError, match=r"a_training_0\.hdf5.*damaged"):
        data.batch([0])


def test_shards_that_do_not_fit(tmp_path: Path, write_shard: ShardWriter) -> None:
    shard = write_shard(tmp_path / "a_training_0.hdf5", 4, next_sentence_labels=None)
    assert "no 'next_sentence_labels'" in sentence("bert", tmp_path)
    write_shard(shard, 4, input_mask=np.ones((3, 16), dtype=np.int8))
    assert "'input_mask' of shape (3, 16), but its other fields need (4, 16)" in sentence("bert", tmp_path)
    write_shard(shard, 4, length=32)
    assert "32 tokens per example, but sequence_length is 16; set sequence_length: 32" in sentence("bert", tmp_path)
    write_shard(shard, 4, length=12)
    write_shard(tmp_path / "b_training_0.hdf5", 4)
    assert "keep shards of one length" in sentence("bert", tmp_path)


@pytest.mark.parametrize("vocabulary", ["option", "file"])
def test_token_ids_beyond_the_vocabulary(tmp_path: Path, write_shard: ShardWriter, vocabulary: str) -> None:
    shard = write_shard(tmp_path / "a_training_0.hdf5", 4, first=10)
    if vocabulary == "file":
        (tmp_path / "vocab.txt").write_text("a\n" * 12)
    data = load("bert", path=tmp_path, sequence_length=16, extra={"vocab_size": 12} if vocabulary == "option" else {})
    with pytest.raises(UserError, match=rf"{shard} has the token id 13, but the vocabulary has 12"):
        data.batch([0])


def test_masked_positions_outside_the_example(tmp_path: Path, write_shard: ShardWriter) -> None:
    write_shard(tmp_path / "a.hdf5", 2, masked_lm_positions=np.full((2, 4), 16, dtype=np.int32))
    data = load("bert", path=tmp_path, sequence_length=16)
    with pytest.raises(UserError, match="masks position 16"):
        data.batch([0])


def test_parallel_text_that_is_not_parallel(tmp_path: Path) -> None:
    (tmp_path / "train.en").write_text("one\ntwo\n")
    assert "no pair" in sentence("translation", tmp_path)
    (tmp_path / "train.de").write_text("eins\n")
    said = sentence("translation", tmp_path, tokenizer="char")
    assert f"{tmp_path / 'train.en'} has 2 lines, {tmp_path / 'train.de'} has 1" in said
    assert "train.fr" in sentence("translation", tmp_path, target_language="fr")


def test_binarised_pairs_that_do_not_fit(tmp_path: Path) -> None:
    for language in ("de", "en"):
        write_dictionary("x", tmp_path / f"dict.{language}.txt")
        write_sentences(tmp_path / f"train.de-en.{language}", [[4, 2], [4, 4, 2]])
    write_sentences(tmp_path / "train.de-en.en", [[4, 2], [9, 2]])
    said = sentence("translation", tmp_path)
    assert "train.de-en.en.bin has the token id 9, but the vocabulary has 5" in said
    write_sentences(tmp_path / "train.de-en.en", [[4, 2]])
    assert "has 2 sentences" in sentence("translation", tmp_path)
    write_sentences(tmp_path / "train.de-en.en", [[4] * 30, [4] * 31])
    assert "no pair of sequence_length 16 or less: the shortest has 30" in sentence("translation", tmp_path)
    (tmp_path / "dict.en.txt").unlink()
    assert "dict.en.txt" in sentence("translation", tmp_path)
    assert "not fr-?" in sentence("translation", tmp_path, source_language="fr")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[[5, 6], [", r"train\.json:1: not JSON"),
        ('{"a": 1}', "not \\[candidate ids, sentences\\]"),
        (json.dumps([[5], [{"sent": [1], "truth": 0}]]), "sentence 0: not"),
        (json.dumps([[5], [{"sent": [1, 5], "truth": 3}]]), "truth is 3, but there are 1 candidates"),
        (json.dumps([[5], [{"sent": [1, 6], "truth": 0}]]), "ends with the id 6, but candidate 0 is 5"),
        (json.dumps([[5], [{"sent": [40000, 5], "truth": 0}]]), "token id 40000, but the vocabulary has 30000"),
        (json.dumps([[5], []]), "0 sentences"),
    ],
)
def test_chid_that_is_not_chid(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "train.json").write_text(content)
    with pytest.raises(UserError, match=words):
        load("chid", path=tmp_path)


def test_a_bad_tokenizer_file(code_folder: Path) -> None:
    (code_folder / "tokenizer.json").write_text('{"model": 3}')
    assert "not a tokenizer" in sentence("code_search_net", code_folder)
    assert "there is no tokenizer 'chars'" in sentence("code_search_net", code_folder, tokenizer="chars")
    assert "260 or more, not 100" in sentence("code_search_net", code_folder, tokenizer="bpe", vocab_size=100)


def test_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__
    monkeypatch.setattr("vpipe.data.files.importlib.import_module", lambda name: real("not_" + name))
    with pytest.raises(UserError, match=r'h5py; install it with: pip install "vpipe\[data\]"'):
        require("h5py")


def test_reading_reports_the_file_once_it_vanishes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.txt"):
        list(lines(tmp_path / "gone.txt"))
