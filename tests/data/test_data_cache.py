"""The token cache: the same stream with and without it, never a stale one, never the reason for a failure."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from vpipe.data import DataSet, language_model, load, token_cache
from vpipe.data.token_cache import TokenCache, Tokens


@pytest.fixture(autouse=True)
def _cache_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "SMALLEST", 0)


def read(root: Path) -> DataSet:
    return load("text", path=root, sequence_length=8, extra={"tokenizer": "char"})


def same(one: DataSet, other: DataSet) -> bool:
    return len(one) == len(other) and torch.equal(one.batch([0, 3]).inputs, other.batch([0, 3]).inputs)  # type: ignore[arg-type]


def text(root: Path, words: str) -> Path:
    root.mkdir(exist_ok=True)
    (root / "train.txt").write_text(words * 30)
    return root


def kept(root: Path) -> list[Path]:
    return sorted((root / token_cache.FOLDER).glob("*"))


def test_the_second_time_nothing_is_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "SMALLEST", 2**40)
    plain = read(text(tmp_path / "a", "some words "))
    assert kept(tmp_path / "a") == []
    monkeypatch.setattr(token_cache, "SMALLEST", 0)
    first = read(tmp_path / "a")
    assert len(kept(tmp_path / "a")) == 1
    monkeypatch.setattr(language_model, "encode", None)  # calling it would raise
    second = read(tmp_path / "a")
    assert same(plain, first)
    assert same(plain, second)


def test_other_text_or_options_are_another_stream(tmp_path: Path) -> None:
    before = read(text(tmp_path / "a", "some words "))
    (file,) = (tmp_path / "a").glob("*.txt")
    times = file.stat()
    text(tmp_path / "a", "word some s")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as copies that keep times have it
    after = read(tmp_path / "a")
    assert not same(before, after)
    load("text", path=tmp_path / "a", sequence_length=8, extra={"tokenizer": "bpe"})
    assert len(kept(tmp_path / "a")) == 3


@pytest.mark.parametrize("cut", [0, 5, 16, 40])
def test_a_damaged_cache_is_made_again(tmp_path: Path, cut: int) -> None:
    whole = read(text(tmp_path / "a", "some words "))
    (file,) = kept(tmp_path / "a")
    size, part = file.stat().st_size, file.read_bytes()[:cut]
    file.unlink()  # the first data set still maps it: to cut it in place would end the process
    file.write_bytes(part)
    assert same(whole, read(tmp_path / "a"))
    assert file.stat().st_size == size


def test_what_dead_writers_left_is_removed_and_old_streams_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "MOST", 3000)
    folder = tmp_path / "a" / token_cache.FOLDER
    folder.mkdir(parents=True)
    (folder / "dead.partial").write_bytes(b"x")
    with (folder / "alive.partial").open("wb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        for number in range(6):
            read(text(tmp_path / "a", f"some words {number} "))  # about 1,500 bytes each
        assert [file.name for file in kept(tmp_path / "a") if file.suffix == ".partial"] == ["alive.partial"]
    streams = [file for file in kept(tmp_path / "a") if file.suffix == ".tokens"]
    assert 1 <= len(streams) <= 3
    assert sum(file.stat().st_size for file in streams) <= 3000


def test_where_nothing_can_be_written_memory_does(tmp_path: Path) -> None:
    whole = read(text(tmp_path / "a", "some words "))
    text(tmp_path / "b", "some words ")
    (tmp_path / "b" / token_cache.FOLDER).write_text("a file where the folder should be")
    assert same(whole, read(tmp_path / "b"))


def test_a_disk_that_fills_up_leaves_no_part(tmp_path: Path) -> None:
    calls = 0

    def pieces() -> Iterator[Tokens]:
        nonlocal calls
        calls += 1
        yield np.arange(3, dtype=np.int32)
        if calls == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield np.arange(2, dtype=np.int32)

    cache = TokenCache(tmp_path / token_cache.FOLDER / "x.tokens")
    assert cache.stream(pieces).tolist() == [0, 1, 2, 0, 1]
    assert kept(tmp_path) == []
    assert cache.stream(pieces).tolist() == [0, 1, 2, 0, 1]
    assert [file.name for file in kept(tmp_path)] == ["x.tokens"]
