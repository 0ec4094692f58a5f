"""Every reader gives the layout that the models read, and the examples that the files hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from data_writing import HUB, OWN, ShardWriter, functions, write_dictionary, write_json_lines, write_sentences

from vpipe.data import Batch, DataSet, load
from vpipe.data import code_search_net as csn
from vpipe.data import tokenizer as tk
from vpipe.data.bert_hdf5 import BertShards, _open
from vpipe.data.files import lines, read_paragraphs, read_text
from vpipe.errors import UserError


def texts_of(data: DataSet, tokens: torch.Tensor) -> str:
    return str(data.tokenizer.decode(tokens.tolist(), skip_special_tokens=False))


def check_language_model(batch: Batch, rows: int, length: int) -> None:
    assert isinstance(batch.inputs, torch.Tensor)
    assert isinstance(batch.targets, torch.Tensor)
    assert batch.inputs.shape == batch.targets.shape == (rows, length)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.inputs.is_contiguous()
    assert batch.targets.is_contiguous()


@pytest.mark.parametrize("tokenizer", ["char", "bpe"])
def test_code_is_packed_into_full_sequences(code_folder: Path, tokenizer: str) -> None:
    data = load("code_search_net", path=code_folder, sequence_length=16, extra={"tokenizer": tokenizer})
    batch = data.batch([1, 0])
    check_language_model(batch, 2, 16)
    assert (batch.targets != -100).sum() == 32
    assert torch.equal(batch.inputs[0, 1:], batch.targets[0, :-1])
    assert batch.targets[1, -1] == batch.inputs[0, 0], "block 0 is followed by block 1"
    stream = torch.cat([data.batch([i]).inputs[0] for i in range(len(data))])
    assert texts_of(data, stream).startswith("def train_0(x):\n    return x + 0\n</s>def train_1(x):")
    assert data.valid is not None
    assert texts_of(data.valid, data.valid.batch([0]).inputs[0]).startswith(
        {"bpe": "def valid", "char": "def <unk>a<unk>id"}[tokenizer]  # the training split has no v and no l
    )
    assert data.valid.vocab_size == data.vocab_size == data.tokenizer.get_vocab_size()


def test_code_one_function_per_row(code_folder: Path) -> None:
    data = load("code_search_net", path=code_folder, sequence_length=40, extra={"tokenizer": "char", "pack": False})
    assert len(data) == 40
    batch = data.batch([3])
    check_language_model(batch, 1, 40)
    text = "def train_3(x):\n    return x + 3\n"
    assert texts_of(data, batch.inputs[0, : len(text)]) == text
    assert (batch.targets != -100).sum() == len(text), "every character and the end, but the first, is predicted"
    assert set(batch.inputs[0, len(text) :].tolist()) == {data.pad_id} == {1}
    assert set(batch.targets[0, len(text) :].tolist()) == {-100}


@pytest.mark.parametrize("names", [OWN, HUB])
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_both_field_namings_in_one_file_split_by_record(tmp_path: Path, names: tuple[str, str], suffix: str) -> None:
    records = functions(names, "train", 5) + functions(names, "validation" if names is HUB else "valid", 3)
    records += functions(names, "test", 2)
    records[0]["language"] = "go"
    write_json_lines(tmp_path / f"functions{suffix}", records)
    files = [tmp_path / f"functions{suffix}"]
    assert len(list(csn.read_functions(files, tmp_path, "train"))) == 5
    assert len(list(csn.read_functions(files, tmp_path, "train", "python"))) == 4
    assert len(list(csn.read_functions(files, tmp_path, "valid"))) == 3
    assert len(list(csn.read_functions(files, tmp_path, "test"))) == 2


def test_records_of_folders_and_splits_by_other_names(tmp_path: Path) -> None:
    """Only a folder that is called as a split is one; a word that names no split leaves nothing out."""
    for place in ("my-test-suite/a.jsonl", "contest/b.jsonl"):
        write_json_lines(tmp_path / place, functions(OWN, "train", 10))
    for word in ("dev", "mine"):
        write_json_lines(tmp_path / f"{word}.jsonl", [r | {"partition": word} for r in functions(OWN, word, 5)])
    data = load("code_search_net", path=tmp_path, sequence_length=16, extra={"pack": False})
    assert data.valid is not None
    assert (len(data), len(data.valid)) == (25, 5)


def test_the_hubs_cache_is_found(tmp_path: Path) -> None:
    assert csn.hub_cache(tmp_path) is None
    snapshot = tmp_path / ".cache/huggingface/hub/datasets--code_search_net/snapshots/abc"
    write_json_lines(snapshot / "python/train-00000.jsonl", functions(HUB, "train", 3))
    assert csn.hub_cache(tmp_path) == snapshot.parent


def test_a_stored_tokenizer_is_used_unless_another_size_is_asked_for(code_folder: Path) -> None:
    tk.train("char", ["abc"]).save(str(code_folder / "tokenizer.json"))
    assert load("code", path=code_folder, sequence_length=8).vocab_size == 7
    assert load("code", path=code_folder, sequence_length=8, extra={"vocab_size": 300}).vocab_size == 300


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_text_survives_the_tokenizer(kind: str) -> None:
    text = "for x in range(3):\n\tprint('</s>', 'é', \"日本\")  # <pad>\n"
    tokenizer = tk.train(kind, [text])
    (ids,) = tk.encode(tokenizer, [text])
    assert ids.min() > 3, "special tokens inside a text are text"
    assert tokenizer.decode(ids.tolist()) == text
    assert [tokenizer.token_to_id(token) for token in tk.SPECIAL] == [0, 1, 2, 3]


def test_two_processes_train_the_same_tokenizers() -> None:
    """The first and the last stage are two processes. The library's own WordPiece training differs from run to run."""
    program = (
        "import hashlib, inspect, argparse\n"
        "from vpipe.data.tokenizer import train\n"
        "from vpipe.data.builders.bert import train_word_pieces\n"
        "texts = inspect.getsource(argparse).split('\\n\\n')\n"
        "for t in (train('bpe', texts, 600), train('char', texts), train_word_pieces(texts, 900)):\n"
        "    print(hashlib.sha256(t.to_str().encode()).hexdigest(), t.get_vocab_size())\n"
    )
    outputs = {subprocess.check_output([sys.executable, "-c", program], text=True) for _ in range(3)}
    assert len(outputs) == 1
    assert " 600\n" in outputs.pop()


def test_plain_text_holds_out_a_share(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"Paragraph {i}.\nSecond line.\n\n" for i in range(50)))
    (tmp_path / "b.md").write_text("Another file.\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    data = load("text", path=tmp_path, sequence_length=8, extra={"tokenizer": "char", "test_size": 0.25})
    assert data.valid is not None
    total = len(data) + len(data.valid)
    assert len(data.valid) == round(total * 0.25)
    check_language_model(data.batch([0, 5]), 2, 8)
    rows = [part.batch([i]).inputs[0] for part in (data, data.valid) for i in range(len(part))]
    assert len({tuple(row.tolist()) for row in rows}) > 40
    again = load("text", path=tmp_path, sequence_length=8, extra={"tokenizer": "char", "test_size": 0.25})
    assert torch.equal(again.batch([3]).inputs, data.batch([3]).inputs)  # type: ignore[arg-type]


def test_text_files_named_after_splits(tmp_path: Path) -> None:
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text(f"{split} words: train, valid, test. " * 20)
    data = load("text", path=tmp_path, sequence_length=8, extra={"tokenizer": "char"})
    assert data.valid is not None
    assert texts_of(data, data.batch([0]).inputs[0]) == "train wo"
    assert texts_of(data, data.valid.batch([0]).inputs[0]) == "valid wo"


def test_a_text_folder_may_hold_a_training_guide(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "training-guide.md").write_text("guide " * 20)
    (tmp_path / "test.plan.md").write_text("plan " * 20)
    (tmp_path / "z.md").write_text("zebra " * 20)
    data = load("text", path=tmp_path, sequence_length=8, extra={"tokenizer": "char"})
    assert {"g", "z"} <= set(data.tokenizer.get_vocab())
    assert "p" not in data.tokenizer.get_vocab(), "test.plan.md says it is held out"


def test_parquet_is_read_where_pyarrow_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow is not a dependency; a stand-in with its two calls shows what is asked of it."""

    class ParquetFile:
        def __init__(self, file: Path) -> None:
            if file.stat().st_size == 0:
                raise ValueError("Parquet file size is 0 bytes")

        def iter_batches(self) -> list[Any]:
            return [SimpleNamespace(to_pylist=lambda: functions(HUB, "train", 2))] * 2

    stand_in = SimpleNamespace(ParquetFile=ParquetFile)
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(parquet=stand_in))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", stand_in)
    (tmp_path / "train-0.parquet").write_bytes(b"PAR1")
    assert len(list(csn.read_functions([tmp_path / "train-0.parquet"], tmp_path, "train"))) == 4
    (tmp_path / "train-0.parquet").write_bytes(b"")
    with pytest.raises(UserError, match=r"train-0\.parquet is damaged behind row 0"):
        list(csn.read_functions([tmp_path / "train-0.parquet"], tmp_path, "train"))


def translation_folder(root: Path) -> Path:
    pairs = [("Open the file", "Datei öffnen"), ("Close", "Schließen"), ("A much longer sentence " * 9, "Lang")] * 4
    for split, part in (("train", pairs), ("valid", pairs[:2])):
        for language, side in (("en", 0), ("de", 1)):
            (root / f"{split}.{language}").write_text("".join(pair[side] + "\n" for pair in part))
    return root


def test_parallel_text(tmp_path: Path) -> None:
    data = load("translation", path=translation_folder(tmp_path), sequence_length=24, extra={"tokenizer": "char"})
    assert len(data) == 8, "the four long pairs are left out"
    assert data.pad_id == data.ignore_index == 1
    batch = data.batch([0, 1])
    assert isinstance(batch.inputs, dict)
    assert isinstance(batch.targets, torch.Tensor)
    assert set(batch.inputs) == {"source", "target_in"}
    assert texts_of(data, batch.inputs["source"][0]) == "Open the file</s>"
    assert texts_of(data, batch.inputs["source"][1]) == "Close</s>" + "<pad>" * 8
    assert texts_of(data, batch.inputs["target_in"][1]) == "</s>Schließen" + "<pad>" * 3
    assert texts_of(data, batch.targets[1]) == "Schließen</s>" + "<pad>" * 3
    assert int((batch.targets != 1).sum()) == 23
    order = data.order(max_tokens=40, seed=1)
    assert all(len(indices) * max(data.lengths[i] for i in indices) <= 40 for indices in order)  # type: ignore[index]


def test_binarised_pairs(tmp_path: Path) -> None:
    for language, symbols in (("de", ("Haus", "der")), ("en", ("house", "the", "a"))):
        write_dictionary(symbols, tmp_path / f"dict.{language}.txt")
        for split in ("train", "valid"):
            write_sentences(tmp_path / f"{split}.de-en.{language}", [[4, 2], [5, 4, 2]])
    data = load("translation", path=tmp_path, sequence_length=8)
    batch = data.batch([0, 1])
    assert isinstance(batch.inputs, dict)
    assert isinstance(batch.targets, torch.Tensor)
    assert batch.inputs["source"].tolist() == [[4, 2, 1], [5, 4, 2]]
    assert batch.inputs["target_in"].tolist() == [[2, 4, 1], [2, 5, 4]]
    assert batch.targets.tolist() == [[4, 2, 1], [5, 4, 2]]
    assert (data.vocab_size, data.source_vocab_size, data.target_vocab_size) == (7, 6, 7)  # type: ignore[attr-defined]
    assert data.valid is not None
    assert len(data.valid) == 2
    other_way = load(
        "translation", path=tmp_path, sequence_length=8, extra={"source_language": "en", "target_language": "de"}
    )
    assert other_way.source_vocab_size == 7  # type: ignore[attr-defined]
    short = load("translation", path=tmp_path, sequence_length=2)
    assert [note.split(": ")[1] for note in short.notes] == ["1 of 2 pairs are longer than 2 tokens and left out"] * 2
    for language in ("de", "fr"):
        write_sentences(tmp_path / f"train.de-fr.{language}", [[4, 2]])
    write_dictionary(("maison",), tmp_path / "dict.fr.txt")
    with pytest.raises(UserError, match="holds de-en and de-fr"):
        load("translation", path=tmp_path, sequence_length=8)
    another = load("translation", path=tmp_path, sequence_length=8, extra={"target_language": "fr"})
    assert len(another) == 1


def test_old_line_ends_are_line_ends(tmp_path: Path) -> None:
    """A carriage return alone; one within a line of a file with other ends is text."""
    (tmp_path / "a.txt").write_bytes(b"one\rtwo\r\rthree\r")
    assert list(lines(tmp_path / "a.txt")) == [(1, "one"), (2, "two"), (3, ""), (4, "three")]
    (tmp_path / "b.txt").write_bytes(b"one\r\ntwo\rthree\n")
    assert list(lines(tmp_path / "b.txt")) == [(1, "one"), (2, "two\rthree")]


def test_all_bert_shards_are_read(tmp_path: Path, write_shard: ShardWriter) -> None:
    """The original read one shard and called it the data set."""
    for number, num in enumerate((3, 1, 4)):
        write_shard(tmp_path / f"part_training_{number}.hdf5", num, first=100 * (number + 1))
    write_shard(tmp_path / "part_test_0.hdf5", 2, first=900)
    data = load("bert", path=tmp_path, sequence_length=16)
    assert (len(data), data.vocab_size) == (8, 30522)
    batch = data.batch([7, 0, 3])
    assert isinstance(batch.inputs, dict)
    assert isinstance(batch.targets, dict)
    assert batch.inputs["tokens"][:, 0].tolist() == [303, 100, 200]
    assert batch.inputs["mask"].dtype == torch.bool
    assert batch.inputs["mask"].sum(1).tolist() == [8, 8, 8]
    assert batch.inputs["segments"].sum(1).tolist() == [4, 4, 4]
    assert batch.targets["masked_labels"][0].tolist() == [-1, 7, -1, 8] + [-1] * 12, "a position of 0 ends the list"
    assert batch.targets["next_sentence"].tolist() == [1, 0, 0]
    assert data.valid is not None
    assert data.valid.batch([0]).inputs["tokens"][0, 0] == 900  # type: ignore[index]


def test_bert_shards_that_do_not_fit_are_read_one_by_one(tmp_path: Path, write_shard: ShardWriter) -> None:
    shards = [_open(write_shard(tmp_path / f"{i}.hdf5", 6, first=100 * (i + 1))) for i in range(5)]
    whole, tight = BertShards(shards, 1000), BertShards(shards, 1000, memory=1)
    assert whole.groups is None
    assert tight.groups == (6,) * 5
    order = tight.order(batch_size=4, seed=2)
    reads = 0
    for indices in order:
        before = set(tight._kept)
        tight.batch(indices)
        reads += len(set(tight._kept) - before)
        assert len(tight._kept) <= 2
        assert torch.equal(tight.batch(indices).inputs["tokens"], whole.batch(indices).inputs["tokens"])  # type: ignore[index]
    assert reads <= 5, "each shard is read once an epoch"
    held_in, _ = tight.split(0.3)
    assert held_in.groups is not None
    assert sum(held_in.groups) == len(held_in)


def test_chid_is_judged_on_its_last_token(tmp_path: Path) -> None:
    items = [{"sent": [10, 11, 12, 5], "truth": 0}, {"sent": [20, 21, 22, 23, 24, 6], "truth": 1}]
    (tmp_path / "train.json").write_text(json.dumps([[5, 6], items]))
    (tmp_path / "dev.json").write_text(json.dumps([[5, 6], items[:1]]))
    data = load("chid", path=tmp_path, sequence_length=4)
    assert data.vocab_size == 30000
    batch = data.batch([0, 1])
    assert isinstance(batch.inputs, torch.Tensor)
    assert isinstance(batch.targets, torch.Tensor)
    assert batch.inputs.tolist() == [[10, 11, 12, 0], [21, 22, 23, 24]], "a long sentence keeps its end"
    assert batch.targets.tolist() == [[-100, -100, 5, -100], [-100, -100, -100, 6]]
    assert data.valid is not None
    assert len(data.valid) == 1


@pytest.mark.parametrize("kind", ["gpt", "bert", "translation"])
def test_synthetic_data_are_fixed(kind: str) -> None:
    extra = {"kind": kind, "num_examples": 10, "vocab_size": 50}
    data, again = (load("synthetic", sequence_length=12, extra=extra) for _ in range(2))
    other = load("synthetic", sequence_length=12, seed=5, extra=extra)
    batch, same, different = (d.batch([4, 2]) for d in (data, again, other))
    as_dict = lambda x: x if isinstance(x, dict) else {"": x}  # noqa: E731
    for name, value in as_dict(batch.inputs).items():
        assert value.shape == (2, 12)
        assert torch.equal(value, as_dict(same.inputs)[name])
    first = next(iter(as_dict(batch.inputs)))
    assert not torch.equal(as_dict(batch.inputs)[first], as_dict(different.inputs)[first])
    assert as_dict(batch.inputs)[first].max() < data.vocab_size
    assert data.valid is not None


def test_a_tokenizer_file_does_not_cut_documents(code_folder: Path) -> None:
    """Its stored truncation and padding are of those who wrote it."""
    plain = tk.train("char", ["def train_0(x):\n    return x + 0123456789"])
    plain.save(str(code_folder / "tokenizer.json"))
    whole = len(load("code", path=code_folder, sequence_length=8))
    plain.enable_truncation(4)
    plain.enable_padding(length=64)
    plain.save(str(code_folder / "tokenizer.json"))
    assert len(load("code", path=code_folder, sequence_length=8)) == whole


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\n\ntwo\n")
    assert list(read_paragraphs(tmp_path / "a.txt")) == ["one", "two"]
    assert read_text(tmp_path / "a.txt")[0] == "o"
