"""One batch is one batch: what the ends of a pipeline read by themselves is the same, or the step ends in a sentence."""

from __future__ import annotations

import json
import random
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from train_runs import equal, run, tiny

import forked_python
from vpipe.config import ModelConfig, PipelineConfig
from vpipe.config.load import load as load_config
from vpipe.data.dataset import Batch, DataSet
from vpipe.errors import UserError
from vpipe.interfaces import adapt_dataset, registered_model
from vpipe.models.model import run as run_model
from vpipe.registry import DATASET_REGISTRY
from vpipe.train.checkpoints.export import export
from vpipe.train.feed import Feed, Reader, UnitsWanted
from vpipe.train.session import gather, load_data, open_session

PLUGIN = str(Path(__file__).with_name("own_sets.py"))


def job(name: str, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    own = {"plugins": [PLUGIN], "dataset.name": name, "dataset.extra": {}, "model.vocab_size": 32}
    return tiny(own | {"dataset.test_size": 0.0, "training.max_iterations": 6} | (changes or {}))


def read(config: dict[str, Any], count: int = 6) -> list[int]:
    """The checksums of the units of the first iterations, as a rank whose generators stand anywhere reads them."""
    torch.manual_seed(torch.seed())
    np.random.seed(None)
    random.seed()
    session = open_session(PipelineConfig.from_dict(config))
    found, position = [], (0, 0)
    for _ in range(count):
        units = session.read([position])
        assert units is not None
        found += [unit.checksum for unit in units.batches]
        position = session.feed.next(position)
    session.close()
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["drawn", "streamed"])
def test_random_numbers_are_the_same_for_every_reader(name: str, workers: int) -> None:
    """Also of one that reads by processes, and of a stream."""
    alone = read(job(name))
    assert len(set(alone)) > 20, "units differ"
    assert read(job(name, {"dataset.num_workers": workers})) == alone
    assert read(job(name, {"training.seed": 1})) != alone


def test_reading_leaves_random_numbers_as_they_were() -> None:
    feed = open_session(PipelineConfig.from_dict(job("drawn"))).feed
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    expected = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    feed.read([(0, 0)])
    assert (torch.rand(1), np.random.rand(), random.random()) == expected


@pytest.mark.parametrize("name", ["drawn", "streamed"])
def test_a_resumed_run_draws_what_it_would_have_drawn(name: str, tmp_path: Path) -> None:
    whole = run(job(name), tmp_path / "whole")
    run(job(name, {"training.max_iterations": 3, "checkpoint.interval": 3}), tmp_path / "part")
    rest = run(job(name), tmp_path / "rest", resume=tmp_path / "part")
    assert equal(rest.weights, whole.weights)
    assert rest.losses == whole.losses[3:]


def test_a_stream_is_read_to_its_end_and_again() -> None:
    data = load_data(PipelineConfig.from_dict(job("streamed")))
    assert data.valid is None
    rows = data.batch(range(48)).inputs
    assert data.batch([45]).inputs.shape == (1, 8)
    assert len({int(row[0]) for row in rows}) > 8


def test_a_stream_without_an_end_or_without_anything_is_told() -> None:
    with pytest.raises(UserError, match=r"has no length: set training\.max_iterations"):
        load_data(PipelineConfig.from_dict(job("streamed", {"training.max_iterations": -1})))
    empty = adapt_dataset(DATASET_REGISTRY.create("empty_stream", None, 8), rows=8)
    with pytest.raises(UserError, match="an iterable without any example"):
        empty.batch([0])


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "-m")


def started(
    vpipe: Any, tmp_path: Path, config: dict[str, Any], *more: str, torchrun: bool = False
) -> tuple[int, str, list[float]]:
    """Exit code, what was said, and losses, of ranks that are processes."""
    config["parallel"]["transport"] = "auto"
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config))
    words = ("train", str(tmp_path / "job.yaml"), "--output-dir", str(tmp_path / "run"), *more)
    if torchrun:
        ranks = config["parallel"]["model_parallel_size"] * config["parallel"].get("data_parallel_size", 1)
        launched = (forked_python.program(), *TORCHRUN, f"--nproc_per_node={ranks}", "vpipe", *words)
        launched = (*launched[:4], launched[5], launched[4], *launched[6:])
        done = subprocess.run(launched, capture_output=True, text=True, timeout=200)
    else:
        done = vpipe(*words, timeout=200)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() if done.returncode == 0 else []
    losses = [line["loss"] for line in map(json.loads, lines) if line["kind"] == "train"]
    return done.returncode, done.stdout + done.stderr, losses


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["drawn", "streamed"])
def test_both_ends_read_the_same(name: str, workers: int, vpipe: Any, tmp_path: Path) -> None:
    config = job(name, {"dataset.num_workers": workers})
    code, said, losses = started(vpipe, tmp_path, config)
    assert code == 0, said
    assert losses == run(job(name), tmp_path / "here").losses


OTHER_DATA = {
    "length": {"model.sequence_length": 4},
    "share": {"dataset.test_size": 0.5},
}
SAME_DATA: tuple[dict[str, Any], ...] = (
    {},
    {"dataset.batch_size": 8},
    {"training.seed": 3},
    {"dataset.num_workers": 1},
)


@pytest.mark.slow
@pytest.mark.rotates(3)
@pytest.mark.parametrize("seed", range(18))
def test_a_run_goes_on_with_what_is_left_or_says_why_not(seed: int, vpipe: Any, tmp_path: Path) -> None:
    """Two launchers, replicas and other batches before and after: no example is lost or read twice."""
    chance = random.Random(seed)
    few = {"dataset.extra": {"seen": str(tmp_path)}, "dataset.batch_size": 4, "training.num_microbatches": 2}
    few |= {
        "training.max_iterations": 2,
        "checkpoint.interval": 2,
        "parallel.data_parallel_size": chance.choice([1, 2]),
    }
    launchers = chance.choice([False, True]), chance.choice([False, True])
    code, said, losses = started(vpipe, tmp_path, job("noted", few), torchrun=launchers[0])
    assert (code, len(losses)) == (0, 2), said
    other = chance.choice([None, None, *OTHER_DATA])
    after = {"training.max_iterations": -1, "training.epochs": 1, "parallel.data_parallel_size": chance.choice([1, 2])}
    same = chance.choice(SAME_DATA)
    changes = few | after | (OTHER_DATA[other] if other else same)
    code, said, losses = started(vpipe, tmp_path, job("noted", changes), "--resume", "latest", torchrun=launchers[1])
    if other:
        assert (code, "Traceback" in said) == (1 if launchers[1] else 2, launchers[1]), said
        assert any(words in said for words in ("other data", "model.sequence_length is 4", "another model")), said
        return
    assert code == 0, said
    if "training.seed" in same or "dataset.num_workers" in same:  # another order; some are read ahead
        return
    rows = [each for file in tmp_path.glob("seen.*") for each in read_rows(file)]
    assert set(Counter(rows).values()) == {2}, "by the first rank and the last"
    assert len(set(rows)) > 30 - changes["dataset.batch_size"] * changes["parallel.data_parallel_size"]  # type: ignore[operator]


def read_rows(file: Path) -> list[int]:
    """What a rank has read; the check before a run makes a single unit."""
    lines = file.read_text().splitlines()
    return [row for line in lines for row in json.loads(line)] if len(lines) > 1 else []


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "replicas", [{"data_parallel_size": 2}, {"replicas": [2, 1], "scheduler": "pipedream"}], ids=str
)
def test_a_rank_reads_the_units_of_its_replica(replicas: Any, workers: int, vpipe: Any, tmp_path: Path) -> None:
    """Each unit is made by the ranks that run it first and last, and by no other."""
    few = {"dataset.extra": {"seen": str(tmp_path)}, "dataset.batch_size": 8, "training.max_iterations": 3}
    config = job(
        "noted", few | {"dataset.num_workers": workers} | {f"parallel.{key}": replicas[key] for key in replicas}
    )
    code, said, losses = started(vpipe, tmp_path, config)
    assert code == 0, said
    seen = [line for file in tmp_path.glob("seen.*") for line in file.read_text().splitlines()]
    assert len(losses) >= 2
    units = len(losses) * 4 * replicas.get("data_parallel_size", 1)
    most = 2 + (2 * units if not workers else 2 * 3 * units)  # the check before a run makes one; workers read ahead
    assert 2 * units <= len(seen) <= most
    config["parallel"]["transport"] = "inprocess"
    assert losses == run(config, tmp_path / "here").losses


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clock", "set_order"])
def test_ends_that_read_differently_are_told(name: str, vpipe: Any, tmp_path: Path) -> None:
    code, said, _ = started(vpipe, tmp_path, job(name))
    assert code == 2, said
    assert "Traceback" not in said
    for word in ("ranks 0 and 1", "dataset.read_by: one"):
        assert word in said, said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clock", "set_order"])
@pytest.mark.parametrize("changes", [{}, {"training.gradient_accumulation": 2}, {"dataset.num_workers": 1}], ids=str)
def test_what_cannot_be_read_twice_is_read_by_one(
    name: str, changes: dict[str, Any], vpipe: Any, tmp_path: Path
) -> None:
    code, said, losses = started(vpipe, tmp_path, job(name, {"dataset.read_by": "one"} | changes))
    assert code == 0, said
    assert len(losses) == 6


def test_a_last_stage_that_is_a_unit_ahead_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks are of this process; the last one is told that it has read the next unit each time."""
    session = open_session(PipelineConfig.from_dict(job("drawn")))
    units, last = session.read([(0, 0)]), session.pipeline.engines[-1]
    assert units is not None
    session.train_step(units)
    fed = last._fed

    def ahead(compiled: Any, job: Any) -> Any:
        return fed(compiled, replace(job, checksums=[*job.checksums[1:], 1]))

    monkeypatch.setattr(last, "_fed", ahead)
    for step in (session.train_step, session.evaluate):
        with pytest.raises(UserError, match="microbatch 0"):
            step(units)
    session.close()


@pytest.mark.parametrize(
    "other",
    [
        ({"a": [1, 2]}, [3, 4]),
        ({"a": [2, 1]}, [4, 3]),
        ({"a": [[1], [2]]}, [3, 4]),
        ({"b": [1, 2]}, [3, 4]),
        ({"a": [1, 2]}, [3, -100]),
        ({"a": [1.0, 2.0]}, [3, 4]),
    ],
    ids=str,
)
def test_a_checksum_is_of_every_number_name_and_shape(other: Any) -> None:
    class One(DataSet):
        vocab_size = 8

        def __init__(self, inputs: Any, labels: Any) -> None:
            self.inputs, self.labels = {name: torch.tensor(row) for name, row in inputs.items()}, torch.tensor(labels)

        def __len__(self) -> int:
            return 1

        def batch(self, indices: Sequence[int]) -> Batch:
            return Batch(self.inputs, self.labels)

    def checksum(*values: Any) -> int:
        return Reader(One(*values), len, 0)[UnitsWanted(0, 0, [[0]])][0].checksum  # type: ignore[index]

    known = checksum({"a": [1, 2]}, [4, 3])
    assert checksum({"a": [1, 2]}, [4, 3]) == known != checksum(*other)
    assert 0 < known < 2**53


WORDS = "a few words of the text number {}, which says nothing else than that it is the one of {}.\n\n"


def text_job(folder: Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    file = folder / "a.txt"
    if not file.exists():
        file.write_text("".join(WORDS.format(i, i * i) for i in range(60)))
    own = {
        "dataset.name": "text",
        "dataset.path": str(folder),
        "dataset.extra": {"tokenizer": "bpe", "vocab_size": 300},
    }
    return tiny(own | {"training.max_iterations": 3, "checkpoint.interval": 3} | (changes or {}))


def paragraph(folder: Path) -> None:
    file = folder / "a.txt"
    file.write_text(
        "Quite another paragraph in front, whose words are rare: xylophone, xylophone.\n\n" + file.read_text()
    )


def cut_short(folder: Path) -> None:
    file = folder / "a.txt"
    file.write_text(file.read_text()[:-5])


def add_a_file(folder: Path) -> None:
    (folder / "b.txt").write_text(WORDS.format(7, 8))


def nothing(folder: Path) -> None:
    """The config alone has changed."""


CHANGES: dict[str, tuple[dict[str, Any], Callable[[Path], None], str]] = {
    "a paragraph": ({}, paragraph, r"tokenizer \w{8} → \w{8}"),
    "a letter": ({}, cut_short, "files"),
    "a file": ({}, add_a_file, "files"),
    "the length": ({"model.sequence_length": 4}, nothing, "sequence length 8 → 4"),
    "the share": ({"dataset.test_size": 0.3}, nothing, "held out"),
    "the split": ({"dataset.split_seed": 3}, nothing, "sample"),
    "the tokenizer": (
        {"dataset.extra": {"tokenizer": "char"}, "model.vocab_size": 300},
        nothing,
        r"tokenizer \w{8} → ",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_checkpoint_knows_its_data(name: str, tmp_path: Path) -> None:
    changes, change, word = CHANGES[name]
    whole = {"model.vocab_size": 300}
    run(text_job(tmp_path / "text", whole), tmp_path / "part")
    change(tmp_path / "text")
    config = text_job(tmp_path / "text", whole | {"training.max_iterations": 5} | changes)
    if name != "the length":  # else that is another model
        with pytest.raises(UserError) as caught:
            run(config, tmp_path / "refused", resume=tmp_path / "part")
        assert re.search(word, caught.value.sentence)
        for told in ("was trained on other data", "dataset.may_differ: true", "tokenizer.json"):
            assert told in caught.value.sentence
        config["dataset"]["may_differ"] = True
        found = run(config, tmp_path / "rest", resume=tmp_path / "part")
        assert "was trained on other data" in found.said


def test_the_same_data_elsewhere_is_the_same(tmp_path: Path) -> None:
    """Another folder, other batches, another seed of the training."""
    whole = run(text_job(tmp_path / "text"), tmp_path / "part")
    changes = {"training.max_iterations": 5, "dataset.batch_size": 4, "training.seed": 4}
    again = run(text_job(tmp_path / "copy", changes), tmp_path / "rest", resume=tmp_path / "part")
    assert len(again.losses) == 2
    assert "other data" not in again.said
    assert whole.trainer.session.data_facts == again.trainer.session.data_facts


def test_a_learnt_tokenizer_goes_with_run_checkpoint_and_export(tmp_path: Path) -> None:
    """And brings its ids to a text that has changed."""
    made = run(text_job(tmp_path / "text"), tmp_path / "part")
    (point,) = (tmp_path / "part" / "checkpoints").glob("iteration-*")
    export(tmp_path / "part", tmp_path / "out")
    texts = {(place / "tokenizer.json").read_text() for place in (tmp_path / "part", point, tmp_path / "out")}
    assert texts == {made.trainer.session.data.tokenizer.to_str(pretty=True)}
    paragraph(tmp_path / "text")
    extra = {"tokenizer": str(point / "tokenizer.json")}
    config = text_job(tmp_path / "text", {"dataset.extra": extra, "dataset.may_differ": True})
    kept = open_session(PipelineConfig.from_dict(config))
    assert kept.data_facts["tokenizer"] == made.trainer.session.data_facts["tokenizer"]
    kept.close()


def test_a_tokenizer_lies_with_the_config_or_with_the_model(tmp_path: Path) -> None:
    """Where it is named, seen from the config; else the model's own, whose ids its weights know."""
    own = text_job(tmp_path / "text")
    with closing(open_session(PipelineConfig.from_dict(own)).feed) as feed:
        learnt = feed._data.tokenizer
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(GPT2 | {"vocab_size": 300}))
    learnt.save(str(tmp_path / "model" / "tokenizer.json"))
    learnt.save(str(tmp_path / "mine.json"))
    small = {"path": "text", "batch_size": 4, "name": "text"}
    for place, extra in (({"config": "model"}, {}), ({"config": GPT2}, {"tokenizer": "mine.json"})):
        changes = {"model": {"name": "huggingface", "sequence_length": 8, **place}, "dataset": small | {"extra": extra}}
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(tiny(changes)))
        loaded = load_config(tmp_path / "job.yaml").config
        (tmp_path / "text" / "a.txt").write_text("other words, of which another would be learnt " * 40)
        assert load_data(loaded).tokenizer.to_str() == learnt.to_str()


def test_the_first_line_says_layers_and_width(tmp_path: Path) -> None:
    """Those that the model has of its own, too."""
    found = run(tiny({"training.max_iterations": 1}), tmp_path)
    assert found.said.startswith("gpt (2 × 16, ")
    sizes = {"cpm-large": (32, 2560), "cpm-medium": (24, 1024), "bert": (24, 1024), "gpt2": (12, 768)}
    for name, (num_layers, width) in sizes.items():
        made = registered_model(ModelConfig(name=name), 100)
        assert (made.num_layers, made.hidden_size) == (num_layers, width)


def test_a_batch_without_a_label_is_told(tmp_path: Path) -> None:
    found = run(job("unlabelled", {"dataset.batch_size": 2, "training.num_microbatches": 2}), tmp_path / "run")
    empty = [line["iteration"] for line in found.lines if line["loss"] == 0]
    assert empty
    assert [number for number in empty if f"iteration {number} has no label that counts" in found.said] == empty


def pairs(folder: Path) -> dict[str, Any]:
    """Parallel text whose held-out sentences are of 1 to 40 letters, and batches by tokens."""
    folder.mkdir()
    for split, count in (("train", 40), ("valid", 120)):
        for language in ("de", "en"):
            lines = ["ab" * (1 + i % 20) for i in range(count)]
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n")
    extra = {"tokenizer": "char", "source_language": "de"}
    own = {"dataset": {"name": "translation", "path": str(folder), "max_tokens": 100, "extra": extra}}
    small = {"model.name": "translation", "model.sequence_length": 64, "training.num_microbatches": 2}
    return tiny(own | small | {"training.max_iterations": 2, "training.evaluation_interval": 2})


def test_an_evaluation_is_spread_over_the_held_out_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By tokens it read the shortest sentences alone."""
    config = pairs(tmp_path / "pairs")
    config["training"]["evaluation_batches"] = 4
    lengths: list[int] = []
    unit = Reader._unit

    def watched(reader: Reader, epoch: int, number: int, examples: Sequence[int]) -> Any:
        if len(reader.data) == 120:
            assert reader.data.lengths is not None
            lengths.extend(int(reader.data.lengths[i]) for i in examples)
        return unit(reader, epoch, number, examples)

    monkeypatch.setattr(Reader, "_unit", watched)
    found = run(config, tmp_path / "run")
    (line,) = [line for line in found.metrics if line["kind"] == "evaluation"]
    assert (line["examples"], line["targets"]) == (len(lengths), sum(lengths))
    assert min(lengths) < 6
    assert max(lengths) > 30
    assert f"over {len(lengths)} examples, {sum(lengths):,} targets" in found.said


@pytest.mark.parametrize("kind", ["t5", "mt5", "umt5", "pegasus", "marian"])
def test_padding_is_not_trained_on(kind: str, tmp_path: Path) -> None:
    """The data pad with 1, these models with another id; with the data's all is well."""
    config = pairs(tmp_path / "pairs")
    config["model"] = two_sided(kind) | {"sequence_length": 64}
    del config["model"]["config"]["pad_token_id"], config["model"]["config"]["vocab_size"]
    with pytest.raises(UserError, match=r"pad_token_id: 1|has pad_token_id 58100"):
        gather(PipelineConfig.from_dict(config))
    config["model"]["config"]["pad_token_id"] = 1
    made = gather(PipelineConfig.from_dict(config))
    (unit, *_) = made.feed.read([(0, 0)]).batches
    assert unit.counts.num_targets == int((unit.targets != 1).sum())
    made.feed.close()


SMALL = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "sequence_length": 8}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 32}
EVERY = {
    "gpt": ({"model.extra": {"dropout": 0.0}}, "gpt"),
    "llama": ({}, "gpt"),
    "translation": ({"model.extra": {"dropout": 0.0, "label_smoothing": 0.0}}, "translation"),
    "huggingface": ({"model": {"name": "huggingface", "config": GPT2, "sequence_length": 8}}, "gpt"),
    "bert": ({"model.extra": {"dropout": 0.0}}, "bert"),
}


def two_sided(kind: str) -> dict[str, Any]:
    """A Hugging Face model of an encoder and a decoder that pads as our data do."""
    sizes: dict[str, Any] = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 64}
    sizes = {"d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2} if "t5" in kind else sizes
    config = {"model_type": kind, "d_model": 16, "pad_token_id": 1, "vocab_size": 32, **sizes}
    return {"name": "huggingface", "sequence_length": 8, "config": config}


EVERY |= {kind: ({"model": two_sided(kind)}, "translation") for kind in ("t5", "mt5", "umt5", "pegasus", "marian")}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", EVERY)
def test_units_add_up_to_the_whole_batch_in_plain_torch(name: str, padded: bool) -> None:
    """Loss and gradients, also where some units have few labels that count; of BERT each part by its own count."""
    changes, kind = EVERY[name]
    extra = {"kind": kind, "vocab_size": 32, "num_examples": 16}
    config = tiny({"model": {"name": name, **SMALL}, "dataset.extra": extra} | changes)
    made = gather(PipelineConfig.from_dict(config))
    feed, modules = made.feed, [module.eval() for module in made.model.build()]
    ignored = made.model.loss.ignored  # type: ignore[attr-defined]
    batch = made.data.batch

    def thinned(examples: Sequence[int]) -> Batch:
        inputs, targets = batch(examples)
        labels = targets["masked_labels"] if isinstance(targets, dict) else targets
        for row, example in enumerate(examples):
            labels[row, : int(example) % 8] = ignored
            if isinstance(targets, dict) and example % 3:
                targets["next_sentence"][row] = ignored
        return Batch(inputs, targets)

    if padded:
        made.data.batch = thinned  # type: ignore[method-assign]
    units = feed.read([(0, 0)])
    assert sum(units.shares()) == pytest.approx(1)

    def gradients(loss: torch.Tensor) -> list[torch.Tensor]:
        wanted = [p for module in modules for p in module.parameters() if p.requires_grad]
        found = torch.autograd.grad(loss, wanted, allow_unused=True)
        return [each for each in found if each is not None]

    read = zip(units.batches, units.weighed(), units.shares(), strict=True)
    parts = [share * made.model.loss(run_model(made.model.layers, modules, b.inputs), t) for b, t, share in read]
    joined, targets = (
        torch.utils._pytree.tree_map(lambda *each: torch.cat(each), *sides)
        for sides in ([b.inputs for b in units.batches], [b.targets for b in units.batches])
    )
    output = run_model(made.model.layers, modules, joined)
    said = output if isinstance(output, tuple) else (output,)
    labels = [*targets.values()] if isinstance(targets, dict) else [targets]
    pairs = list(zip(said, labels, strict=False))
    whole = sum(
        torch.nn.functional.cross_entropy(a.flatten(0, -2), b.flatten(), ignore_index=ignored) for a, b in pairs
    )
    assert isinstance(whole, torch.Tensor)
    assert units.counts.num_targets == made.model.count(targets) == int((labels[0] != ignored).sum())
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-6)  # type: ignore[union-attr]
    for one, other in zip(gradients(sum(parts)), gradients(whole), strict=True):  # type: ignore[arg-type]
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    feed.close()


MIXTRAL = {"model_type": "mixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
MIXTRAL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize("name", [*EVERY, "mixtral"])
def test_flops_are_what_torch_counts(name: str) -> None:
    """Also of experts, and of pairs whose sides have other lengths than the model's."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    mixtral = {"model": {"name": "huggingface", "config": MIXTRAL | {"vocab_size": 32}, "sequence_length": 8}}
    changes, kind = EVERY.get(name, (mixtral, "gpt"))
    extra = {"kind": kind, "vocab_size": 32, "num_examples": 16}
    made = gather(PipelineConfig.from_dict(tiny({"model": {"name": name, **SMALL}, "dataset.extra": extra} | changes)))
    batch = made.data.batch

    def shorter(examples: Sequence[int]) -> Batch:
        inputs, targets = batch(examples)
        if kind != "translation":
            return Batch(inputs, targets)
        assert isinstance(inputs, dict)
        return Batch({"source": inputs["source"][:, :5], "target_in": inputs["target_in"][:, :3]}, targets[:, :3])  # type: ignore[index]

    made.data.batch = shorter  # type: ignore[method-assign]
    unit = made.feed.read([(0, 0)]).batches[0]
    modules = made.model.build()
    for part in (part for module in modules for part in module.modules() if hasattr(part, "config")):
        part.config._experts_implementation = "eager"  # torch counts no grouped products
    run_model(made.model.layers, modules, unit.inputs)  # the first time, a part of the hub's looks at what it gives
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        made.model.loss(run_model(made.model.layers, modules, unit.inputs), unit.targets).backward()
    assert unit.counts.flops == pytest.approx(counter.get_total_flops(), rel=1e-9)
    made.feed.close()


@pytest.mark.rotates(8)
@pytest.mark.parametrize("seed", range(24))
def test_any_readers_read_the_same_and_every_example_once(seed: int) -> None:
    """Two ranks with other workers; a run that goes on with other batches, replicas and workers."""
    chance = random.Random(seed)
    name, seen = chance.choice(["drawn", "streamed"]), []

    def feed_with(rows: int, replicas: int, workers: int) -> Feed:
        changes = {"dataset.batch_size": rows, "training.num_microbatches": 2, "training.max_iterations": 99}
        data = load_data(PipelineConfig.from_dict(job(name, changes | {"parallel.data_parallel_size": replicas})))
        batch = data.batch

        def noted(examples: Sequence[int]) -> Batch:
            seen.extend(examples)
            return batch(examples)

        if not workers:
            data.batch = noted  # type: ignore[method-assign]
        sizes = {"num_microbatches": 2, "num_replicas": replicas, "batch_size": rows, "num_workers": workers}
        return Feed(data, len, seed=seed, **sizes)  # type: ignore[arg-type]

    sizes = chance.choice([2, 4, 8]), chance.choice([1, 2])
    one, other = feed_with(*sizes, 0), feed_with(*sizes, chance.choice([1, 2]))
    position = (0, 0)
    for _ in range(chance.randrange(1, 1 + min(3, one.num_batches))):
        units = [[unit.checksum for unit in feed.read([position]).batches] for feed in (one, other)]
        assert units[0] == units[1]
        position = (position[0], position[1] + 1)
    other.close()
    rest = feed_with(chance.choice([2, 4, 8]), chance.choice([1, 2]), 0)
    position = rest.begin(position, one.read_before(position))
    for _ in range(min(4, rest.batches_of(position[0]) - position[1])):
        if position[0]:
            break
        rest.read([position])
        position = rest.next(position)
    assert len(set(seen)) == len(seen)
    if name == "streamed":
        assert sorted(seen) == list(range(len(seen)))
