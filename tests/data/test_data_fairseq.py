"""fairseq's files: what we write we read, what fairseq writes we read, what is damaged we name."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from data_writing import write_dictionary, write_sentences
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vpipe.data.fairseq import read_dictionary, read_sentences
from vpipe.errors import UserError

Sentences = list[list[int]]
ids = st.integers(0, 2**31 - 2)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sentences=st.lists(st.lists(ids, max_size=12), max_size=20))
def test_round_trip(tmp_path: Path, sentences: Sentences) -> None:
    assert write_sentences(tmp_path / "train.en-de.en", sentences) == len(sentences)
    read = read_sentences(tmp_path / "train.en-de.en")
    assert [sentence.tolist() for sentence in read] == sentences
    assert read.sizes.tolist() == [len(sentence) for sentence in sentences]
    assert read.highest == max((i for sentence in sentences for i in sentence), default=-1)


def test_the_bytes_are_fairseqs(tmp_path: Path) -> None:
    """Two sentences, written out by hand from the format: magic, version, int32, 4 bytes, 2 sentences, 2 dimensions."""
    write_sentences(tmp_path / "x", [[4, 5, 2], [6, 2]])
    index = b"TNTIDX\0\0" + struct.pack("<QQQQQ", 1, 4, 4, 2, 2)
    index += struct.pack("<3q", 0, 1, 2) + struct.pack("<3q", 0, 3, 5) + struct.pack("<2q", 3, 2)
    assert (tmp_path / "x.idx").read_bytes() == index
    assert (tmp_path / "x.bin").read_bytes() == struct.pack("<5i", 5, 6, 3, 7, 3), "ids are stored plus one"


def test_the_memory_mapped_form_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(struct.pack("<5H", 4, 5, 2, 6, 2))
    header = b"MMIDIDX\0\0" + struct.pack("<QBQ", 1, 8, 2)
    (tmp_path / "x.idx").write_bytes(header + struct.pack("<2i", 3, 2) + struct.pack("<2q", 0, 6))
    assert [sentence.tolist() for sentence in read_sentences(tmp_path / "x")] == [[4, 5, 2], [6, 2]]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(place=st.integers(0, 39 + 8 * 8), value=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_index_never_gives_other_sentences(tmp_path: Path, place: int, value: int, cut: bool) -> None:
    """Change or cut any byte of the index: the sentences are the same, or there is one sentence that names the file."""
    sentences = [[4, 5, 2], [6, 2]]
    write_sentences(tmp_path / "x", sentences)
    index = tmp_path / "x.idx"
    raw = bytearray(index.read_bytes())
    raw[place] = value
    index.write_bytes(bytes(raw[:place]) if cut else bytes(raw))
    try:
        read = [sentence.tolist() for sentence in read_sentences(tmp_path / "x")]
        said = "x.idx"
    except UserError as error:
        read, said = sentences, str(error)
    assert read == sentences
    assert "x.idx" in said


def test_damage_is_told_with_both_values(tmp_path: Path) -> None:
    write_sentences(tmp_path / "x", [[4, 5, 2], [6, 2]])
    data = tmp_path / "x.bin"
    data.write_bytes(data.read_bytes()[:-4])
    with pytest.raises(UserError, match=r"x\.bin.*16 bytes.*describes 20"):
        read_sentences(tmp_path / "x")
    data.unlink()
    with pytest.raises(UserError, match=r"x\.bin"):
        read_sentences(tmp_path / "x")
    (tmp_path / "x.idx").write_bytes(b"something else entirely")
    data.touch()
    with pytest.raises(UserError, match="not a fairseq index"):
        read_sentences(tmp_path / "x")


def test_a_dictionary_is_read(tmp_path: Path) -> None:
    write_dictionary(["Haus", "Ġder", "x y"], tmp_path / "dict.de.txt")
    first = ("<s>", "<pad>", "</s>", "<unk>", "Haus", "Ġder", "x y")
    assert read_dictionary(tmp_path / "dict.de.txt") == first
    with (tmp_path / "dict.de.txt").open("a") as file:
        file.write("<s> 9 #fairseq:overwrite\nzu 1\n")  # fairseq gives it a new id, and those behind it theirs
    assert read_dictionary(tmp_path / "dict.de.txt") == (*first, "<s>", "zu")


@pytest.mark.parametrize(("text", "words"), [("Haus\n", r":1: 'Haus'"), ("a 1\na 2\n", r":2: .*'a'.*twice")])
def test_a_bad_dictionary_names_the_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "dict.de.txt").write_text(text)
    with pytest.raises(UserError, match=words):
        read_dictionary(tmp_path / "dict.de.txt")
