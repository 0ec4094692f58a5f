"""Builders: real text of this machine, whole or not at all, the same bytes for the same seed."""

from __future__ import annotations

import ast
import errno
import gzip
import json
import os
import re
import signal
import struct
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from vpipe.data import Manifest, build, load
from vpipe.data.builders import BUILDERS, Progress, bert, corpus, translation
from vpipe.data.files import json_lines
from vpipe.data.manifest import checksums
from vpipe.errors import UserError

FIELDS = [
    "repo",
    "path",
    "func_name",
    "original_string",
    "language",
    "code",
    "docstring",
    "sha",
    "url",
    "partition",
]


def text_folder(root: Path, num: int = 60) -> Path:
    root.mkdir()
    text = "the pipeline runs a stage on each device and sends what it made to the next one"
    words = re.findall(r"\w+", text)
    for i in range(num):
        sentences = [" ".join(words[(i * j) % 7 :]) + f" {i} times." for j in range(1, 6)]
        (root / f"{i}.txt").write_text(" ".join(sentences) + "\n")
    return root


def catalogue(file: Path, pairs: dict[str, str], order: str = "<") -> None:
    """A ``.mo`` file as msgfmt writes it."""
    entries = sorted({"": "Content-Type: text/plain; charset=UTF-8\n", **pairs}.items())
    raws = [(a.encode(), b.encode()) for a, b in entries]
    tables, data = [b"", b""], b""
    start = 28 + 16 * len(raws)
    for side in (0, 1):
        for raw in raws:
            tables[side] += struct.pack(order + "II", len(raw[side]), start + len(data))
            data += raw[side] + b"\0"
    header = struct.pack(order + "7I", 0x950412DE, 0, len(raws), 28, 28 + 8 * len(raws), 0, 0)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(header + tables[0] + tables[1] + data)


def locale_folder(root: Path) -> Path:
    pairs = {f"Open file {i}": f"Datei {i} öffnen" for i in range(30)}
    extra = {"menu\x04Close": "Schließen", "%d file\0%d files": "%d Datei\0%d Dateien", "vim": "vim", "42": "43"}
    catalogue(root / "de/LC_MESSAGES/one.mo", {**pairs, **extra})
    catalogue(root / "de/LC_MESSAGES/two.mo", {"Open file 1": "second", "Two\n  lines": "Zwei Zeilen"}, order=">")
    return root


def test_code_from_the_standard_library(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    manifest = build(
        "code", tmp_path / "code", seed=1, limit=150, progress=lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (150, 150)
    assert sum(manifest.counts[split] for split in ("train", "valid", "test")) == 150
    assert min(manifest.counts.values()) > 0
    records = {
        split: [r for _, r in json_lines(tmp_path / f"code/python/final/jsonl/{split}/python_{split}_0.jsonl.gz")]
        for split in ("train", "valid", "test")
    }
    for split, found in records.items():
        for record in found:
            assert list(record) == FIELDS
            assert record["partition"] == split
            assert record["docstring"]
            assert "def " in record["original_string"]
            assert (Path(sysconfig.get_path("stdlib")) / record["path"].removeprefix("Lib/")).is_file()
    paths = [{record["path"] for record in found} for found in records.values()]
    assert not (paths[0] & paths[1] | paths[0] & paths[2] | paths[1] & paths[2]), "a file is on one side only"
    data = load("code_search_net", path=tmp_path / "code", sequence_length=32)
    assert data.vocab_size <= 4096
    assert data.valid is not None
    assert len(data.valid) > 0


def test_bert_from_a_folder(tmp_path: Path) -> None:
    manifest = build("bert", tmp_path / "bert", seed=1, source=text_folder(tmp_path / "text"))
    data = load("bert", path=tmp_path / "bert")
    assert len(data) == manifest.counts["training"] > 50
    assert data.vocab_size == manifest.counts["vocabulary"]
    batch = data.batch(range(len(data)))
    assert isinstance(batch.inputs, dict)
    assert isinstance(batch.targets, dict)
    tokens, labels, mask = batch.inputs["tokens"], batch.targets["masked_labels"], batch.inputs["mask"]
    assert tokens.shape == (len(data), 128)
    assert (tokens[:, 0] == 2).all()
    assert ((tokens == 3).sum(1) == 2).all(), "two separators"
    assert torch.equal(mask, tokens != 0)
    masked = labels != -1
    share = masked.sum(1) / mask.sum(1)
    assert (masked.sum(1) >= 1).all()
    assert (masked.sum(1) <= 20).all()
    assert 0.12 < share.mean() < 0.18
    assert 0.7 < (tokens[masked] == 4).float().mean() < 0.9, "80 % of the masked read [MASK]"
    assert not (masked & (batch.inputs["segments"] > 0) & ~mask).any()
    assert 0.45 < batch.targets["next_sentence"].float().mean() < 0.55
    words = (tmp_path / "bert/vocab.txt").read_text().split("\n")
    assert words[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert "pipeline" in words


def test_translation_from_catalogues(tmp_path: Path) -> None:
    manifest = build("translation", tmp_path / "out", seed=1, source=locale_folder(tmp_path / "locale"))
    lines = {
        f"{split}.{language}": (tmp_path / f"out/{split}.{language}").read_text().splitlines()
        for split in ("train", "valid", "test")
        for language in ("en", "de")
    }
    pairs = {
        pair
        for split in ("train", "valid", "test")
        for pair in zip(lines[f"{split}.en"], lines[f"{split}.de"], strict=True)
    }
    assert len(pairs) == 33 == sum(manifest.counts.values())
    assert ("Close", "Schließen") in pairs, "the context of a message is not text"
    assert ("%d file", "%d Datei") in pairs, "the first plural form"
    assert ("Two lines", "Zwei Zeilen") in pairs, "big-endian files, line ends"
    assert ("Open file 1", "Datei 1 öffnen") in pairs, "the first translation of a message"
    plain = load("translation", path=tmp_path / "out")
    assert plain.valid is not None
    assert len(plain) + len(plain.valid) == manifest.counts["train"] + manifest.counts["valid"]


def test_text_from_a_folder(tmp_path: Path) -> None:
    manifest = build("text", tmp_path / "out", source=text_folder(tmp_path / "text"), limit=50)
    assert manifest.counts["train"] + manifest.counts["valid"] + manifest.counts["test"] == 50
    assert len(load("text", path=tmp_path / "out", sequence_length=8)) > 10


@pytest.mark.parametrize("name", ["bert", "text", "translation"])
def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, name: str) -> None:
    source = locale_folder(tmp_path / "s") if name == "translation" else text_folder(tmp_path / "s")
    one, same, other = (build(name, tmp_path / str(i), seed=seed, source=source) for i, seed in enumerate((3, 3, 4)))
    assert one == same
    assert one.files != other.files
    assert one == Manifest.read(tmp_path / "0")
    assert one.files == checksums(tmp_path / "0")
    assert one.licence
    assert str(tmp_path) not in (tmp_path / "0" / "manifest.json").read_text(), "no path of this machine"


def test_the_code_builder_is_deterministic_and_takes_a_folder(tmp_path: Path) -> None:
    source = tmp_path / "mine"
    source.mkdir()
    for i in range(6):
        (source / f"m{i}.py").write_text(
            f'class A{i}:\n    async def f(self):\n        """Says {i}."""\n        # why\n        return {i}\n'
        )
    (source / "broken.py").write_text("def f(:\n")
    one, same = (build("code", tmp_path / str(i), source=source) for i in range(2))
    assert one == same
    file = tmp_path / "0/python/final/jsonl/train/python_train_0.jsonl.gz"
    record = json.loads(gzip.decompress(file.read_bytes()).splitlines()[0])
    assert record["func_name"].endswith(".f")
    assert record["original_string"].startswith('async def f(self):\n    """Says')


def test_lines_are_pythons_own(tmp_path: Path) -> None:
    """A form feed, U+0085 and U+2028 end a line of ``str.splitlines``, but none of Python's."""
    source = tmp_path / "mine"
    source.mkdir()
    for i in range(6):
        text = f'import os\n\x0c\ndef one_{i}(x):\n    """The \u2028 first."""\n    return "a\x85b"\n\x0c\nclass A:\n'
        text += f'    def two_{i}(self):\n        """The second."""\n        return "a\x85b"\n'
        (source / f"m{i}.py").write_bytes(text.replace("\n", ("\n", "\r\n", "\r")[i % 3]).encode())
    build("code", tmp_path / "out", source=source)
    records = [record for file in (tmp_path / "out").rglob("*.gz") for _, record in json_lines(file)]
    assert len(records) == 12
    for record in records:
        (function,) = ast.parse(record["original_string"]).body
        assert isinstance(function, ast.FunctionDef)
        assert function.name == record["func_name"].rpartition(".")[2]
        assert isinstance(function.body[-1], ast.Return)


class Interrupted(Exception):
    pass


def failing(error: BaseException) -> Progress:
    def fail(done: int, total: int) -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", [Interrupted(), KeyboardInterrupt()])
def test_an_interrupted_build_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    source = text_folder(tmp_path / "text")
    with pytest.raises(type(error)):
        build("text", tmp_path / "out", source=source, progress=failing(error))
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize("name", ["bert", "text"])
def test_a_build_that_is_ended_or_overtaken(name: str, tmp_path: Path) -> None:
    """Nothing is left of it; of two at once, one stays."""
    source = text_folder(tmp_path / "text")
    with pytest.raises(SystemExit) as ended:
        build(name, tmp_path / "out", source=source, progress=lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert ended.value.code == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["text"]

    def another(done: int, total: int) -> None:
        if not (tmp_path / "out").exists():
            build(name, tmp_path / "out", source=source, seed=1)

    with pytest.raises(UserError, match="made by another process meanwhile"):
        build(name, tmp_path / "out", source=source, progress=another)
    assert Manifest.read(tmp_path / "out").seed == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text"]


def test_short_documents_give_both_answers(tmp_path: Path) -> None:
    """Of a single sentence each, nothing follows; half of them are cut in two."""
    (tmp_path / "text").mkdir()
    text = "\n\n".join(f"the sentence {i} stands alone with its words" for i in range(200))
    (tmp_path / "text" / "a.txt").write_text(text)
    build("bert", tmp_path / "bert", source=tmp_path / "text")
    data = load("bert", path=tmp_path / "bert")
    assert 0.45 < data.batch(range(len(data))).targets["next_sentence"].float().mean() < 0.55  # type: ignore[index]


def test_held_out_text_does_not_stand_in_train(tmp_path: Path) -> None:
    """However it is written: each text is there twice, with other marks."""
    words = [f"word{i // 26}{chr(97 + i % 26)}" for i in range(40)]
    locale, code = tmp_path / "locale", tmp_path / "code"
    pairs = {f"Open {word}{'.' * n}": f"{word} auf{'!' * n}" for word in words for n in range(2)}
    catalogue(locale / "de/LC_MESSAGES/one.mo", pairs)
    code.mkdir()
    for i, word in enumerate(words):
        one = f'def {word}(x):\n    """Says {word}."""\n    return x\n'
        (code / f"m{i}.py").write_text(one + f'\n\ndef own{i}():\n    """Own {i}."""\n' + one.replace(word, words[0]))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(
        "\n\n".join(f"{word} is said{'.' * n}" for word in words for n in range(2))
    )

    def letters(text: str) -> str:
        return "".join(letter for letter in text.lower() if letter.isalnum())

    def sides(folder: str, read: Any) -> dict[str, set[str]]:
        return {
            split: {letters(text) for text in read(tmp_path / folder, split)} for split in ("train", "valid", "test")
        }

    build("text", tmp_path / "t", source=tmp_path / "text")
    build("translation", tmp_path / "p", source=locale)
    build("code", tmp_path / "c", source=code)
    place = "python/final/jsonl/{0}/python_{0}_0.jsonl.gz"
    for found in (
        sides("t", lambda at, split: (at / f"{split}.txt").read_text().split("\n\n")),
        sides("p", lambda at, split: (at / f"{split}.en").read_text().splitlines()),
        sides("p", lambda at, split: (at / f"{split}.de").read_text().splitlines()),
        sides("c", lambda at, split: [r["code"] for _, r in json_lines(at / place.format(split))]),
    ):
        assert found["valid"]
        assert found["train"].isdisjoint(found["valid"] | found["test"])


def test_a_full_disk_leaves_nothing_and_says_so(tmp_path: Path) -> None:
    source = text_folder(tmp_path / "text")
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(UserError, match=f"disk is full: {tmp_path / 'out'} was not built"):
        build("text", tmp_path / "out", source=source, progress=failing(full))
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_shard_on_a_full_disk_does_not_crash_the_process() -> None:
    """HDF5 writing to a full disk itself ends in a segmentation fault (h5py 3.16); /dev/full is always full."""
    example = bert.Example([2, 9, 3, 9, 3], [0, 0, 0, 1, 1], [1], [9], False)
    with pytest.raises(OSError, match="No space left"):
        bert._write_shard(Path("/dev/full"), [example])


def test_an_existing_folder_is_not_touched(tmp_path: Path) -> None:
    source = text_folder(tmp_path / "text")
    (tmp_path / "out").mkdir()
    build("text", tmp_path / "out", source=source)  # an empty folder is as good as none
    before = checksums(tmp_path / "out")
    with pytest.raises(UserError, match="exists already"):
        build("text", tmp_path / "out", source=source, seed=9)
    assert checksums(tmp_path / "out") == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="exists already"):
        build("text", tmp_path / "file", source=source)
    with pytest.raises(UserError, match="cannot be written"):
        build("text", tmp_path / "file" / "out", source=source)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "cod"}, "no builder 'cod'.*did you mean 'code'"),
        ({"name": "code", "limit": 0}, "--limit is 0"),
        ({"name": "code", "limit": 2}, "2 files|1 files"),
        ({"name": "code", "seed": -1}, "--seed is -1"),
        ({"name": "bert", "language": "de"}, "--language de means nothing"),
        ({"name": "text", "source": Path("/no/such/folder")}, "no data at /no/such/folder"),
        ({"name": "translation", "language": "tlh"}, "no gettext catalogue of the language 'tlh'"),
    ],
)
def test_bad_requests(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build(out=tmp_path / "out", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_bad_sources(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for name in ("text", "bert"):
        with pytest.raises(UserError, match="holds no text"):
            build(name, tmp_path / "out", source=tmp_path / "text")
    (tmp_path / "text" / "a.txt").write_text("\n\n-- \n")
    with pytest.raises(UserError, match="0 documents"):
        build("bert", tmp_path / "out", source=tmp_path / "text")
    (tmp_path / "text" / "a.txt").write_bytes(b"\x7fELF\0")
    with pytest.raises(UserError, match=r"a\.txt is a binary file"):
        build("bert", tmp_path / "out", source=tmp_path / "text")
    (tmp_path / "text" / "a.txt").write_text("One line of text.")
    with pytest.raises(UserError, match="1 documents are too few"):
        build("bert", tmp_path / "out", source=tmp_path / "text")
    root = locale_folder(tmp_path / "locale")
    file = root / "de/LC_MESSAGES/one.mo"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(UserError, match=r"one\.mo is cut short: message \d+ of \d+ ends at byte \d+ of 200"):
        build("translation", tmp_path / "out", source=root)
    file.write_bytes(b"not a catalogue at all")
    with pytest.raises(UserError, match=r"one\.mo is not a gettext catalogue"):
        build("translation", tmp_path / "out", source=root)
    with pytest.raises(UserError, match=r"language 'fr'.*there are: de"):
        build("translation", tmp_path / "out", source=root, language="fr")


def test_package_descriptions_are_prose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's control format: a stanza per package, long lines indented, a dot for a blank line. apt may pack it."""
    stanza = "Package: p{0}\nDescription-md5: 00\nDescription-en: tool number {0}\n"
    body = " A program that does what programs named {0} do, at length.\n .\n It has a second paragraph.\n\n"
    text = "".join((stanza + body).format(i) for i in range(8))
    (tmp_path / "deb.example_i18n_Translation-en.gz").write_bytes(gzip.compress(text.encode()))
    monkeypatch.setattr(corpus, "APT_LISTS", tmp_path)
    found = corpus.collect(None, lambda done, total: None)
    assert found.name.startswith("Debian package descriptions")
    assert len(found.documents) == 8
    assert found.documents[3] == (
        "tool number 3.\n\nA program that does what programs named 3 do, at length.\n\nIt has a second paragraph."
    )


@pytest.mark.rotates(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDERS)
def test_the_whole_of_this_machine(tmp_path: Path, name: str) -> None:
    if name == "translation" and not any(translation.catalogues(root, "de") for root in translation.locale_folders()):
        pytest.skip("no German catalogues on this machine")
    manifest = build(name, tmp_path / name)
    least = {
        "bert": ("training", 2000),
        "code": ("train", 3000),
        "text": ("train", 1500),
        "translation": ("train", 500),
    }
    key, number = least[name]
    assert manifest.counts[key] > number
    data = load(name, path=tmp_path / name)
    order = data.order(max_tokens=2048) if name == "translation" else data.order(batch_size=16)
    for batch in (order.batches(0)[0], order.batches(0)[-1]):
        assert len(data.batch(batch)) == 2
