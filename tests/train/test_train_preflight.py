"""What only model and data together show is told at once, by every command, before a rank starts."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from train_runs import tiny

import forked_python
from vpipe.cli.main import main
from vpipe.config import ConfigError, PipelineConfig
from vpipe.data import dataset
from vpipe.interfaces import DatasetInterface
from vpipe.models.gpt import gpt
from vpipe.registry import DATASET_REGISTRY, MODEL_REGISTRY
from vpipe.train.preflight import check
from vpipe.train.session import gather

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8, "vocab_size": 32}
HUGGING_FACE = {"name": "huggingface", "config": GPT2, "sequence_length": 8}


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    before = dict(MODEL_REGISTRY._entries), dict(DATASET_REGISTRY._entries)
    yield
    MODEL_REGISTRY._entries, DATASET_REGISTRY._entries = before


def told(config: dict[str, Any], **options: bool) -> list[str]:
    try:
        checked = PipelineConfig.from_dict(config)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return [str(problem) for problem in check(checked, **options).problems]


def small(changes: dict[str, Any]) -> dict[str, Any]:
    config = tiny({key: value for key, value in changes.items() if key != "model"})
    return config | ({"model": changes["model"]} if "model" in changes else {})


@pytest.mark.parametrize(
    ("changes", "sentences"),
    [
        ({"model.vocab_size": 20}, ["model.vocab_size is 20, but the data set synthetic has 32 token ids"]),
        ({"model.num_heads": 3}, ["model.hidden_size 16 is not divisible by model.num_heads 3"]),
        (
            {"model.num_heads": 3, "model.vocab_size": 20},
            ["model.hidden_size 16 is not divisible", "model.vocab_size is 20"],
        ),
        ({"model.extra": {"depth": 3}}, ["model.depth is not an option of 'gpt'"]),
        ({"dataset.extra.kind": "translation"}, ["the data set synthetic does not fit the model gpt"]),
        ({"model.name": "bert"}, ["the data set synthetic does not fit the model bert: the model reads tokens"]),
        ({"parallel.model_parallel_size": 5}, ["4 layers cannot fill 5 stages"]),
        ({"parallel.partition": [1, 2]}, ["parallel.partition [1, 2] holds 3 layers, but the model gpt has 4"]),
        ({"dataset.batch_size": 64}, ["64"]),
        ({"parallel.device": "cuda:7"}, ["the device 'cuda:7' is not on this machine"]),
        ({"dataset.extra.kind": "gtp"}, ["there are no synthetic data for 'gtp'"]),
        (
            {
                "dataset.extra.kind": "gtp",
                "model.extra": {"depth": 3},
                "parallel.scheduler": "interleaved",
                "parallel.stages_per_rank": 7,
            },
            ["there are no synthetic data", "model.depth is not an option"],
        ),
        (
            {"model": HUGGING_FACE | {"config": GPT2 | {"vocab_size": 20}}},
            ["the data set has 32 tokens but the gpt2 config has vocab_size 20"],
        ),
        (
            {"model": HUGGING_FACE | {"config": GPT2, "sequence_length": 48}},
            ["model.sequence_length is 48 but the gpt2 config has"],
        ),
        ({"model": HUGGING_FACE | {"config": GPT2 | {"model_type": "gpt9"}}}, ["gpt9"]),
        ({"model": HUGGING_FACE, "dataset.extra.kind": "bert"}, ["the loss of the model huggingface cannot use"]),
    ],
)
def test_a_mistake_of_two_sections_is_told(changes: dict[str, Any], sentences: list[str]) -> None:
    found = told(small(changes))
    assert len(found) == len(sentences), found
    for sentence in sentences:
        assert any(sentence in each for each in found), found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": HUGGING_FACE},
        {"parallel.scheduler": "pipedream"},
        {"parallel.replicas": [2, 1], "parallel.scheduler": "pipedream"},
        {"parallel.data_parallel_size": 2, "parallel.scheduler": "zb-h1"},
        {"model.name": "bert", "dataset.extra.kind": "bert"},
        {"model.name": "llama"},
        {"model.name": "translation", "dataset.extra.kind": "translation"},
        {"training.precision": "bf16"},
    ],
)
def test_nothing_is_told_of_what_trains(changes: dict[str, Any]) -> None:
    assert told(small(changes)) == []


class Long(DatasetInterface):
    """Sequences of twelve tokens, whatever the config says, and ids and labels as a test wants them."""

    length, largest, label = 12, 31, 31

    def load_dataset(self) -> Sequence[Any]:
        return list(range(32))

    def process_batch(self, batch: Any) -> Mapping[str, Any]:
        tokens = torch.full((len(batch), self.length), self.largest)
        return {"inputs": tokens, "labels": torch.full((len(batch), self.length), self.label)}

    def get_vocab_size(self) -> int:
        return 32


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"length": 12}, "a sequence has 12 tokens but model.sequence_length is 8"),
        ({"length": 8, "largest": 32}, "has the token id 32, but the model's vocabulary is 32 (ids 0 to 31)"),
        ({"length": 8, "label": 32}, "cannot use the targets of the data set mine"),
        ({"length": 8}, None),
    ],
)
def test_what_the_first_rows_show(facts: dict[str, int], sentence: str | None) -> None:
    DATASET_REGISTRY.register("mine")(type("Mine", (Long,), facts))
    found = told(tiny(dataset={"name": "mine", "extra": {}}))
    assert [sentence in each for each in found] == ([True] if sentence else []), found


def test_own_code_that_fails_here_is_left_to_the_ranks() -> None:
    @DATASET_REGISTRY.register("broken")
    class Broken(Long):
        def load_dataset(self) -> Sequence[Any]:
            raise RuntimeError("needs the cluster")

    assert told(tiny(dataset={"name": "broken", "extra": {}})) == []


WRONG = {"model.vocab_size": 20, "parallel.partition": [1, 2]}


def written(tmp_path: Path, changes: dict[str, Any]) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(tiny(changes)))
    return file


def fails(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def fresh_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("fresh_directory")
@pytest.mark.parametrize(
    ("command", "more"),
    [("train", []), ("parity", []), ("submit", ["--dry-run"]), ("submit", ["--to", "ray", "--dry-run"])],
)
def test_commands_tell_all_of_it(
    command: str, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = fails(capsys, [command, str(written(tmp_path, WRONG)), *more])
    assert "2 problems in the config" in said
    assert "model.vocab_size is 20" in said
    assert "holds 3 layers" in said
    assert not list(tmp_path.glob("runs/*/metrics.jsonl"))
    if command == "train":  # on the page the problems stay apart
        sentence = json.loads(next(tmp_path.glob("runs/2*/summary.json")).read_text())["ending"]["sentence"]
        assert sentence.startswith("2 problems in the config: (1) ")
        assert " (2) " in sentence


@pytest.mark.usefixtures("fresh_directory")
@pytest.mark.parametrize("own", [False, True])
def test_a_run_uses_what_its_check_has_gathered(own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process. What code of the user's own has made, which may remember the check, is made anew."""
    made: list[str] = []
    load = dataset.load

    def counted(name: str, **options: Any) -> Any:
        made.append(name)
        return load(name, **options)

    monkeypatch.setattr(dataset, "load", counted)
    if own:
        MODEL_REGISTRY.register("mine")(gpt)
    changes = {"training.max_iterations": 1, "model.name": "mine" if own else "gpt"}
    with pytest.raises(SystemExit) as end:
        main(["train", str(written(tmp_path, changes)), "--quiet"])
    assert end.value.code == 0
    assert made == ["synthetic"] * (1 + own)


def test_a_check_that_found_something_hands_nothing_on() -> None:
    assert check(PipelineConfig.from_dict(tiny({}))).materials is not None
    wrong = check(PipelineConfig.from_dict(tiny({"parallel.partition": [1, 2]})))
    assert wrong.problems
    assert wrong.materials is None


@pytest.mark.usefixtures("fresh_directory")
def test_a_typing_error_does_not_hide_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The wrong key stands in one section; what the sound ones show together is told beside it, with its line."""
    said = fails(capsys, ["train", str(written(tmp_path, {"model.vocab_size": 20, "training.epoch": 1}))])
    assert "training.epoch is an unknown key" in said
    assert "line" in said
    assert "model.vocab_size is 20" in said


@pytest.mark.usefixtures("fresh_directory")
def test_a_wrong_section_is_not_judged_further(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"model.vocab_size": 20, "model.num_layer": 2}
    said = fails(capsys, ["train", str(written(tmp_path, changes))])
    assert "model.num_layer is an unknown key" in said
    assert "vocab_size is 20" not in said


@pytest.mark.usefixtures("fresh_directory")
def test_a_job_whose_data_are_elsewhere_is_shown_with_a_warning_and_not_submitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, {"dataset.name": "text", "dataset.path": "/far/away", "dataset.extra": {}})
    with pytest.raises(SystemExit) as end:
        main(["submit", str(file), "--dry-run"])
    assert end.value.code == 0
    assert "dataset.path /far/away is not on this machine" in capsys.readouterr().err
    for engine, remedy in (("slurm", "--dry-run | sbatch"), ("ray", "the same on all machines")):
        said = fails(capsys, ["submit", str(file), "--to", engine])
        assert "dataset.path /far/away is not on this machine, and no job was submitted; mend the path" in said
        assert remedy in said


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "plan"])
def test_no_rank_starts(command: str, tmp_path: Path) -> None:
    """By processes: the zygote asks before it forks. A plug-in that prints and counts itself shows who ran it."""
    plugin = tmp_path / "mine.py"
    plugin.write_text("import os\nif os.environ.get('RANK') is not None:\n    open(f'rank{os.getpid()}', 'w')\n")
    file = written(tmp_path, WRONG | {"parallel.transport": "shm", "plugins": [str(plugin)]})
    words = [forked_python.program(), "-m", "vpipe", command, str(file)]
    done = subprocess.run(words, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=200)
    assert done.returncode == 2, done.stderr
    assert "model.vocab_size is 20" in done.stderr
    assert ("holds 3 layers" in done.stderr) == (command == "train")
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("rank*"))


def test_what_a_check_has_gathered_counts_what_a_rank_counts(tmp_path: Path) -> None:
    """The runs of this process train on it: their FLOPs, of which MFU is made, are those of ranks that gather anew."""
    config = PipelineConfig.from_dict(tiny({"training.max_iterations": 1}))
    gathered = check(config).materials
    assert gathered is not None
    (mine, theirs) = (materials.feed.read([(0, 0)]).counts.flops for materials in (gathered, gather(config)))
    assert mine == theirs > 0
